"""The target as far as an export needs it, without its weights: config, tokenizer, generation settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from distill.student import load_tokenizer, resolve
from speculative.errors import UserError


@dataclass(frozen=True)
class TargetSide:
    """The target as far as an export needs it: no weights."""

    name: str  # hub id, or the absolute path of a directory
    config: Any
    tokenizer: Any
    generation: GenerationConfig


def load_target_side(target: str, trust_remote_code: bool = False, revision: str | None = None) -> TargetSide:
    """Config, tokenizer and generation config of the target.

    Raises:
        UserError: when the directory or hub id cannot be read.

    """
    name = resolve(target)
    name = str(Path(name).resolve()) if Path(name).is_dir() else name
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, revision=revision)
    except (OSError, ValueError) as error:
        fix = (
            "give a model directory" if Path(name).is_dir() else "give a local directory, or offline fill the hub cache"
        )
        raise UserError(f"target {target} cannot be read: {str(error).splitlines()[0]}; {fix}") from error
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code, revision=revision)
    try:
        generation = GenerationConfig.from_pretrained(name, revision=revision or "main")
    except OSError:  # many targets have none; the model config then holds the ids
        generation = GenerationConfig.from_model_config(config)
    return TargetSide(name, config, tokenizer, generation)


def checkpoint_dtype(config: Any) -> torch.dtype:
    """The dtype a model is saved, and by default served, in. None in a config means float32 in this library."""
    return getattr(config.get_text_config(), "dtype", None) or torch.float32


def take_over_ids(model: Any, target_side: TargetSide, gamma: int, sampling: dict[str, Any] | None) -> None:
    """Give the draft the target's bos, eos and pad ids, and a generation config that serves as measured."""
    ids = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        places = (target_side.generation, target_side.config.get_text_config(), target_side.tokenizer)
        ids[name] = next((v for v in (getattr(place, name, None) for place in places) if v is not None), None)
        setattr(model.config.get_text_config(), name, ids[name])
    # transformers reads these three from the DRAFT's generation config, and its default gate (0.4) ends blocks early.
    assisted = {
        "num_assistant_tokens": gamma,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    model.generation_config = GenerationConfig(**ids, **_sampling_fields(sampling), **assisted)


def _sampling_fields(sampling: dict[str, Any] | None) -> dict[str, Any]:
    if sampling is None:
        return {}
    temperature = float(sampling.get("temperature", 1.0))
    if temperature == 0:
        return {"do_sample": False}
    # top_k is written even when off (0): left out, the library would put its own default of 50 in.
    fields = {"do_sample": True, "temperature": temperature, "top_k": int(sampling.get("top_k") or 0)}
    fields["top_p"] = float(sampling.get("top_p") or 1.0)
    if sampling.get("min_p"):
        fields["min_p"] = float(sampling["min_p"])
    return fields
