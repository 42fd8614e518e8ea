"""Key/value memory with one length per row, and a causal LM that reads and writes it.

Shapes: R rows, Q query tokens of one call, C capacity (positions a row can hold), H key/value heads, D head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from speculative.errors import UserError

PREFIX_STEP = 64  # The prefix handed to attention is rounded up to this, so that few shapes occur.
PREFILL_TOKENS = 4096  # Tokens (rows x columns) of one prefill call: bounds its activations.


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer in static buffers (R, C, H, D).

    Where a call writes and how much of the buffer it reads back is set once for all layers in `RaggedCache.begin`.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: RaggedCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, heads = key_states.shape[:2]
        assert rows == self.cache.rows, (rows, self.cache.rows)
        # Zeros, not empty: a masked position still multiplies its value by 0, and 0 x NaN is NaN.
        shape = (rows, self.cache.capacity, heads)
        self.keys = key_states.new_zeros((*shape, key_states.shape[-1]))
        self.values = value_states.new_zeros((*shape, value_states.shape[-1]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (R, H, Q, D) states at each row's own positions; return the used prefix, (R, H, prefix, D) views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        for buffer_RCHD, states_RHQD in ((self.keys, key_states), (self.values, value_states)):
            # One flat index_copy_: no host synchronisation, any mixture of row lengths, capturable in a graph.
            buffer_RCHD.flatten(0, 1).index_copy_(
                0, self.cache.write_index, states_RHQD.transpose(1, 2).flatten(0, 1).to(buffer_RCHD.dtype)
            )
        prefix = self.cache.prefix
        return self.keys[:, :prefix].transpose(1, 2), self.values[:, :prefix].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.prefix, 0

    def get_seq_length(self) -> int:
        return self.cache.prefix

    def get_max_length(self) -> int:
        return self.cache.capacity

    def keep(self, rows_K: torch.Tensor) -> None:
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            self.keys, self.values = self.keys[rows_K], self.values[rows_K]


class RaggedCache(Cache):
    """Static key/value memory of `rows` rows and `capacity` positions; every row has its own length.

    The cache holds no lengths: the caller says where each call writes, so rolling back is writing again at an earlier
    position. Buffers are allocated by the first call, in the dtype and on the device of the states it brings.
    """

    def __init__(self, layer_count: int, rows: int, capacity: int, device: torch.device):
        self.rows, self.capacity = rows, capacity
        self.first_slots_R1 = torch.arange(0, rows * capacity, capacity, device=device).unsqueeze(1)
        self.write_index = self.first_slots_R1.flatten()
        self.prefix = 0
        super().__init__(layers=[RaggedLayer(self) for _ in range(layer_count)])

    def begin(self, positions_RQ: torch.Tensor, used: int) -> None:
        """Announce a call that writes at `positions_RQ`; `used` is one more than the largest of them."""
        assert positions_RQ.shape[0] == self.rows, (positions_RQ.shape, self.rows)
        assert used <= self.capacity, (used, self.capacity)
        self.write_index = (self.first_slots_R1 + positions_RQ).flatten()
        self.prefix = min(-(-used // PREFIX_STEP) * PREFIX_STEP, self.capacity)

    def keep(self, rows_K: torch.Tensor) -> None:
        """Compact to the given rows, in that order."""
        self.rows = len(rows_K)
        self.first_slots_R1 = self.first_slots_R1[: self.rows]
        for layer in self.layers:
            assert isinstance(layer, RaggedLayer)
            layer.keep(rows_K)


def max_positions(model: PreTrainedModel) -> int | None:
    """Longest sequence the model was made for, or None when its config does not say."""
    value = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return value if isinstance(value, int) and value > 0 else None


def vocab_rows(model: PreTrainedModel) -> int:
    """Number of logits the model returns per position, padding rows included."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return weight.shape[0] if weight is not None else model.config.get_text_config(decoder=True).vocab_size


def takes_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether the model can be asked for the logits of its last tokens only."""
    return "logits_to_keep" in _forward_parameters(model)


def _forward_parameters(model: PreTrainedModel) -> set[str]:
    """Names the causal LM's forward takes; a peft wrapper passes them on without naming them."""
    unwrap = getattr(model, "get_base_model", None)
    inner = unwrap() if callable(unwrap) else model
    return set(inspect.signature(inner.forward).parameters)


