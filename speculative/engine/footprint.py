"""Number of requests that fit on a device, with and without a draft, from weights and the measured cache of one token."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from speculative.engine.memory import cache_entry
from speculative.engine.models import is_recurrent
from speculative.engine.windows import attention_windows
from speculative.errors import UserError

# Share of a device's memory; the rest is for the engine's own buffers, as in servers by default.
USABLE_SHARE = 0.9


@dataclass(frozen=True)
class Footprint:
    """Bytes of a served model: its weights, and the cache of one request at the asked context."""

    weights: int
    cache_per_request: int


@dataclass(frozen=True)
class Capacity:
    """Requests that fit in memory next to the weights, at least 0. requests_lost: requests that the draft's weights and cache cost."""

    fits: bool
    requests_alone: int
    requests_with_draft: int
    requests_lost: int
    needed_bytes: int
    usable_bytes: int


def footprint(model: PreTrainedModel, dtype: torch.dtype, context: int) -> Footprint:
    """Footprint of a model served in this dtype; weights that are not floating-point numbers (quantised) keep their own size. Raises
    UserError as `cache_bytes_per_request`.
    """
    sizes = (
        weight.numel() * (dtype.itemsize if weight.is_floating_point() and weight.itemsize > 1 else weight.itemsize)
        for weight in model.parameters()
    )
    return Footprint(sum(sizes), cache_bytes_per_request(model, dtype, context))


def cache_bytes_per_request(model: PreTrainedModel, dtype: torch.dtype, context: int) -> int:
    """Keys and values of `context` tokens in every layer (`memory.cache_entry`); a sliding-window layer counts at most its window, and a
    compressed cache (multi-head latent attention) one latent and one rotary key per token. Raises UserError: a layer keeps a state other
    than keys and values.
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
    """Whether `concurrency` requests fit with both models, and how many fit at most with and without the draft."""
    usable = int(device_bytes * USABLE_SHARE)
    weights, per_request = target.weights + draft.weights, target.cache_per_request + draft.cache_per_request
    alone = max(0, (usable - target.weights) // target.cache_per_request)
    together = max(0, (usable - weights) // per_request)
    needed = weights + concurrency * per_request
    return Capacity(needed <= usable, alone, together, alone - together, needed, usable)
