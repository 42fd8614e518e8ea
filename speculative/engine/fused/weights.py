"""The weights of a plain decoder as fused kernels read them: projections of one input side by side, in the model itself.

Shapes: H query heads, J key/value heads, D head width.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from speculative.engine.architectures import LayerParts, Parts, Unfit
from speculative.engine.fused.products import Matrix
from speculative.engine.survey import survey_again

# float16 has too small a range for inputs that are normed after their product.
DTYPES = (torch.float32, torch.bfloat16)


class Layer(NamedTuple):
    """Weights of a layer; `heads`: queries, keys and values in one matrix; `gated`: gate and up; `window`: 0 for none."""

    norm: torch.Tensor
    heads: Matrix
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: Matrix
    mlp_norm: torch.Tensor
    gated: Matrix
    down: Matrix
    window: int


class Weights:
    """A model's weights and sizes, for one decode call, because weights may have moved."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises Unfit for an unsupported part."""
        parts = Parts(model)
        if model.dtype not in DTYPES:
            raise Unfit(str(model.dtype))
        self.device, self.dtype = model.device, model.dtype
        self.head_width, self.scale, self.eps = parts.head_width, parts.scaling, parts.epsilon
        first: Any = parts.layers[0]
        self.heads, self.kv_heads = (one.out_features // self.head_width for one in (first.query, first.key))
        self.embedding, self.norm = _whole(parts.embedding.weight), _whole(parts.norm)
        self.head = Matrix(_whole(parts.head.weight), parts.head.bias)
        self.layers = [_layer(layer) for layer in parts.layers]


def _layer(layer: LayerParts) -> Layer:
    query_norm, key_norm = (None if norm is None else _whole(norm) for norm in (layer.query_norm, layer.key_norm))
    return Layer(
        _whole(layer.norm),
        packed(layer.query, layer.key, layer.value),
        query_norm,
        key_norm,
        packed(layer.out),
        _whole(layer.mlp_norm),
        packed(layer.gate, layer.up),
        packed(layer.down),
        layer.window,
    )


def _whole(weight: torch.Tensor) -> torch.Tensor:
    if type(weight) not in (nn.Parameter, torch.Tensor) or not weight.is_contiguous():
        raise Unfit("a weight in another form")
    return weight.detach()


# Joint matrices by the address of their first part. They live as long as their parts, which are views of them.
_joint: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def packed(*modules: Any) -> Matrix:
    """The matrix of linear layers that read the same input. Their parameters become parts of it; the first time, memory for one such
    matrix is needed besides. Raises Unfit unless they are plain.
    """
    kinds = {(type(module), module.weight.dtype, module.bias is None) for module in modules}
    if len(kinds) > 1 or type(modules[0]) is not nn.Linear:
        raise Unfit("a matrix in another form")
    for module in modules:
        _whole(module.weight)
    return Matrix(_together(modules, "weight"), None if modules[0].bias is None else _together(modules, "bias"))


def _together(modules: Sequence[Any], name: str) -> torch.Tensor:
    parts: list[torch.Tensor] = [getattr(module, name) for module in modules]
    if len(parts) == 1:
        return parts[0].detach()
    place, joined = parts[0].data_ptr(), _joint.get(parts[0].data_ptr())
    for tensor in parts:
        joined = joined if tensor.data_ptr() == place and tensor.is_contiguous() else None
        place += tensor.nbytes
    if joined is not None and joined.data_ptr() + joined.nbytes == place:
        return joined
    # Training goes on with these weights, so they must not be made in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        joint = torch.cat(parts)
        for tensor, part in zip(parts, joint.split([len(tensor) for tensor in parts]), strict=True):
            # Each with a storage of its own: whoever saves weights takes parts of one storage for one weight under several names.
            tensor.data = torch.from_dlpack(part)
    survey_again()
    _joint[joint.data_ptr()] = joint
    return joint