def check_same_vocabulary(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Raises UserError when target and draft score different numbers of token ids."""
    target_rows, draft_rows = vocab_rows(target), vocab_rows(draft)
    if target_rows != draft_rows:
        raise UserError(
            f"the draft scores {draft_rows} token ids and the target {target_rows}: "
            "pad or trim the draft's embedding rows to the target's"
        )


def check_decodable(model: PreTrainedModel, name: str, needed: int) -> None:
    """Refuse a model whose past cannot be rolled back by a length, or that cannot see `needed` positions.

    Raises UserError naming the model: encoder-decoder, recurrent or hybrid layers, ALiBi, attention kernels that do not
    take a 4-D mask, a sliding window shorter than `needed`.
    """
    config = model.config.get_text_config(decoder=True)
    who = f"{name} ({type(model).__name__})"
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{who} is an encoder-decoder: give a decoder-only causal LM")
    if getattr(model, "_is_stateful", False):
        raise UserError(f"{who} keeps a recurrent state, which cannot be rolled back by a length: give an attention LM")
    if getattr(config, "alibi", False) or "position_ids" not in _forward_parameters(model):
        raise UserError(f"{who} takes no position ids (ALiBi or older code): rows of different length need them")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise UserError(
            f"{who} uses attention '{config._attn_implementation}', which takes no 4-D mask: "
            "load it with attn_implementation='sdpa'"
        )
    for layer in DynamicCache(config=config).layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            if layer.sliding_window < needed:
                raise UserError(
                    f"{who} has sliding-window layers of {layer.sliding_window} positions and {needed} are needed: "
                    "shorten the prompt or max_tokens"
                )
        elif type(layer) is not DynamicLayer:
            raise UserError(f"{who} has {type(layer).__name__} layers, which cannot be rolled back by a length")


@contextmanager
def evaluating(*models: PreTrainedModel | None) -> Iterator[None]:
    """Eval mode without gradients; each model's own mode is restored at the end."""
    modes = [(model, model.training) for model in models if model is not None]
    # no_grad rather than inference_mode: buffers a model refreshes in its forward must stay usable for training.
    with torch.no_grad():
        for model, _ in modes:
            model.eval()
        try:
            yield
        finally:
            for model, was_training in modes:
                model.train(was_training)


class CachedModel:
    """A causal LM with its RaggedCache: feed tokens at any positions of each row, get logits.

    Raises UserError (through `check_decodable`) when the model cannot be used so.
    """

    def __init__(self, model: PreTrainedModel, name: str, rows: int, capacity: int, needed: int):
        """`needed`: positions that matter (prompt and response); `capacity` may exceed it by drafted tokens."""
        check_decodable(model, name, needed)
        self.model, self.name = model, name
        self.device = model.device
        config = model.config.get_text_config(decoder=True)
        self.cache = RaggedCache(config.num_hidden_layers, rows, capacity, self.device)
        self._positions_C = torch.arange(capacity, device=self.device)
        self._additive_mask = config._attn_implementation == "eager"
        self._takes_logits_to_keep = takes_logits_to_keep(model)
        longest = max_positions(model)
        self._last_position = longest - 1 if longest is not None and capacity > longest else None

    def feed(self, ids_RQ: torch.Tensor, starts_R: torch.Tensor, used: int, logits_kept: int) -> torch.Tensor:
        """Logits (R, logits_kept, V) after the last `logits_kept` of Q tokens, written from each row's start on.

        `used` is max(starts) + Q, known to the caller without asking the device.
        """
        query_length = ids_RQ.shape[1]
        positions_RQ = starts_R.unsqueeze(1) + self._positions_C[:query_length]
        self.cache.begin(positions_RQ, used)
        visible = self._positions_C[: self.cache.prefix] <= positions_RQ[:, None, :, None]
        if self._additive_mask:
            zeros = torch.zeros(visible.shape, dtype=self.model.dtype, device=self.device)
            visible = zeros.masked_fill_(~visible, torch.finfo(self.model.dtype).min)
        if self._last_position is not None:
            # Drafted tokens may overshoot the context; they are cut from the response, so any position does.
            positions_RQ = positions_RQ.clamp_max(self._last_position)
        keep = {"logits_to_keep": logits_kept} if self._takes_logits_to_keep else {}
        logits = self.model(
            input_ids=ids_RQ,
            attention_mask=visible,
            position_ids=positions_RQ,
            past_key_values=self.cache,
            use_cache=True,
            **keep,
        ).logits
        return logits[:, -logits_kept:]

    def prefill(self, tokens_RT: torch.Tensor, length: int) -> None:
        """Read columns 0 .. length-1 of right-padded `tokens_RT`, in calls of at most PREFILL_TOKENS tokens.

        Padding is written too and does no harm: a position is visible only to later ones, and by then it has been
        overwritten.
        """
        rows = tokens_RT.shape[0]
        columns = max(1, PREFILL_TOKENS // rows)
        for start in range(0, length, columns):
            stop = min(start + columns, length)
            starts_R = torch.full((rows,), start, dtype=torch.int64, device=self.device)
            self.feed(tokens_RT[:, start:stop], starts_R, stop, logits_kept=1)

    def keep(self, rows_K: torch.Tensor) -> None:
        self.cache.keep(rows_K)
