"""Faster calls of a transformers model on a cache: grouped-query attention without copies.

With a mask, transformers' scaled dot product attention copies the keys and values of the whole prefix for every query head of a group.
Here the heads of a group become further query tokens of their key/value head, so only the mask, which has no head and no width, is
repeated. cuDNN makes a plan for every new shape: on CUDA it is left out. Not used: `flex_attention`, which is faster only on long texts (10
against 45 us at 2,048 positions of an 8B layer on an H200) and compiles a kernel for each shape.

Shapes: R rows, K rows of one call, V vocabulary, H query heads, N key/value heads, G = H / N, Q query tokens, P prefix, D head width.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from speculative.engine.library_state import asks_for_sdpa, attention, attention_name, configs_of, dispatches_attention

GROUPED = "understudy_grouped"  # Our name in transformers' table of attention functions.
CUDA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
FOLDED_DEVICES = ("cpu", "cuda")  # On other devices transformers chooses the kernels.

# Folded masks of the current call, with their sources: all layers of a kind get the same mask.
_folded_masks: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
_known_configs: weakref.WeakKeyDictionary[PreTrainedModel, list[PretrainedConfig]] = weakref.WeakKeyDictionary()


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention (R, Q, H, D) of queries (R, H, Q, D) over keys and values (R, N, P, D); equals `sdpa_attention_forward` to rounding, and
    calls it if folding is impossible or unnecessary, or if there is more than queries, keys, values and one additive mask (R, 1, Q, P) for
    all heads.
    """
    heads, queries, width = query.shape[1:]
    groups = heads // key.shape[1]
    mask = attention_mask
    same_for_heads = queries == 1 if mask is None else mask.dim() == 4 and mask.shape[1] == 1
    # For a long call the repeated mask would be larger than the copies it avoids.
    short = queries == 1 or groups * queries <= 2 * heads * width
    more = any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "cache"))
    if groups == 1 or more or not (same_for_heads and short and query.device.type in FOLDED_DEVICES):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    folded = scaled_dot_product_attention(
        query.reshape(query.shape[0], key.shape[1], groups * queries, width),
        key,
        value,
        attn_mask=mask if mask is None or queries == 1 else _folded_mask(mask, groups),
        dropout_p=dropout,
        scale=scaling,
    )
    return folded.reshape(query.shape[0], heads, queries, value.shape[-1]).transpose(1, 2).contiguous(), None


def _folded_mask(mask_R1QP: torch.Tensor, groups: int) -> torch.Tensor:
    known = _folded_masks.get((id(mask_R1QP), groups))
    if known is not None:
        return known[1]
    own = mask_R1QP[:1] if mask_R1QP.stride(0) == 0 else mask_R1QP  # A mask shared by all rows is repeated once.
    folded = own.expand(-1, groups, -1, -1).reshape(own.shape[0], 1, -1, own.shape[3])
    folded = folded.expand(mask_R1QP.shape[0], -1, -1, -1)
    _folded_masks[id(mask_R1QP), groups] = mask_R1QP, folded
    return folded


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


@contextmanager
def grouped_queries(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """Context manager: the model (on this device) uses `grouped_attention` instead of `sdpa`, unless it has its own attention or checks
    for that name.
    """
    switched = [config for config in _switchable(model) if attention_name(config) == "sdpa"]
    try:
        kernels = sdpa_kernel(CUDA_BACKENDS) if device.type == "cuda" else nullcontext()
        with attention(switched, GROUPED), kernels:
            yield
    finally:
        _folded_masks.clear()


def _switchable(model: PreTrainedModel) -> list[PretrainedConfig]:
    """Configs that the model's layers read; a model of the first layers shares the configs of the whole model."""
    configs = _known_configs.get(model)
    if configs is None:
        other_name = dispatches_attention(model) and not asks_for_sdpa(model)
        configs = _known_configs[model] = list(configs_of(model).values()) if other_name else []
    return configs
