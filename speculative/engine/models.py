"""Checks of a model before decoding (rollback, context, vocabulary), and helpers for parallel drafts, which propose a whole block in one
forward pass (2504.18583): a text whose last token is at position s is followed by copies of a mask token. The logits at s predict token s
+ 1 (offset 1), those at the mask of position s + k - 1 token s + k (offset k).

Shapes: B texts, T positions of a text (padded on the right), L columns of the pass, N masks.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from speculative.engine.library_state import attention_name, keeps_state, renew_buffers
from speculative.engine.runners import UNRECORDED
from speculative.engine.survey import survey
from speculative.engine.windows import OWN_MASKS, attention_windows, by_layer_kind, layer_kinds, window_kinds
from speculative.errors import UserError


def max_positions(config: PretrainedConfig) -> int | None:
    """Longest sequence that a model of this config can be decoded at, or None if the config does not say. Position codes that change with
    the longest text of a call (LongRoPE of Phi-3, dynamic scaling) would make a row depend on its neighbours and on its future: the limit
    is the length at which they change.
    """
    config = config.get_text_config(decoder=True)
    value = getattr(config, "max_position_embeddings", None)
    longest = value if isinstance(value, int) and value > 0 else None
    # Doge hides tokens by their content once a text is longer than this.
    longest = min((limit for limit in (longest, getattr(config, "keep_window_size", None)) if limit), default=None)
    rope, unchanged_name = getattr(config, "rope_parameters", None) or {}, "original_max_position_embeddings"
    for own in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        if own.get("rope_type") in ("longrope", "dynamic"):
            unchanged = own.get(unchanged_name) or getattr(config, unchanged_name, None)
            longest = min(limit for limit in (unchanged, longest) if limit) if unchanged or longest else None
    return longest


def layer_stacks(model: PreTrainedModel) -> list[str]:
    """Names of the module lists with one entry per layer: usually exactly one."""
    total = model.config.get_text_config(decoder=True).num_hidden_layers
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == total and "." in name
    ]


def vocab_rows(model: PreTrainedModel) -> int:
    """Number of logits the model returns per position, padding rows included."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return weight.shape[0] if weight is not None else model.config.get_text_config(decoder=True).vocab_size


def takes_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether the model can return the logits of its last tokens only."""
    return "logits_to_keep" in forward_parameters(model)


def forward_parameters(model: PreTrainedModel) -> frozenset[str]:
    """Parameter names of the causal LM's forward; a peft wrapper passes them on as **kwargs."""
    unwrap = getattr(model, "get_base_model", None)
    inner = unwrap() if callable(unwrap) else model
    return _parameters_of(getattr(inner.forward, "__func__", inner.forward))


