"""A key/value cache with one length per row, used by any `transformers` attention model through `Cache`.

Shapes: R rows, K rows of one call (all of them, or the few being prefilled), Q query tokens of one call, C capacity
(positions a row can hold), H key/value heads, D head width, P positions handed to attention (the prefix).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

POSITION_STEP = 64


def whole_steps(positions: int) -> int:
    """Round positions up for accelerators, so that the allocator sees few shapes and mask rows are aligned."""
    return -(-positions // POSITION_STEP) * POSITION_STEP


@dataclass
class CallPlace:
    """Positions a call writes and the length of the prefix it reads, equal for all layers; see `RaggedCache.begin`."""

    rows: int
    capacity: int
    positions_KQ: torch.Tensor
    rows_K: torch.Tensor | None = None
    shared_start: int | None = 0
    starts_empty: bool = False
    prefix: int = 0

    def on(self, device: torch.device) -> CallPlace:
        """The same place for a layer on another device: a model may be spread over several."""
        if self.positions_KQ.device == device:
            return self
        rows_K = None if self.rows_K is None else self.rows_K.to(device)
        return replace(self, positions_KQ=self.positions_KQ.to(device), rows_K=rows_K)


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer in static buffers (R, H, C, D)."""

    is_sliding = False
    is_croppable = True

    def __init__(self, place: CallPlace):
        # No reference to the cache: a reference cycle would keep its memory until garbage collection.
        super().__init__()
        self.place = place

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, capacity = self.place.rows, self.place.capacity
        # Zeros, not empty: a masked position still multiplies its value by 0, and 0 x NaN is NaN.
        self.keys = key_states.new_zeros((rows, key_states.shape[1], capacity, key_states.shape[3]))
        self.values = value_states.new_zeros((rows, value_states.shape[1], capacity, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (K, H, Q, D) states at each row's own positions; return what attention may read, (K, H, P, D)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        place, prefix = self.place.on(key_states.device), self.place.prefix
        if place.rows_K is not None:
            rows_K1, positions_KQ = place.rows_K.unsqueeze(1), place.positions_KQ
            self.keys[rows_K1, :, positions_KQ] = key_states.transpose(1, 2)
            self.values[rows_K1, :, positions_KQ] = value_states.transpose(1, 2)
            if place.starts_empty:
                return key_states, value_states
            return (
                self.keys[:, :, :prefix].index_select(0, place.rows_K),
                self.values[:, :, :prefix].index_select(0, place.rows_K),
            )
        if place.shared_start is not None:
            stop = place.shared_start + key_states.shape[2]
            self.keys[:, :, place.shared_start : stop] = key_states
            self.values[:, :, place.shared_start : stop] = value_states
        else:
            # One scatter: no host synchronisation, any mixture of row lengths, capturable in a graph.
            index_K1Q1 = place.positions_KQ[:, None, :, None]
            self.keys.scatter_(2, index_K1Q1.expand(key_states.shape), key_states.to(self.keys.dtype))
            self.values.scatter_(2, index_K1Q1.expand(value_states.shape), value_states.to(self.values.dtype))
        return self.keys[:, :, :prefix], self.values[:, :, :prefix]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.place.prefix, 0

    def get_seq_length(self) -> int:
        # Positions before this call, if all rows agree: a model that builds its own mask asks for it.
        return self.place.prefix if self.place.shared_start is None else self.place.shared_start

    def get_max_length(self) -> int:
        return self.place.capacity


class RaggedCache(Cache):
    """Static key/value memory of `rows` rows and `capacity` positions. The cache holds no lengths: the caller says where each call writes.
    So a rollback means writing at an earlier position, and a row is recycled by writing a prompt from position 0 on. The first call
    allocates the buffers, in the dtype and on the device of its states.
    """

    def __init__(self, layer_count: int, rows: int, capacity: int):
        self.place = CallPlace(rows, capacity, torch.zeros(0))
        super().__init__(layers=[RaggedLayer(self.place) for _ in range(layer_count)])

    @property
    def rows(self) -> int:
        return self.place.rows

    @property
    def by_layer(self) -> list[list[torch.Tensor]]:
        """Keys and values of every layer; empty for a layer that shares another layer's."""
        both = [(layer.keys, layer.values) for layer in self.layers if isinstance(layer, RaggedLayer)]
        return [[states for states in own if states is not None] for own in both]

    @property
    def buffers(self) -> list[torch.Tensor]:
        return list(itertools.chain.from_iterable(self.by_layer))

    def begin(
        self,
        positions_KQ: torch.Tensor,
        prefix: int,
        shared_start: int | None = None,
        rows_K: torch.Tensor | None = None,
    ) -> None:
        """Announce a call that writes at `positions_KQ` and lets attention read positions 0 .. prefix-1. `shared_start`: set when every
        row writes consecutively from this position on (a slice is then enough). `rows_K`: only these rows take part; None = all.
        """
        place = self.place
        assert prefix <= place.capacity, (prefix, place.capacity)
        assert positions_KQ.shape[0] == (place.rows if rows_K is None else len(rows_K))
        place.positions_KQ, place.prefix, place.shared_start, place.rows_K = positions_KQ, prefix, shared_start, rows_K
        place.starts_empty = shared_start == 0

    def keep(self, rows_K: torch.Tensor) -> None:
        """Compact to the given rows, in that order."""
        self.place.rows = len(rows_K)
        for layer in self.layers:
            assert isinstance(layer, RaggedLayer)
            if layer.keys is not None and layer.values is not None:
                rows_K = rows_K.to(layer.keys.device)
                layer.keys, layer.values = layer.keys[rows_K], layer.values[rows_K]

    def move(self, sources_RQ: torch.Tensor, destinations_RQ: torch.Tensor) -> None:
        """Copy positions of every row to other positions of the same row (a token tree's accepted path)."""
        for buffer in self.buffers:
            sources_RQ, destinations_RQ = sources_RQ.to(buffer.device), destinations_RQ.to(buffer.device)
            shape = (buffer.shape[0], buffer.shape[1], sources_RQ.shape[1], buffer.shape[3])
            moved = buffer.gather(2, sources_RQ[:, None, :, None].expand(shape))
            buffer.scatter_(2, destinations_RQ[:, None, :, None].expand(shape), moved)
