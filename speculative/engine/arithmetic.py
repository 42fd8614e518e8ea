"""A model that computes as an engine does: the inputs of every product are rounded as there. With 16-bit weights to the same 16 bits; with
quantised weights llama.cpp rounds them to 8 bits, in blocks with a scale. The engine's own errors are others, of the same size.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BLOCKS = {"8 bits by 32": 32, "8 bits by 256": 256}


def rounded(values: Tensor, inputs: str) -> Tensor:
    """Values as inputs of a product in this precision, a key of FLOATS or BLOCKS."""
    if inputs in FLOATS:
        return values.to(FLOATS[inputs]).to(values.dtype)
    width, size = values.shape[-1], BLOCKS[inputs]
    blocks = values.unflatten(-1, (-1, size if width % size == 0 else width))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(values.dtype).tiny)
    return ((blocks / scale).round() * scale).flatten(-2)


@contextlib.contextmanager
def computing_as(model: PreTrainedModel, inputs: str) -> Iterator[None]:
    """Round the inputs of all linear layers within the block, and 16-bit weights; other weights are the engine's own. Empty: nothing."""
    layers = [layer for layer in model.modules() if inputs and isinstance(layer, nn.Linear)]
    weights = {layer.weight: layer.weight.data for layer in layers if inputs in FLOATS}
    hooks = [layer.register_forward_pre_hook(lambda _, args: (rounded(args[0], inputs), *args[1:])) for layer in layers]
    try:
        for weight, exact in weights.items():
            weight.data = rounded(exact, inputs)
        yield
    finally:
        for weight, exact in weights.items():
            weight.data = exact
        for hook in hooks:
            hook.remove()
