"""The weights of a plain decoder as fused kernels read them: projections of one input side by side, in the model itself.

Shapes: H query heads, J key/value heads, D head width.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from speculative.engine.agreement import Unfit
from speculative.engine.fused.products import Matrix
from speculative.engine.survey import survey_again
from speculative.engine.windows import attention_windows

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
        body: Any = model.base_model
        layers = list(body.layers)[: model.config.num_hidden_layers]
        attention, config = layers[0].self_attn, model.config
        if config.hidden_act not in ("silu", "swish") or attention.head_dim % 2 or model.dtype not in DTYPES:
            raise Unfit(f"{config.hidden_act}, heads of {attention.head_dim}, {model.dtype}")
        self.device, self.dtype = model.device, model.dtype
        self.head_width, self.scale = attention.head_dim, attention.scaling
        self.heads = attention.q_proj.out_features // self.head_width
        self.kv_heads = attention.k_proj.out_features // self.head_width
        self.eps: float = body.norm.variance_epsilon
        self.embedding, self.head_module = _whole(body.embed_tokens.weight), model.lm_head
        self.norm = _whole(body.norm.weight)
        self.head = Matrix(_whole(model.lm_head.weight), model.lm_head.bias)
        windows = attention_windows(model)[: len(layers)]
        self.layers = [_layer(layer, window or 0) for layer, window in zip(layers, windows, strict=True)]


def _layer(layer: Any, window: int) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (None if norm is None else _whole(norm.weight) for norm in norms)
    return Layer(
        _whole(layer.input_layernorm.weight),
        packed(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm,
        key_norm,
        packed(attention.o_proj),
        _whole(layer.post_attention_layernorm.weight),
        packed(mlp.gate_proj, mlp.up_proj),
        packed(mlp.down_proj),
        window,
    )


def _whole(weight: torch.Tensor) -> torch.Tensor:
    if type(weight) not in (nn.Parameter, torch.Tensor) or not weight.is_contiguous():
        raise Unfit("a weight in another form")
    return weight.detach()


# Joint matrices by the address of their first part. They live as long as their parts, which are views of them.
_joint: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def packed(*modules: nn.Linear) -> Matrix:
    """The matrix of linear layers that read the same input. Their parameters become parts of it; the first time, memory for one such
    matrix is needed besides. Raises Unfit unless they are plain.
    """
    kinds = {(type(module), module.weight.dtype, module.bias is None) for module in modules}
    if len(kinds) > 1 or type(modules[0]) is not nn.Linear:
        raise Unfit("a matrix in another form")
    for module in modules:
        _whole(module.weight)
    return Matrix(_together(modules, "weight"), None if modules[0].bias is None else _together(modules, "bias"))


def _together(modules: Sequence[nn.Linear], name: str) -> torch.Tensor:
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
