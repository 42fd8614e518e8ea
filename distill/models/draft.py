"""A draft from wherever it lies, checked against the target's vocabulary and rounded as it would be served."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from distill.models.load import load_model, load_tokenizer
from distill.models.target import ServedTarget
from distill.models.vocabulary import repair_rows, require_agreement, vocabulary_rows
from speculative.errors import UserError


def load_draft(path: str, target: PreTrainedModel | ServedTarget, tokenizer: Any) -> PreTrainedModel:
    """A draft from a run, checkpoint, directory or hub id, its vocabulary checked against the target's.

    Raises:
        UserError: not there, or another vocabulary.
    """
    name = find_student(path)
    draft = load_model("draft", name)
    rows = target.facts.vocab_rows if isinstance(target, ServedTarget) else vocabulary_rows(target.config)
    agreement = require_agreement(tokenizer, rows, load_tokenizer(name), vocabulary_rows(draft.config))
    if agreement.verdict == "repair":
        repair_rows(draft, rows, agreement.token_rows)
    return draft


def find_student(path: str) -> str:
    """A run's folder, a checkpoint's folder or a model directory -> the model directory; a hub id stays as it is."""
    folder = Path(path)
    for candidate in (folder / "best" / "student", folder / "student", folder):
        if (candidate / "config.json").exists():
            return str(candidate)
    return path


def served_copy(
    model: PreTrainedModel, saved_dtype: torch.dtype, target: PreTrainedModel | ServedTarget
) -> PreTrainedModel:
    """A copy whose weights are rounded to the dtype they will be exported in, computing in the target's dtype.

    So the numbers belong to the draft that is served, not to the float32 weights that train.
    """
    rounded = copy.deepcopy(model)
    # Weights only: rounding the rotary frequencies, which are computed and not saved, would be another model.
    cast_weights(rounded, saved_dtype)
    cast_weights(rounded, target.dtype)
    rounded.to(target.device)  # type: ignore[arg-type]
    return rounded.requires_grad_(False).eval()


def cast_weights(model: Any, dtype: torch.dtype) -> None:
    """Cast parameters in place.

    Buffers keep their dtype, as in `from_pretrained(dtype=...)`: `model.to(dtype)` would round the rotary frequencies
    too and the model in memory would no longer be the one that loads.

    Raises:
        UserError: when a weight overflows in `dtype`.

    """
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype)
        if not torch.isfinite(parameter.data).all():
            raise UserError(f"weight {name} is not finite in {str(dtype).removeprefix('torch.')}; choose bfloat16")
    model.config.dtype = dtype
