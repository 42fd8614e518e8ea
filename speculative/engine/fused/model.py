"""The step of a plain decoder in fused kernels: which models are supported, and the calls.

Shapes: R rows, Q query tokens, M = R Q tokens of a call, C positions of the cache, H query heads, J key/value heads, D head width,
V vocabulary.
"""

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from speculative.engine.agreement import Feed, agrees, refuse
from speculative.engine.architectures import Unfit, is_plain, rotary_of
from speculative.engine.cache import RaggedCache, RaggedLayer
from speculative.engine.fused.products import PROGRAMS, Products, Workspace, power_of_two
from speculative.engine.fused.weights import Layer, Weights
from speculative.engine.models import max_positions

MOST_GROUPED, MOST_GROUPED_FLOAT = 64, 16  # query tokens times heads of a group in one program; of float32
LONG = 256  # positions that one program of attention reads before others help
OLDEST = (8, 0)  # compute capability: bfloat16 products

KERNELS = "fused kernels"


def fused_weights(model: PreTrainedModel) -> Weights | None:
    """Return the weights, packed, if the model is supported and fused kernels give its own logits, which is tested at its first use."""
    if model.device.type != "cuda" or not _usable() or not is_plain(model):
        return None
    if torch.cuda.get_device_capability(model.device) < OLDEST:
        return None
    try:
        with _on(model.device):
            return agreeing_weights(model)
    except (Unfit, AttributeError, torch.OutOfMemoryError):  # AttributeError: names of another release
        return None
    except Exception as error:  # of Triton's compiler or its driver
        refuse(model, KERNELS, f"failed: {(str(error).splitlines() or [type(error).__name__])[0]}")
        return None


def agreeing_weights(model: PreTrainedModel) -> Weights | None:
    """Return the weights if fused kernels give the model's own logits. Raises Unfit for an unsupported part."""
    return Weights(model) if agrees(model, KERNELS, lambda _: _call_of(model, Weights(model))) else None


@functools.cache
def _usable() -> bool:
    return torch.version.cuda is not None and importlib.util.find_spec("triton") is not None


def _call_of(model: PreTrainedModel, weights: Weights) -> Feed:
    """Calls of two rows, for `agrees`."""
    # So many positions that several programs are given a row, as in decoding.
    capacity = 2 * LONG
    cache = RaggedCache(model.config.num_hidden_layers, rows=2, capacity=capacity)
    fused = FusedModel(weights, cache, Scratch(model, weights, capacity))

    def call(ids_RQ: torch.Tensor, starts_R: np.ndarray, queries: int) -> torch.Tensor:
        positions_RQ = torch.from_numpy(starts_R[:, None] + np.arange(queries))
        return fused(ids_RQ, positions_RQ.to(ids_RQ.device), queries)

    return call


class Scratch:
    """What recordings read and write by address besides weights and cache. It stays with the cache and holds no weights."""

    def __init__(self, model: PreTrainedModel, weights: Weights, capacity: int) -> None:
        """Raises Unfit if only a part of a head is rotated."""
        self.work = Workspace(weights.device)
        positions = min(capacity, max_positions(model.config) or capacity)
        places = torch.arange(positions, device=weights.device).unsqueeze(0)
        like = torch.zeros(1, dtype=weights.dtype, device=weights.device)
        cosines, sines = rotary_of(model)(like, position_ids=places)
        self.angles_C2D = torch.cat((cosines[0], sines[0]), -1).contiguous()
        if self.angles_C2D.shape[-1] != 2 * weights.head_width:
            raise Unfit("a part of a head is rotated")


