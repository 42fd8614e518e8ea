"""Random models of two layers and width 32 for the tests of `speculative`: real code paths, milliseconds each."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 50
_GENERATED: weakref.WeakKeyDictionary[PreTrainedModel, dict] = weakref.WeakKeyDictionary()
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "resid_pdrop": 0.1},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 64},
    "gpt_neox": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
}
COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def tiny_model(
    kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, vocab_size: int = VOCAB, **overrides: Any
) -> PreTrainedModel:
    """A random causal LM; weights ten times the usual spread, so that its distributions are neither flat nor sure."""
    torch.manual_seed(seed)
    sizes = {**SIZES.get(kind, COMMON), "vocab_size": vocab_size, "initializer_range": 0.2}
    special = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    config = CONFIG_MAPPING[kind](**{**sizes, **special, **overrides})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def perturbed(model: PreTrainedModel, scale: float = 0.05, seed: int = 1) -> PreTrainedModel:
    """A draft that mostly agrees: the model with noise of the given spread on every weight."""
    generator = torch.Generator().manual_seed(seed)
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += scale * torch.randn(weight.shape, generator=generator).to(weight.dtype)
    return draft


def prompts_of(lengths: list[int], seed: int = 0, vocab_size: int = VOCAB) -> list[tuple[str, list[int]]]:
    """One random prompt (key, ids) of each length."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"prompt-{index}", torch.randint(1, vocab_size, (length,), generator=generator).tolist())
        for index, length in enumerate(lengths)
    ]


def logits(model: Any, ids: Sequence[int] = range(1, 13)) -> torch.Tensor:
    """Of one text, (1, T, V)."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits


def texts(responses):
    return [response.response_ids for response in responses]


def generated(model, prompts, max_tokens, eos_ids=()):
    """Greedy text of transformers itself, one prompt at a time; once for the same weights."""
    known = _GENERATED.setdefault(model, {})
    weights = tuple((weight.data_ptr(), weight._version) for weight in model.parameters())
    asked = (weights, str(prompts), max_tokens, tuple(eos_ids))
    if asked not in known:
        known[asked] = _generated(model, prompts, max_tokens, eos_ids)
    return [list(text) for text in known[asked]]


def _generated(model, prompts, max_tokens, eos_ids):
    outputs = []
    for _, ids in prompts:
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(eos_ids) or None,
            pad_token_id=0,
        )
        outputs.append(out[0, len(ids) :].tolist())
    return outputs