@lru_cache(maxsize=64)
def _parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def check_same_vocabulary(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Raises UserError when target and draft score different numbers of token ids."""
    target_rows, draft_rows = vocab_rows(target), vocab_rows(draft)
    if target_rows != draft_rows:
        raise UserError(
            f"the draft has logits for {draft_rows} token ids and the target for {target_rows}: "
            "pad or trim the draft's embedding rows to the target's"
        )


def devices_of(model: PreTrainedModel) -> list[torch.device]:
    """Devices of the weights; several if accelerate spread the model."""
    places = dict.fromkeys(torch.device(place) for place in (getattr(model, "hf_device_map", None) or {}).values())
    return list(places) if len(places) > 1 else [model.device]


_known_recurrent: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


def is_recurrent(model: PreTrainedModel) -> bool:
    """Whether some layer keeps a state of the whole text (state space, linear attention, short convolution)."""
    if model not in _known_recurrent:  # the check takes as long as a small model's step
        _known_recurrent[model] = _is_recurrent(model)
    return _known_recurrent[model]


def _is_recurrent(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config(decoder=True)
    if keeps_state(model):
        return True
    if not layer_kinds(config).isdisjoint(OWN_MASKS):
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers)


def state_name(model: PreTrainedModel) -> str:
    """Name of a recurrent model's state, as argument and output of its forward. Raises UserError if both differ (older code)."""
    for name in ("past_key_values", "cache_params"):
        if name in forward_parameters(model):
            return name
    raise UserError(f"{type(model).__name__} does not accept its own state, so it cannot be decoded step by step")


def check_decodable(model: PreTrainedModel, name: str) -> None:
    """Refuse a model that cannot be rolled back, or whose rows cannot differ in length; keys of sliding-window layers are kept in full,
    the window is in the mask. Raises UserError naming the model: encoder-decoder, ALiBi, layers with masks of their own, attention kernels
    that do not take a 4-D mask.
    """
    config = model.config.get_text_config(decoder=True)
    who = f"{name} ({type(model).__name__})"
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{who} is an encoder-decoder: give a decoder-only causal LM")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UserError(
            f"{who} has an adapter of virtual tokens, for which rows have no place: use an adapter of weights"
        )
    if is_recurrent(model):
        state_name(model)
        return
    if getattr(config, "alibi", False) or "position_ids" not in forward_parameters(model):
        raise UserError(f"{who} takes no position ids (ALiBi or older code), which rows of different length need")
    if attention_name(config) not in ("sdpa", "eager"):
        raise UserError(
            f"{who} uses attention '{attention_name(config)}', which does not accept 4-D masks: "
            "load it with attn_implementation='sdpa'"
        )
    try:
        attention_windows(model)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def end_token_ids(model: Any, tokenizer: Any = None) -> tuple[int, ...]:
    """All ids that end a response: those of the generation config, and of the config and the tokenizer if these are added tokens.

    Some engines take the first and the last, others all. A config that names no token has the number of its class, which
    can be any token. ``model``:
    anything with a `config` and a `generation_config`.
    """
    config = model.config.get_text_config(decoder=True)
    places = (getattr(model, "generation_config", None), config, tokenizer)
    values = [value for place in places if (value := getattr(place, "eos_token_id", None)) is not None]
    first, *more = [value if isinstance(value, list) else [value] for value in values] or [[]]
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return tuple(dict.fromkeys([*first, *(token for ids in more for token in ids if token in added)]))


def without_autograd(runner: str, *models: PreTrainedModel | None) -> Callable[[], AbstractContextManager[Any]]:
    """The cheapest way to run these models without gradients. Inference mode saves the bookkeeping of every operation, which matters for a
    small model. It is not safe for compiled or recorded calls, nor for weights of a tensor subclass (quantised, distributed): `no_grad`.
    """
    plain = all(survey(model).ordinary for model in models if model is not None)
    return torch.inference_mode if runner in UNRECORDED and plain else torch.no_grad


@contextmanager
def in_eval_mode(*models: PreTrainedModel | None) -> Iterator[None]:
    """Eval mode; every module's own mode is restored at the end (models may share modules), and buffers that a forward wrote in inference
    mode become ordinary tensors again, because training may follow.
    """
    modules = [module for model in models if model is not None for module in survey(model).modules]
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
        renew_buffers(modules)


@contextmanager
def evaluating(*models: PreTrainedModel | None) -> Iterator[None]:
    """Eval mode without gradients; each model's own mode is restored at the end."""
    with torch.no_grad(), in_eval_mode(*models):
        yield


# The keys of a draft's config.json that engines read, in this order.
MASK_TOKEN_KEYS = ("pard_token", "ptd_token_id")


def mask_token_of(config: PretrainedConfig) -> int | None:
    """The mask token id of a parallel draft; None if the config has none. Raises UserError for a value that is no row of the embedding."""
    for key in MASK_TOKEN_KEYS:
        token = getattr(config, key, None)
        if token is None:
            continue
        rows = config.get_text_config(decoder=True).vocab_size
        if type(token) is not int or not 0 <= token < rows:
            raise UserError(f"config.json of the draft: {key} = {token!r}: must be a token id, 0..{rows - 1}")
        return token
    return None


