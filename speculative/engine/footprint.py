"""How many requests a device holds, with a draft and without: weights, and caches as one token of each model tells them."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from speculative.engine.memory import cache_entry
from speculative.engine.models import attention_windows, is_recurrent
from speculative.errors import UserError

# Of a device's memory; the rest is left to the engine's own buffers, as servers do by default.
USABLE_SHARE = 0.9


@dataclass(frozen=True)
class Footprint:
    """Bytes of a served model: its weights, and the cache of one request at the asked context."""

    weights: int
    cache_per_request: int


@dataclass(frozen=True)
class Capacity:
    """Requests that fit beside the weights; below 0 is 0. requests_lost: how many the draft costs, weights and cache."""

    fits: bool
    requests_alone: int
    requests_with_draft: int
    requests_lost: int
    needed_bytes: int
    usable_bytes: int


def footprint(model: PreTrainedModel, dtype: torch.dtype, context: int) -> Footprint:
    """Of a model served in this dtype. Weights that are no floating-point numbers (quantised) keep their own size.

    Raises:
        UserError: its layers keep something else than keys and values.
    """
    sizes = (
        weight.numel() * (dtype.itemsize if weight.is_floating_point() and weight.itemsize > 1 else weight.itemsize)
        for weight in model.parameters()
    )
    return Footprint(sum(sizes), cache_bytes_per_request(model, dtype, context))


def cache_bytes_per_request(model: PreTrainedModel, dtype: torch.dtype, context: int) -> int:
    """Keys and values of `context` tokens in every layer (`memory.cache_entry`), and of a sliding window no more than it.

    A compressed cache (multi-head latent attention) counts as engines keep it: one latent and one rotary key a token.

    Raises:
        UserError: a layer keeps something else than keys and values.
    """
    if is_recurrent(model):
        raise UserError(f"{type(model).__name__} has no key/value cache: the memory of its states cannot be estimated")
    text, numbers = model.config.get_text_config(decoder=True), cache_entry(model).numbers
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        numbers = (int(latent) + int(getattr(text, "qk_rope_head_dim", 0)),) * len(numbers)
    windows = attention_windows(model) or [None] * len(numbers)
    kept = (own * min(context, window or context) for own, window in zip(numbers, windows, strict=True))
    return sum(kept) * dtype.itemsize


def capacity(device_bytes: int, concurrency: int, target: Footprint, draft: Footprint) -> Capacity:
    """Whether `concurrency` requests fit with both models, and how many fit at all with the draft and without it."""
    usable = int(device_bytes * USABLE_SHARE)
    weights, per_request = target.weights + draft.weights, target.cache_per_request + draft.cache_per_request
    alone = max(0, (usable - target.weights) // target.cache_per_request)
    together = max(0, (usable - weights) // per_request)
    needed = weights + concurrency * per_request
    return Capacity(needed <= usable, alone, together, alone - together, needed, usable)
