"""Calls `step.cpp` for plain decoders: the model, cache and call data that it gets.

Shapes: R rows, K rows of one call (all, or a few), Q query tokens, N1 nodes of a token tree with its root, C capacity, D head
width, V vocabulary.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from speculative.engine.agreement import agrees
from speculative.engine.architectures import LayerParts, Parts, Unfit, is_plain, rotary_of
from speculative.engine.cache import RaggedCache, RaggedLayer
from speculative.engine.compiled.layouts import Call, Layer, Matrix, Model
from speculative.engine.compiled.library import library
from speculative.engine.models import max_positions, vocab_rows
from speculative.engine.survey import facts_of, survey
from speculative.engine.windows import attention_windows
from speculative.rules.tree import TokenTree

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
FEWEST_OUTPUTS = 4  # smallest matrix output and cache length, because tiles have this size


def compiled_model(model: PreTrainedModel, cache: RaggedCache) -> "CompiledModel | None":
    """Return the compiled model, or None if it must run eagerly: no library, an unsupported model, or different logits."""
    loaded = library() if model.device.type == "cpu" and is_plain(model) else None
    if loaded is None:
        return None
    try:
        agreed = agrees(model, "compiled code", lambda capacity: CompiledModel(loaded, model, _cache(model, capacity)))
        return CompiledModel(loaded, model, cache) if agreed else None
    except (Unfit, AttributeError):  # AttributeError: names of another release
        return None


def _cache(model: PreTrainedModel, capacity: int) -> RaggedCache:
    return RaggedCache(model.config.num_hidden_layers, rows=2, capacity=capacity)


class _Weights:
    """A model's sizes and the addresses of its weights. `copied`: some are copies in another dtype."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises Unfit for an unsupported part."""
        parts, self.dtype, self.vocab = Parts(model), model.dtype, vocab_rows(model)
        if self.dtype not in KINDS:
            raise Unfit(str(self.dtype))
        self.copied = False
        self.alive: list[torch.Tensor] = []  # tensors that are used by address only
        self.head_width, width, first = parts.head_width, parts.width, parts.layers[0]
        heads, self.kv_heads = (_outputs(module) // self.head_width for module in (first.query, first.key))
        inner, rows = _outputs(first.gate), _outputs(parts.embedding)
        if rows < self.vocab:
            raise Unfit("fewer embeddings than logits")
        self.model = Model(
            layers=len(parts.layers),
            width=width,
            heads=heads,
            kv_heads=self.kv_heads,
            head_width=self.head_width,
            inner=inner,
            cache_kind=KINDS[self.dtype],
            embedding=self._matrix(parts.embedding, rows, width),
            head=self._matrix(parts.head, _outputs(parts.head), width),
            norm=self._floats(parts.norm, width),
            epsilon=parts.epsilon,
            scaling=parts.scaling,
        )
        self.layers = (Layer * len(parts.layers))(*(self._layer(layer) for layer in parts.layers))

    def _layer(self, layer: LayerParts) -> Layer:
        sizes, D = self.model, self.head_width
        width, inner, heads, kv_heads = sizes.width, sizes.inner, sizes.heads * D, sizes.kv_heads * D
        return Layer(
            norm=self._floats(layer.norm, width),
            second_norm=self._floats(layer.mlp_norm, width),
            query_norm=None if layer.query_norm is None else self._floats(layer.query_norm, D),
            key_norm=None if layer.key_norm is None else self._floats(layer.key_norm, D),
            query=self._matrix(layer.query, heads, width),
            key=self._matrix(layer.key, kv_heads, width),
            value=self._matrix(layer.value, kv_heads, width),
            out=self._matrix(layer.out, width, heads),
            gate=self._matrix(layer.gate, inner, width),
            up=self._matrix(layer.up, inner, width),
            down=self._matrix(layer.down, width, inner),
            window=layer.window,
        )

    def _matrix(self, module: nn.Module, outputs: int, inputs: int) -> Matrix:
        values, scale_N = _stored(module)
        if type(values) is not torch.Tensor or values.dtype not in KINDS or outputs < FEWEST_OUTPUTS:
            raise Unfit(f"a matrix of {type(values).__name__}, {values.dtype}")
        if values.shape != (outputs, inputs):
            raise Unfit(f"a matrix of {tuple(values.shape)} where others have {outputs, inputs}")
        bias: Any = getattr(module, "bias", None)
        return Matrix(
            weight=self._at(values.contiguous(), values),
            scale=None if scale_N is None else self._floats(scale_N, outputs),
            bias=None if bias is None else self._floats(bias, outputs),
            kind=KINDS[values.dtype],
            outputs=outputs,
        )

    def _floats(self, tensor: torch.Tensor, size: int) -> int:
        if tensor.numel() != size:
            raise Unfit(f"{tensor.numel()} numbers where others have {size}")
        return self._at(tensor.detach().float().contiguous(), tensor)

    def _at(self, tensor: torch.Tensor, own: torch.Tensor) -> int:
        self.copied = self.copied or tensor.data_ptr() != own.data_ptr()
        self.alive.append(tensor)
        return tensor.data_ptr()


def _weights_of(model: PreTrainedModel) -> tuple[_Weights, list[torch.Tensor]]:
    """The weights, and the tensors to keep alive while their addresses are used."""
    surveyed, config, facts = survey(model), model.config, facts_of(model)
    name = ("weights", config.num_hidden_layers, config.hidden_size, config.hidden_act, tuple(attention_windows(model)))
    weights = facts.get(name) or _Weights(model)
    tensors = [weight.detach() for weight in surveyed.weights]
    if not weights.copied and surveyed.ordinary:
        weights.alive = []  # otherwise a moved model's memory would not be freed
        facts[name] = weights
    return weights, tensors


def _angles(model: PreTrainedModel, positions: int) -> list[torch.Tensor]:
    """Cosines and sines (positions or more, D) of a model's rotary positions."""
    facts, rotary = facts_of(model), rotary_of(model)
    made_for = rotary.inv_freq.tolist(), rotary.attention_scaling  # they may be changed in place
    known = facts.get("angles")
    if known is None or known[0] != made_for or len(known[1][0]) < positions:
        found = rotary(torch.zeros(1), position_ids=torch.arange(positions).unsqueeze(0))
        known = facts["angles"] = made_for, [angle[0].detach().float().contiguous() for angle in found]
    return cast(list[torch.Tensor], known[1])


class CompiledModel:
    """A model's weights and a cache's buffers by address, for one decode call, because weights may have moved. Logits and activations are
    float32.
    """

    def __init__(self, loaded: ctypes.CDLL, model: PreTrainedModel, cache: RaggedCache):
        """Raises Unfit for an unsupported part."""
        weights, self._kept = _weights_of(model)
        self._weights = weights
        self.library, self._cache, self.vocab = loaded, cache, weights.vocab
        self._layers, self._known_keys = type(weights.layers).from_buffer_copy(weights.layers), torch.empty(0)
        assert isinstance(cache.layers[0], RaggedLayer)
        self._first_layer: Any = cache.layers[0]
        capacity = cache.place.capacity
        if capacity < FEWEST_OUTPUTS:
            raise Unfit(f"a cache of {capacity} positions")
        positions = min(capacity, max_positions(model.config) or capacity)
        self._angles = _angles(model, positions)
        if self._angles[0].shape[-1] != weights.head_width:
            raise Unfit("a part of a head is rotated")
        self._model = Model.from_buffer_copy(weights.model)
        self._model.capacity, self._model.positions = capacity, positions
        self._model.cosines, self._model.sines = (angle.data_ptr() for angle in self._angles)
        for layer in cache.layers[: len(self._layers)]:
            assert isinstance(layer, RaggedLayer)
            if not layer.is_initialized:
                empty = torch.zeros((0, weights.kv_heads, 0, weights.head_width), dtype=weights.dtype)
                layer.lazy_initialization(empty, empty)
        self._addresses = ctypes.addressof(self._model), ctypes.addressof(self._layers)

    def __call__(
        self,
        ids_KQ: torch.Tensor,
        starts_K: np.ndarray,
        logits_kept: int,
        rows: Sequence[int] | None = None,
        tree: TokenTree | None = None,
    ) -> torch.Tensor:
        """Logits (K, logits_kept, V) after the last of Q tokens, written from each row's start on; with a tree, after its nodes."""
        rows_count, queries = ids_KQ.shape
        assert logits_kept <= queries
        assert int(starts_K.max()) + queries <= self._cache.place.capacity
        logits = torch.empty((rows_count, logits_kept, self.vocab))
        ids_KQ, starts_K = ids_KQ.contiguous(), np.ascontiguousarray(starts_K, dtype=np.int64)
        rows_K = None if rows is None else np.array(rows, dtype=np.int64)
        depths, sees = (None, None) if tree is None else _tree(tree)
        call = Call(
            rows=rows_count,
            tokens=queries,
            kept=logits_kept,
            threads=torch.get_num_threads(),
            ids=ids_KQ.data_ptr(),
            starts=address_of(starts_K),
            cache_rows=address_of(rows_K),
            depths=address_of(depths),
            sees=address_of(sees),
            logits=logits.data_ptr(),
        )
        check(self.library.call_model(*self.addresses(), ctypes.addressof(call)) != 0)
        return logits

    def addresses(self) -> tuple[int, int]:
        """Addresses of the model and of its layers, for compiled code."""
        first = self._first_layer.keys
        if first is not self._known_keys:  # the cache was compacted, by this call or by another user of it
            for layer, (keys, values) in zip(self._layers, self._cache.by_layer, strict=False):
                layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
            self._known_keys = first
        return self._addresses


def _stored(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A matrix's numbers and, for 8-bit weights, the scale of each output: torchao's, or a module with `values` and `scale`."""
    if hasattr(module, "values"):
        return module.values.detach(), module.scale
    weight = module.weight.detach()
    if not hasattr(weight, "qdata"):
        return weight, None
    # 8-bit activations and scales for parts of a row are not supported.
    whole_rows = list(weight.block_size) == [1, weight.shape[1]] and weight.scale.numel() == weight.shape[0]
    if weight.act_quant_kwargs is not None or not whole_rows or bool(weight.zero_point.any()):
        raise Unfit("8-bit weights of another scheme")
    return weight.qdata, weight.scale.view(-1)


def check(failed: bool) -> None:
    """Raises RuntimeError, as torch does, if memory is short."""
    if failed:
        raise RuntimeError("compiled code cannot allocate memory")


def _outputs(module: Any) -> int:
    return len(_stored(module)[0])


def _tree(tree: TokenTree) -> tuple[np.ndarray, np.ndarray]:
    """Depth (N1) of each node, and the nodes it sees (N1, N1)."""
    shape = tree.on(torch.device("cpu"))
    return shape.depths_N1.numpy(), shape.ancestors_N1N1.numpy()


def address_of(array: np.ndarray | None) -> int:
    """Address of the first element; 0 (null in compiled code) for None."""
    return 0 if array is None else array.ctypes.data
