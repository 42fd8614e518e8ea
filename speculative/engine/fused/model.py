"""The step of a plain decoder in fused kernels: which models are supported, their weights, and the calls.

Shapes: R rows, Q query tokens, M = R Q tokens of a call, C positions of the cache, H query heads, J key/value heads, D head width,
V vocabulary.
"""

import functools
import importlib.util
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from speculative.engine.cache import RaggedCache, RaggedLayer
from speculative.engine.fused.products import PROGRAMS, Matrix, Products, power_of_two
from speculative.engine.models import attention_windows, max_positions
from speculative.engine.plain_decoders import CHECKED_TOKENS, Unfit, agrees, is_plain

MOST_GROUPED = 64  # query tokens times heads of a group in one program
LONG = 256  # positions that one program of attention reads before others help


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = (8, 0)  # compute capability: bfloat16 products

_broken: list[Exception] = []  # why no kernel can be compiled or run here


def serves(model: PreTrainedModel) -> bool:
    """Whether the model is supported and gives its own logits in fused kernels; they are run once. Its weights are packed."""
    if (
        _broken
        or not (model.device.type == "cuda" and _usable() and is_plain(model))
        or torch.is_autocast_enabled("cuda")
    ):
        return False
    if torch.cuda.get_device_capability(model.device) < OLDEST:
        return False
    try:
        return agrees(model, "fused kernels", lambda: _call_of(model))
    except (Unfit, AttributeError):  # AttributeError: names of another release
        return False
    except Exception as error:  # of Triton's compiler or its driver
        warnings.warn(f"models run without fused kernels: {(str(error).splitlines() or [''])[0]}", stacklevel=2)
        _broken.append(error)
        return False


@functools.cache
def _usable() -> bool:
    return torch.version.cuda is not None and importlib.util.find_spec("triton") is not None


