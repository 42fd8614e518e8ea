"""CUDA graphs as a tape of host calls: a replay makes them again, on the same memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pretend_cuda.ledger import LEDGER

aten = torch.ops.aten
# Calls of the host that launch nothing.
IDLE = {aten._unsafe_view.default, aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default}


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries. (torch's own walk takes three times as long.)"""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ():
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif isinstance(part, list | tuple | dict):
            found += tensors_of(part)
    return found


def memory_of(tensor: torch.Tensor) -> int:
    """The tensor's memory, whatever view of it this is."""
    return tensor.untyped_storage()._cdata


class Tape:
    """Calls between the begin and the end of a capture.

    A GPU does nothing while it captures. Here the calls are made, for their shapes; at the end what they wrote into older memory
    is undone, and floating-point memory that they made holds NaN until the first replay.
    """

    current: "Tape | None" = None
    replaying = False

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any], Any, Any, list[torch.Tensor]]] = []
        self.kernels = 0
        self._born: dict[int, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def record(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call on host tensors and remember it."""
        self.kernels += function not in IDLE
        given = {memory_of(tensor) for tensor in tensors_of((args, kwargs))}
        written = _written(function, args, kwargs)
        for tensor in written:
            if memory_of(tensor) not in self._born and memory_of(tensor) not in self._before:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self._before[memory_of(tensor)] = (whole, whole.clone())
        out = function(*args, **kwargs)
        made = tensors_of(out)
        self._born |= {memory_of(tensor): tensor for tensor in made if memory_of(tensor) not in given}
        self._calls.append((function, args, kwargs, [] if written else made))
        return out

    def finish(self) -> None:
        """As if nothing had run."""
        for whole, before in self._before.values():
            whole.copy_(before)
        for tensor in self._born.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)

    def replay(self) -> None:
        """Make every call again; results go where they went."""
        Tape.replaying = True
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self._run()
        finally:
            Tape.replaying = False
        LEDGER.replays += 1
        LEDGER.replayed_kernels += self.kernels

    def _run(self) -> None:
        for function, args, kwargs, made in self._calls:
            new = function(*args, **kwargs)
            for old_tensor, new_tensor in zip(made, tensors_of(new) if made else (), strict=True):
                if old_tensor.data_ptr() != new_tensor.data_ptr():
                    old_tensor.copy_(new_tensor)


def _written(function: Callable[..., Any], args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a call writes in place."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    names = [argument.name for argument in schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    marked = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [tensor for name in marked if name in given for tensor in tensors_of(given[name])]


class Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._tape: Tape | None = None

    @property
    def kernels(self) -> int:
        """Kernels of one replay."""
        return 0 if self._tape is None else self._tape.kernels

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def reset(self) -> None:
        """Give up what was captured."""
        self._tape = None

    def replay(self) -> None:
        """Run what was captured."""
        if Tape.current is not None or self._tape is None:
            raise RuntimeError("replay inside a capture, or of a graph that was never captured")
        self._tape.replay()


class capture:  # noqa: N801
    """Stands for `torch.cuda.graph`."""

    def __init__(self, graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> None:
        self._graph = graph
        self._how = (stream is not None, capture_error_mode)

    def __enter__(self) -> None:
        LEDGER.captures.append(self._how)
        Tape.current = Tape()

    def __exit__(self, *error: Any) -> None:
        assert Tape.current is not None
        tape, Tape.current = Tape.current, None
        tape.finish()
        self._graph._tape = tape