class FusedModel:
    """Calls with a model's weights on a cache."""

    def __init__(self, weights: Weights, cache: RaggedCache, scratch: Scratch) -> None:
        from speculative.engine.fused import kernels

        self._kernels, self.weights, self._cache = kernels, weights, cache
        self.capacity, self.angles_C2D = cache.place.capacity, scratch.angles_C2D
        self.head_width, self.heads, self.kv_heads = weights.head_width, weights.heads, weights.kv_heads
        self.product = Products(weights.device, weights.dtype, weights.eps, scratch.work)

    def __call__(self, ids_RQ: torch.Tensor, positions_RQ: torch.Tensor, kept: int) -> torch.Tensor:
        """Logits (R, kept, V) of the last tokens. Tokens are written at their positions and see everything before."""
        (rows, queries), weights = ids_RQ.shape, self.weights
        positions_M = positions_RQ.reshape(-1).contiguous()
        with _on(weights.device):
            x_MK = embedding(ids_RQ.reshape(-1), weights.embedding)
            for layer, (keys, values) in zip(weights.layers, self._buffers(), strict=True):
                heads_MN = self.product(x_MK, layer.heads, layer.norm)
                query_MHD = self.place_heads(heads_MN, layer, keys, values, positions_M, queries)
                mixed_MN = self.attend(query_MHD, keys, values, positions_M, rows, queries, layer.window)
                x_MK = self.product(mixed_MN, layer.out, add=x_MK)
                inner_MN = self.product(x_MK, layer.gated, layer.mlp_norm, gated=True)
                x_MK = self.product(inner_MN, layer.down, add=x_MK)
            last_MK = x_MK.view(rows, queries, -1)[:, -kept:].reshape(rows * kept, -1).contiguous()
            return self.product(last_MK, weights.head, weights.norm).view(rows, kept, -1)

    def _buffers(self) -> list[list[torch.Tensor]]:
        """Keys and values of each layer. The prefill has made them, unless every text has one token."""
        weights = self.weights
        for layer in self._cache.layers[: len(weights.layers)]:
            assert isinstance(layer, RaggedLayer)
            if not layer.is_initialized:
                empty = torch.zeros((0, self.kv_heads, 0, self.head_width), dtype=weights.dtype, device=weights.device)
                layer.lazy_initialization(empty, empty)
        return self._cache.by_layer[: len(weights.layers)]

    def place_heads(
        self,
        heads_MN: torch.Tensor,
        layer: Layer,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions_M: torch.Tensor,
        queries: int,
    ) -> torch.Tensor:
        """Queries (M, H D), normed and rotated; keys and values are in the cache."""
        tokens = len(heads_MN)
        query_MHD = heads_MN.new_empty((tokens, self.heads * self.head_width))
        self._kernels.place_heads[(tokens, self.heads + 2 * self.kv_heads)](
            heads_MN,
            query_MHD,
            keys,
            values,
            positions_M,
            self.angles_C2D,
            layer.query_norm,
            layer.key_norm,
            self.weights.eps,
            len(self.angles_C2D) - 1,
            queries,
            self.capacity,
            H=self.heads,
            J=self.kv_heads,
            D=self.head_width,
            HALF=power_of_two(self.head_width // 2),
            NORM=layer.query_norm is not None,
            OVERLAP=self.product.overlap,
            num_warps=1,
            **self.product.launch,
        )
        return query_MHD

    def attend(
        self,
        query_MHD: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions_M: torch.Tensor,
        rows: int,
        queries: int,
        window: int,
    ) -> torch.Tensor:
        """(M, H D)."""
        groups = self.heads // self.kv_heads
        most = MOST_GROUPED if query_MHD.dtype == torch.bfloat16 else MOST_GROUPED_FLOAT
        block = min(most, max(16, power_of_two(queries * groups)))
        blocks, width = -(-queries * groups // block), max(16, power_of_two(self.head_width))
        split = max(1, min(32, PROGRAMS // (rows * self.kv_heads * blocks), -(-self.capacity // LONG)))
        programs = rows * self.kv_heads
        if split > 1:
            self.product.work.sized(programs * blocks * split * (block * width + 2 * block), programs * blocks)
        y_MHD = torch.empty_like(query_MHD)
        self._kernels.attend[(programs, split, blocks)](
            query_MHD, keys, values, positions_M, y_MHD, self.product.work.partial, self.product.work.counters,
            self.weights.scale, window, queries, self.capacity,
            J=self.kv_heads, G=groups, D=self.head_width, DP=width, BQ=block, BC=64, SPLIT=split,
            PRECISION=self.product.precision, STAGES=2, OVERLAP=self.product.overlap, num_warps=4, **self.product.launch,
        )  # fmt: skip
        return y_MHD


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