def _call_of(model: PreTrainedModel) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Calls of two rows that start at one position, for `agrees`."""
    fused = FusedModel(model, RaggedCache(model.config.num_hidden_layers, rows=2, capacity=CHECKED_TOKENS))

    def call(ids_RQ: torch.Tensor, start: int) -> torch.Tensor:
        queries = ids_RQ.shape[1]
        positions_Q = torch.arange(start, start + queries, device=ids_RQ.device)
        return fused(ids_RQ, positions_Q.repeat(2, 1), queries)

    return call


class Layer(NamedTuple):
    """Weights of a layer; `heads`: queries, keys and values in one matrix; `gated`: gate and up."""

    norm: torch.Tensor
    heads: Matrix
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: Matrix
    mlp_norm: torch.Tensor
    gated: Matrix
    down: Matrix
    window: int


class FusedModel:
    """A model's weights and a cache's buffers. Queries, keys and values become views of one matrix, gate and up of another, in the
    model itself: no second copy.
    """

    def __init__(self, model: PreTrainedModel, cache: RaggedCache) -> None:
        """Raises Unfit for an unsupported part."""
        from speculative.engine.fused import kernels

        self._kernels = kernels
        body: Any = model.base_model
        layers = list(body.layers)[: model.config.num_hidden_layers]
        attention, config = layers[0].self_attn, model.config
        if config.hidden_act not in ("silu", "swish") or attention.head_dim % 2 or model.dtype not in DTYPES:
            raise Unfit(f"{config.hidden_act}, heads of {attention.head_dim}, {model.dtype}")
        self.device, self.dtype = model.device, model.dtype
        self.head_width, self.scale = attention.head_dim, attention.scaling
        self.heads = attention.q_proj.out_features // self.head_width
        self.kv_heads = attention.k_proj.out_features // self.head_width
        self.eps, self.capacity = body.norm.variance_epsilon, cache.place.capacity
        self.embedding, self.head, self.norm = body.embed_tokens.weight, model.lm_head, body.norm.weight
        windows = attention_windows(model)[: len(layers)]
        self.layers = [_layer(layer, window or 0) for layer, window in zip(layers, windows, strict=True)]
        positions = min(self.capacity, max_positions(config) or self.capacity)
        places = torch.arange(positions, device=self.device).unsqueeze(0)
        cosines, sines = body.rotary_emb(torch.zeros(1, dtype=self.dtype, device=self.device), position_ids=places)
        self.angles_C2D = torch.cat((cosines[0], sines[0]), -1).contiguous()
        for own in cache.layers[: len(self.layers)]:
            assert isinstance(own, RaggedLayer)
            if not own.is_initialized:
                empty = torch.zeros((0, self.kv_heads, 0, self.head_width), dtype=self.dtype, device=self.device)
                own.lazy_initialization(empty, empty)
        self.buffers = cache.by_layer
        if self.angles_C2D.shape[-1] != 2 * self.head_width:
            raise Unfit("a part of a head is rotated")
        self.product = Products(self.device, self.dtype, self.eps)

    def __call__(self, ids_RQ: torch.Tensor, positions_RQ: torch.Tensor, kept: int) -> torch.Tensor:
        """Logits (R, kept, V) of the last tokens. Tokens are written at their positions and see everything before."""
        rows, queries = ids_RQ.shape
        positions_M = positions_RQ.reshape(-1).contiguous()
        x_MK = embedding(ids_RQ.reshape(-1), self.embedding)
        for layer, (keys, values) in zip(self.layers, self.buffers, strict=False):
            heads_MN = self.product(x_MK, layer.heads, layer.norm)
            query_MHD = self.place_heads(heads_MN, layer, keys, values, positions_M, queries)
            mixed_MN = self.attend(query_MHD, keys, values, positions_M, rows, queries, layer.window)
            x_MK = self.product(mixed_MN, layer.out, add=x_MK)
            inner_MN = self.product(x_MK, layer.gated, layer.mlp_norm, gated=True)
            x_MK = self.product(inner_MN, layer.down, add=x_MK)
        last_MK = x_MK.view(rows, queries, -1)[:, -kept:].reshape(rows * kept, -1).contiguous()
        logits = self.product(last_MK, Matrix(self.head.weight, self.head.bias), self.norm).view(rows, kept, -1)
        return self.head.spread(logits) if hasattr(self.head, "spread") else logits

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
            heads_MN, query_MHD, keys, values, positions_M, self.angles_C2D, layer.query_norm, layer.key_norm, self.eps,
            len(self.angles_C2D) - 1, queries, self.capacity, H=self.heads, J=self.kv_heads, D=self.head_width,
            HALF=power_of_two(self.head_width // 2), NORM=layer.query_norm is not None, OVERLAP=self.product.overlap, num_warps=1,
            **self.product.launch,
        )  # fmt: skip
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
        block = min(MOST_GROUPED, max(16, power_of_two(queries * groups)))
        blocks, width = -(-queries * groups // block), max(16, power_of_two(self.head_width))
        split = max(1, min(32, PROGRAMS // (rows * self.kv_heads * blocks), -(-self.capacity // LONG)))
        programs = rows * self.kv_heads
        if split > 1:
            self.product.work.sized(programs * blocks * split * (block * width + 2 * block), programs * blocks)
        y_MHD = torch.empty_like(query_MHD)
        self._kernels.attend[(programs, split, blocks)](
            query_MHD, keys, values, positions_M, y_MHD, self.product.work.partial, self.product.work.counters, self.scale, window, queries,
            self.capacity, J=self.kv_heads, G=groups, D=self.head_width, DP=width, BQ=block, BC=64, SPLIT=split,
            PRECISION=self.product.precision, STAGES=2, OVERLAP=self.product.overlap, num_warps=4, **self.product.launch,
        )  # fmt: skip
        return y_MHD


def _layer(layer: Any, window: int) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (None if norm is None else norm.weight for norm in norms)
    return Layer(
        layer.input_layernorm.weight, packed(attention.q_proj, attention.k_proj, attention.v_proj), query_norm, key_norm,
        packed(attention.o_proj), layer.post_attention_layernorm.weight, packed(mlp.gate_proj, mlp.up_proj), packed(mlp.down_proj),
        window,
    )  # fmt: skip


# Joint matrices, by the first module of each.
_joint: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()


def forget(model: nn.Module | None = None) -> None:
    """Forget the joint matrices of a model, or of all. Parameters that are part of one keep its memory until all of them have moved."""
    for module in list(_joint) if model is None else model.modules():
        _joint.pop(module, None)


def packed(*modules: nn.Linear) -> Matrix:
    """The matrix of linear layers that read the same input. Their parameters become parts of it; the first time, memory for one such
    matrix is needed besides. Raises Unfit unless they are plain.
    """
    kinds = {(type(module), type(module.weight), module.weight.dtype, module.bias is None) for module in modules}
    if len(kinds) > 1 or kinds.pop()[:2] != (nn.Linear, nn.Parameter):
        raise Unfit("a matrix in another form")
    return Matrix(_together(modules, "weight"), None if modules[0].bias is None else _together(modules, "bias"))


def _together(modules: Sequence[nn.Linear], name: str) -> torch.Tensor:
    own: list[torch.Tensor] = [getattr(module, name) for module in modules]
    if len(own) == 1:
        return own[0].detach()
    known = _joint.setdefault(modules[0], {})
    if name in known:
        place = known[name].data_ptr()
        for tensor in own:
            place = place + tensor.nbytes if tensor.data_ptr() == place and tensor.is_contiguous() else 0
        if place == known[name].data_ptr() + known[name].nbytes:
            return known[name]
    # Training goes on with these weights, so they must not be made in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        joint = known[name] = torch.cat(own)
        for tensor, part in zip(own, joint.split([len(tensor) for tensor in own]), strict=True):
            # Each with a storage of its own: whoever saves weights takes parts of one storage for one weight under several names.
            tensor.data = torch.from_dlpack(part)
    return joint
