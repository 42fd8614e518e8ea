"""Models with quantised weights: loaded as saved, since that is what is served, and dequantised if a draft is made from them."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from speculative.errors import UserError

# The 8-bit product is used up to this number of rows. For more rows dequantising the weight is faster.
FEW_ROWS = 16
# Torch's kernel reads K in steps of this size without a bounds check, so other widths give wrong sums.
KERNEL_STEP = 64


def require_quantizer(how: str | None) -> None:
    """Raise UserError for 8-bit weights without compressed-tensors, before the long work starts."""
    if how is not None and find_spec("compressed_tensors") is None:
        raise UserError(
            f"--quantize {how} needs compressed-tensors; `pip install 'understudy[quantize]'`, or set export.quantize to null"
        )


def quantization_of(config: Any) -> Any:
    """Return the quantisation in a checkpoint's config (a dict or transformers' object); None for plain weights."""
    return getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )


def quantization_name(config: Any) -> str:
    """Return the name of the quantisation: `torchao`, `fp8`, `awq`, ..."""
    found = quantization_of(config)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method))


def without_quantization(config: Any) -> None:
    """Remove the quantisation from a config, in place, for a model made of dequantised weights."""
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config


def is_plain(tensor: Tensor) -> bool:
    """Whether a weight is an ordinary tensor, not a library's own class that packs several."""
    return type(tensor.detach()) is Tensor


def full_weight(tensor: Tensor) -> Tensor:
    """Return the weight's values in floating point, whatever its format."""
    return tensor.detach() if is_plain(tensor) else tensor.detach().dequantize()


def stored_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, ordinary tensor) for each stored part: the weight itself, or the values, scales and offsets of a packed one."""
    tensor = tensor.detach()
    if is_plain(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor if is_plain(tensor) else torch.as_tensor(tensor.dequantize())
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from stored_parts(f"{name}.{part}", getattr(tensor, part))


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights and bfloat16 activations. It is faster on a CPU, where a step's time is mostly weight reads.

    Shapes: N outputs, K inputs. `cast_weights` does not change its weights or their scales.
    """

    scale: Tensor

    def __init__(self, values_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> None:
        super().__init__()
        self.values = nn.Parameter(values_NK, requires_grad=False)
        self.register_buffer("scale", scale_N.bfloat16())
        self.bias = None if bias_N is None else nn.Parameter(bias_N.detach(), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., K) -> (..., N), in the dtype of the inputs."""
        rows = inputs.reshape(-1, inputs.shape[-1]).bfloat16()
        if len(rows) <= FEW_ROWS and rows.shape[1] % KERNEL_STEP == 0:
            outputs = torch.ops.aten._weight_int8pack_mm(rows, self.values, self.scale)
        else:
            outputs = nn.functional.linear(rows, self.values.bfloat16()) * self.scale
        outputs = outputs.to(inputs.dtype).unflatten(0, inputs.shape[:-1])
        return outputs if self.bias is None else outputs + self.bias


def as_served(model: Any, device: torch.device) -> Any:
    """Make a compressed-tensors model compute as it would when served, in place: on a CPU, 8-bit weights stay 8-bit.

    On other devices, or if activations are rounded too, compressed-tensors computes with dequantised values. Any other model is
    returned unchanged. device: where it will compute.
    """
    layers = [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "quantization_scheme")]
    if not layers:
        return model
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.compressors.base import decompress_module

    for name, layer in layers:
        decompress_module(layer)
        scheme = layer.quantization_scheme
        weight_only = scheme.input_activations is None and (scheme.weights.type, scheme.weights.num_bits) == ("int", 8)
        whole_rows = layer.weight_scale.shape[1:] == (1,) and scheme.weights.symmetric  # without zero points
        if weight_only and whole_rows and device.type == "cpu":
            values = (layer.weight.float() / layer.weight_scale.float()).round().to(torch.int8)
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, Int8Linear(values, layer.weight_scale[:, 0], layer.bias))
    ModelCompressor().remove_decompression_hook(model)  # otherwise the first call would decompress again
    return model
