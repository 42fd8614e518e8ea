"""Private state of torch and transformers that this package, its drafters and the loss use, each with its reason and what would end it.

torch 2.13: the public iterators over a module's parts keep books of what they met, which takes as long as a small model's step; there is
no public question for hooks or for a buffer's place in a saved model. A fast public walk would end the first nine functions.
transformers 5.23: `set_attn_implementation` loads kernels and checks again in every call; a public context manager would end `attention`.
"""

import copy
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

_HOOKS_OF_ALL = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)
_ASKS_FOR_SDPA = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)[^\n]*[\"']sdpa")


def all_modules(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, each as often as it is reached."""
    modules = [model]
    for module in modules:
        if module._modules:  # most have none
            modules += [child for child in module._modules.values() if child is not None]
    return modules


def weights_of(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """The parameters that these modules hold themselves."""
    return [own for one in modules if one._parameters for own in one._parameters.values() if own is not None]


def buffers_of(modules: Sequence[nn.Module]) -> list[tuple[torch.Tensor, bool]]:
    """The buffers that these modules hold themselves, and whether a saved model has them."""
    return [
        (buffer, name not in module._non_persistent_buffers_set)
        for module in modules
        if module._buffers
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def renew_buffers(modules: Sequence[nn.Module]) -> None:
    """Make buffers that were written in inference mode ordinary tensors again."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_inference():
                module._buffers[name] = buffer.clone()


def hooks_of(modules: Sequence[nn.Module]) -> list[int]:
    """Keys of all forward hooks, also of those of every module."""
    of_each = (own for one in modules for own in (one._forward_hooks, one._forward_pre_hooks))
    return [key for own in (*_HOOKS_OF_ALL, *of_each) for key in own]


def is_hooked(layer: nn.Module) -> bool:
    """Whether a call of a layer, or the backward of that, does more than its class's forward."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return "forward" in vars(layer) or any(hooks)


def replaced_calls(modules: Sequence[nn.Module]) -> bool:
    """Whether some module has another forward or a compiled call of its own."""
    return any("forward" in vars(one) or one._compiled_call_impl for one in modules)


def version_of(tensor: torch.Tensor) -> int:
    """The number of changes in place."""
    return 0 if tensor.is_inference() else tensor._version


def hollow_copy(module: Any) -> Any:
    """The same module with its own table of children: replacing a child leaves the original as it is."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def configs_of(model: nn.Module) -> dict[int, PretrainedConfig]:
    """The configs that a model's modules read, by identity."""
    held = (getattr(module, "config", None) for module in model.modules())
    return {id(config): config for config in held if isinstance(config, PretrainedConfig)}


def attention_name(config: Any) -> str | None:
    """Name of the attention function of a config."""
    return getattr(config, "_attn_implementation", None)


@contextmanager
def attention(configs: Sequence[PretrainedConfig], name: str) -> Iterator[None]:
    """Context manager: layers that read these configs use this attention function."""
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            config._attn_implementation = own


def dispatches_attention(model: nn.Module) -> bool:
    """Whether transformers looks up the attention function of this model's layers by name."""
    return bool(getattr(model, "_supports_attention_backend", False))


def keeps_state(model: nn.Module) -> bool:
    """Whether transformers says that the model keeps a state other than keys and values, which its cache may not show."""
    return bool(getattr(model, "_is_stateful", False))


def asks_for_sdpa(model: nn.Module) -> bool:
    """Whether the code of some module behaves differently if the attention is not called `sdpa` (Falcon, Gemma 4)."""
    held = (module for module in model.modules() if isinstance(getattr(module, "config", None), PretrainedConfig))
    return any(_code_asks(type(module).__module__) for module in held)


@lru_cache(maxsize=64)
def _code_asks(module_name: str) -> bool:
    return _ASKS_FOR_SDPA.search(inspect.getsource(sys.modules[module_name])) is not None