class MaskedPass(NamedTuple):
    """A pass over texts followed by the masks of many blocks: columns 0..T-1 are the text, the others are masks. attention: the
    `attention_mask` argument, additive (B, 1, L, L) in the model's dtype, or one per kind of layer. Mask n: columns_N[n] of text
    texts_N[n]; its logits predict token starts_N[n] + offsets_N[n]. Offset 1 of start s is column s.
    """

    input_ids_BL: torch.Tensor
    position_ids_BL: torch.Tensor
    attention: torch.Tensor | dict[str, torch.Tensor]
    texts_N: torch.Tensor
    starts_N: torch.Tensor
    offsets_N: torch.Tensor
    columns_N: torch.Tensor

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Arguments of the model's forward."""
        return {
            "input_ids": self.input_ids_BL,
            "position_ids": self.position_ids_BL,
            "attention_mask": self.attention,
            "use_cache": False,
        }


def masked_pass(model: PreTrainedModel, ids_BT: torch.Tensor, depths_BT: torch.Tensor, mask_token: int) -> MaskedPass:
    """Build the pass that scores each requested block as if the text ended at its start.

    depths_BT: at each position s that starts a block, its largest offset: masks 1..depth-1 are fed, where mask k has position s + k and
    sees the text up to s and the earlier masks of its own start. 0 or 1 needs no mask. Text sees only text, so its logits equal those of a
    pass without masks. Memory and time of the attention grow with L^2, L = T + the largest number of masks of a text. Raises UserError as
    `check_parallel`.
    """
    windows = check_parallel(model)
    device, (texts, length) = ids_BT.device, ids_BT.shape
    deepest = int(depths_BT.max()) if depths_BT.numel() else 0
    offsets_K = torch.arange(2, max(deepest, 1) + 1, device=device)
    texts_N, starts_N, kinds_N = (depths_BT.unsqueeze(-1) >= offsets_K).nonzero(as_tuple=True)
    offsets_N = offsets_K[kinds_N]
    counts_B = torch.bincount(texts_N, minlength=texts)
    columns_N = length + torch.arange(len(texts_N), device=device) - (counts_B.cumsum(0) - counts_B)[texts_N]
    width = length + (int(counts_B.max()) if len(counts_B) else 0)

    # For each column: the last text position it sees, and its offset from there (0: the text itself, -1: padding).
    seen_BL = torch.full((texts, width), -1, device=device)
    steps_BL = torch.full((texts, width), -1, device=device)
    seen_BL[:, :length], steps_BL[:, :length] = torch.arange(length, device=device), 0
    seen_BL[texts_N, columns_N], steps_BL[texts_N, columns_N] = starts_N, offsets_N - 1
    ids_BL = torch.cat((ids_BT, ids_BT.new_full((texts, width - length), mask_token)), 1)
    positions_BL = (seen_BL + steps_BL).clamp_min(0)

    text_BLL = (steps_BL == 0).unsqueeze(1) & (seen_BL.unsqueeze(1) <= seen_BL.unsqueeze(2))
    own_BLL = (seen_BL.unsqueeze(1) == seen_BL.unsqueeze(2)) & (steps_BL.unsqueeze(1) <= steps_BL.unsqueeze(2))
    visible_BLL = text_BLL | (own_BLL & (steps_BL != 0).unsqueeze(1))
    masks = []
    for window in windows:
        hidden_BLL = ~visible_BLL
        if window is not None:
            hidden_BLL |= positions_BL.unsqueeze(2) - positions_BL.unsqueeze(1) >= window
        zeros = torch.zeros(hidden_BLL.shape, dtype=model.dtype, device=device)
        masks.append(zeros.masked_fill_(hidden_BLL, torch.finfo(model.dtype).min).unsqueeze(1))
    return MaskedPass(ids_BL, positions_BL, by_layer_kind(masks), texts_N, starts_N, offsets_N, columns_N)


def check_parallel(model: PreTrainedModel) -> list[int | None]:
    """`window_kinds` of the model. Raises UserError for one that cannot score many blocks in one pass: recurrent layers, layers with masks
    of their own, attention that takes no 4-D mask, windows of several sizes.
    """
    check_decodable(model, "parallel draft")
    if is_recurrent(model):
        raise UserError(
            f"parallel draft ({type(model).__name__}) keeps a recurrent state, from which mask tokens cannot be removed: "
            "use a draft with attention layers only"
        )
    return window_kinds(model, "parallel draft")
