"""How far back each layer of a model sees. The masks of the model's own call say it, without a call that is longer than the window; config
keys may be ignored by the model's code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from speculative.engine.library_state import attention, configs_of, dispatches_attention
from speculative.engine.survey import config_text
from speculative.errors import UserError

OWN_MASKS = ("chunked_attention", "local")
OBSERVED = "understudy_observed"  # Our name in transformers' tables of attention functions and of masks.
# Layers that keep all keys, or read those of another layer, which releases before 5.23 do not tell apart.
UNBOUNDED = (DynamicLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))
FAR = 1 << 18  # positions; a longer window counts as none


# By what the config says; asking takes as long as a small model's forward.
_known: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, list[int | None]]] = weakref.WeakKeyDictionary()
_layers: ContextVar[dict[int, int | None]] = ContextVar("windows that the current call shows, by layer")


def layer_kinds(config: PretrainedConfig) -> set[str]:
    """Kinds of attention that a config names."""
    return {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}


def attention_windows(model: PreTrainedModel) -> list[int | None]:
    """Per layer, how many positions back it sees (itself included); None for all. Raises UserError for a layer that is neither full nor
    sliding-window.
    """
    config = model.config.get_text_config(decoder=True)
    known, told = _known.setdefault(model, {}), config_text(config)
    if told not in known:
        known[told] = _windows(model, config)
    return known[told]


def _windows(model: PreTrainedModel, config: PretrainedConfig) -> list[int | None]:
    for kind in OWN_MASKS:
        if kind in layer_kinds(config):
            raise UserError(f"{type(model).__name__} has {kind} layers, which build their own masks: use another model")
    windows: list[int | None] = []
    for layer in DynamicCache(config=config).layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            windows.append(int(layer.sliding_window))
        elif type(layer) in UNBOUNDED:
            windows.append(None)
        else:
            raise UserError(
                f"{type(model).__name__} has {type(layer).__name__} layers, which cannot be rolled back to a shorter text: "
                "use a model with attention layers only"
            )
    observed = _observed(model)
    return [observed.get(layer, window) for layer, window in enumerate(windows)]


def _observed(model: PreTrainedModel) -> dict[int, int | None]:
    """Windows of the layers whose attention and masks transformers dispatches, from one call of two tokens."""
    if not dispatches_attention(model):
        return {}
    token, devices = _layers.set({}), [model.device] if model.device.type == "cuda" else []
    try:
        # In train mode a call uses random numbers.
        with attention(list(configs_of(model).values()), OBSERVED), torch.no_grad(), torch.random.fork_rng(devices):
            model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=model.device), use_cache=False)
        return _layers.get()
    except Exception:  # code that counts on the usual names: the config is all there is
        return {}
    finally:
        _layers.reset(token)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    device: Any = None,
    **options: Any,
) -> torch.Tensor:
    """A mask whose numbers are its window; 0 for none. Another thread gets the usual one."""
    if _layers.get(None) is None:
        mask: Any = sdpa_mask(batch_size, q_length, kv_length, mask_function=mask_function, device=device, **options)
        return mask
    first, keys = torch.zeros((1, 1, 1, 1), dtype=torch.int64), torch.arange(FAR).view(1, 1, 1, -1)
    seen = int(mask_function(first, first, first + FAR - 1, keys).expand(1, 1, 1, FAR).sum())
    window = 0 if seen == FAR else seen
    return torch.full((batch_size, 1, q_length, kv_length), window, dtype=torch.float64, device=device)


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Zeros (R, Q, H, D); notes the window of the mask that the layer is given. Another thread gets the usual attention."""
    layers = _layers.get(None)
    if layers is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if attention_mask is not None:
        layers[module.layer_idx] = int(attention_mask.max()) or None
    return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[-1])), None


AttentionInterface.register(OBSERVED, _attention)
AttentionMaskInterface.register(OBSERVED, _mask)


def window_kinds(model: PreTrainedModel, name: str, longest: int | None = None) -> list[int | None]:
    """`attention_windows`, each kind once, full attention (None) first; a window of at least `longest` positions counts as full. Raises
    UserError naming the model for windows of several sizes.
    """
    windows = {size if size and (longest is None or size < longest) else None for size in attention_windows(model)}
    kinds = sorted(windows, key=lambda window: window or 0)
    if len(kinds) > 2 or (len(kinds) == 2 and None not in kinds):
        raise UserError(f"{name} ({type(model).__name__}) has sliding windows of {kinds}: only one size is supported")
    return kinds


def by_layer_kind(masks: list[torch.Tensor]) -> torch.Tensor | dict[str, torch.Tensor]:
    """The `attention_mask` argument of a model: one mask for each of its `window_kinds`."""
    return masks[0] if len(masks) == 1 else {"full_attention": masks[0], "sliding_attention": masks[1]}
