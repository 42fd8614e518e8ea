"""What one walk through a model's modules finds, and what is remembered of a model while nothing about them changes. The walk takes as long
as a small model's step, and opening a decode call asks several times: while it does (`surveyed`), each model is walked once.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import nn

from speculative.engine.library_state import all_modules, buffers_of, hooks_of, replaced_calls, version_of, weights_of

SETTINGS = (int, float, bool, str)  # types of scalings, widths and names that modules hold
SMALL = 1024  # numbers of a buffer that are compared one by one
UNSETTLED = ("training", "max_seq_len_cached")  # change without a change of what a call gives, up to the context

_locks: dict[
    int, threading.RLock
] = {}  # by the identity of a config: models may share one, and an adapter has its model's
_of_locks = threading.Lock()


class Turn:
    """Context manager: one thread at a time works with these models, which switches their attention and their mode. Reentrant."""

    def __init__(self, *models: nn.Module | None) -> None:
        configs = {id(model.config): model.config for model in models if model is not None}
        with _of_locks:
            for key, config in configs.items():
                if key not in _locks:
                    _locks[key] = threading.RLock()
                    weakref.finalize(config, _locks.pop, key)
            self._held = [
                _locks[key] for key in sorted(configs)
            ]  # in one order for all, so that nobody waits in a circle

    def __enter__(self) -> None:
        for lock in self._held:
            lock.acquire()

    def __exit__(self, *error: object) -> None:
        for lock in self._held:
            lock.release()


class Survey:
    """modules: all, each as often as it is reached. weights: their parameters. ordinary: every weight is a plain parameter, not of a tensor
    subclass (quantised, distributed). listened_to: some or every module has a hook, another forward or a compiled call of its own. state:
    equal as long as weights and buffers keep their addresses, shapes and dtypes, and modules their kinds and adapters. It does not see what
    changes in place, as weights do in training, nor inside a tensor subclass, which has no address. fingerprint: changes with everything
    that decides logits, numbers that change in place too; not with a change through a tensor's `data`, nor in a
    small computed table on a device.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modules = model, all_modules(model)

    @cached_property
    def weights(self) -> list[torch.Tensor]:
        return weights_of(self.modules)

    @cached_property
    def ordinary(self) -> bool:
        return all(type(weight) is nn.Parameter for weight in self.weights)

    @cached_property
    def listened_to(self) -> bool:
        return bool(hooks_of(self.modules)) or replaced_calls(self.modules)

    @cached_property
    def state(self) -> Any:
        kinds = list(map(type, self.modules))
        # Of adapters it is a property; transformers' models have a method of this name.
        adapting = {kind for kind in set(kinds) if isinstance(getattr(kind, "disable_adapters", None), property)}
        told = ("active_adapters", "disable_adapters", "merged_adapters")
        return (
            [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in (*self.weights, *self.buffers)],
            kinds,
            [
                [str(getattr(one, name, "")) for name in told]
                for one in self.modules
                if adapting and type(one) in adapting
            ],
        )

    @cached_property
    def buffers(self) -> list[torch.Tensor]:
        return [own for own, _ in self._stored_buffers]

    @cached_property
    def _stored_buffers(self) -> list[tuple[torch.Tensor, bool]]:
        return buffers_of(self.modules)

    @cached_property
    def fingerprint(self) -> int:
        device = getattr(self.model, "device", torch.device("cpu"))
        modes = torch.is_autocast_enabled(device.type), torch.get_float32_matmul_precision()
        # Some models make their rotary table anew in every call.
        small = {id(own): own for own, stored in self._stored_buffers if not stored and own.numel() <= SMALL}
        tensors, (places, kinds, adapters) = (*self.weights, *self.buffers), self.state
        addresses = [place for own, place in zip(tensors, places, strict=True) if id(own) not in small]
        versions = [version_of(own) for own in tensors if id(own) not in small]
        # Numbers on a device would have to be waited for in every call.
        tables = [(own.dtype, own.shape, *(own.flatten().tolist() if own.is_cpu else ())) for own in small.values()]
        # The walk takes as long as all the rest: names would double it.
        settings = [
            value
            for one in self.modules
            for name, value in one.__dict__.items()
            if type(value) in SETTINGS and name not in UNSETTLED
        ]
        configs = {id(own): own for one in self.modules if (own := vars(one).get("config"))}
        parts = addresses, kinds, versions, tables, settings, hooks_of(self.modules), map(config_text, configs.values())
        return hash((modes, str(adapters), *map(tuple, parts)))


def config_text(config: Any) -> str:
    """What a config says."""
    return str(getattr(config, "__dict__", {"": config}))


_open: ContextVar[dict[nn.Module, Survey] | None] = ContextVar("surveys of models that do not change now", default=None)
_facts: weakref.WeakKeyDictionary[nn.Module, tuple[Any, dict[Any, Any]]] = weakref.WeakKeyDictionary()


@contextmanager
def surveyed() -> Iterator[None]:
    """Context manager: nobody changes models' modules meanwhile, so `survey` walks each once. A nested one has the outer one's surveys."""
    if _open.get() is not None:
        yield
        return
    before = _open.set({})
    try:
        yield
    finally:
        _open.reset(before)


def survey(model: nn.Module) -> Survey:
    """The model's survey: of this moment, or inside `surveyed` the one of the first question, each part as it was when first asked for."""
    surveys = _open.get()
    if surveys is None:
        return Survey(model)
    if model not in surveys:
        surveys[model] = Survey(model)
    return surveys[model]


def survey_again() -> None:
    """Inside `surveyed`: weights have been moved, perhaps shared ones."""
    (_open.get() or {}).clear()


def facts_of(model: nn.Module) -> dict[Any, Any]:
    """What is remembered of a model, by name; empty once its state has changed."""
    state, known = survey(model).state, _facts.get(model)
    if known is None or known[0] != state:
        known = _facts[model] = (state, {})
    return known[1]
