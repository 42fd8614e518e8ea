"""A model whose decoder layers run compiled: one compilation of a shape serves all its layers, however many.

Called like this on a CPU, every layer pays for the checks that find its compiled code (the embedded pair: 50 tokens a second of
CPU time, 46 plain, 62 compiled whole). In a captured graph there are no checks, and a deep model compiled whole takes minutes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from speculative.engine.cache import RaggedCache, RaggedLayer
from speculative.engine.models import layer_stacks

MOST_SHAPES = 256  # of all models of a process; Dynamo's own limit of 8 is met at once
MODE = "max-autotune-no-cudagraphs"


class _LayersCache:
    """The cache as one layer is shown it: with a number in it, every layer would be compiled by itself."""

    def __init__(self, whole: RaggedCache, index: int):
        own = whole.layers[index]
        assert isinstance(own, RaggedLayer)
        self._whole, self._own = whole, own

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._own.update(key_states, value_states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


@contextmanager
def compiled_layers(model: PreTrainedModel) -> Iterator[None]:
    """Inside, each layer of the model runs compiled, on a RaggedCache; afterwards the model is as it was.

    A model whose layers are not found in one list runs as it is.
    """
    stacks = layer_stacks(model)
    layers = list(model.get_submodule(stacks[0]).children()) if len(stacks) == 1 else []
    before = [vars(layer).get("_compiled_call_impl") for layer in layers]
    try:
        for index, layer in enumerate(layers):
            layer._compiled_call_impl = partial(_call_compiled, layer, index)
        yield
    finally:
        for layer, implementation in zip(layers, before, strict=True):
            del layer._compiled_call_impl
            if implementation is not None:
                layer._compiled_call_impl = implementation


def _call_compiled(layer: nn.Module, index: int, *args: Any, **kwargs: Any) -> Any:
    def shown(value: Any) -> Any:
        return _LayersCache(value, index) if isinstance(value, RaggedCache) else value

    return _compiled()(layer, *map(shown, args), **{name: shown(value) for name, value in kwargs.items()})


@cache
def _compiled() -> Callable[..., Any]:
    """One function for every layer: it holds no model, and Dynamo remembers what it compiled by the function."""
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MOST_SHAPES)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, MOST_SHAPES)
    return torch.compile(_call, dynamic=False, mode=MODE)


def _call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return layer._call_impl(*args, **kwargs)
