"""Targets whose weights are saved quantised: loaded as saved, because that is what is served, and read in full where a draft is made of them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def quantization_of(config: Any) -> Any:
    """The quantisation that a checkpoint's config names (a dict or transformers' own object); None for plain weights."""
    return getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )


def quantization_name(config: Any) -> str:
    """`torchao`, `fp8`, `awq`, ...: how the weights are kept."""
    found = quantization_of(config)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method))


def without_quantization(config: Any) -> None:
    """Takes the quantisation out of a config, in place: what is made of dequantised weights has none."""
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config


def is_plain(tensor: Tensor) -> bool:
    """Whether a weight is an ordinary tensor, not one of a library's own class that packs several."""
    return type(tensor.detach()) is Tensor


def full_weight(tensor: Tensor) -> Tensor:
    """The weight's values in floating point, whatever keeps them."""
    return tensor.detach() if is_plain(tensor) else tensor.detach().dequantize()


def stored_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, ordinary tensor) of all that a weight keeps: itself, or a packed one's values, scales and offsets."""
    tensor = tensor.detach()
    if is_plain(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor if is_plain(tensor) else torch.as_tensor(tensor.dequantize())
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from stored_parts(f"{name}.{part}", getattr(tensor, part))
