"""`torch.cuda` as a CUDA build has it, as far as we ask it, while the device is there."""

import contextlib
import itertools
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from pretend_cuda.graph import Graph, Tape, capture
from pretend_cuda.ledger import LEDGER, SYNCHRONIZED, Ledger
from pretend_cuda.tensors import CUDA, DeviceArguments, DeviceFactories, waited
from pretend_cuda.timeline import TIMELINE

GIB = 1024**3
SYNC_MODES = ("default", "warn", "error")


class Stream:
    """Nothing here runs beside anything else."""

    device = CUDA

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None:
        _wait_for("stream")


class Event:
    """The host's clock, read when the event is recorded; asked whether it is done, it says no once, then yes.

    Recorded inside a capture it is only an order within it.
    """

    def __init__(self, enable_timing: bool = False) -> None:
        self._seconds: float | None = None
        self._place = 0
        self._answers: Iterator[bool] = itertools.repeat(True)

    def record(self, stream: Any = None) -> None:
        if Tape.current is None:
            self._seconds, self._place = time.perf_counter(), TIMELINE.put()
            self._answers = TIMELINE.answers(self._place)

    def synchronize(self) -> None:
        waited("event", SYNCHRONIZED)
        TIMELINE.reach(self._place)

    def query(self) -> bool:
        return next(self._answers)

    def elapsed_time(self, other: "Event") -> float:
        if self._seconds is None or other._seconds is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if max(self._place, other._place) > TIMELINE.known:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1e3 * (other._seconds - self._seconds)


def _wait_for(what: str) -> None:
    waited(what, SYNCHRONIZED)
    TIMELINE.reach(TIMELINE.now)


def _set_sync_mode(mode: str | int) -> None:
    LEDGER.sync_mode = mode if isinstance(mode, str) else SYNC_MODES[mode]
    if LEDGER.sync_mode != "default":
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)


def _state(device: Any = None) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)


def _torch_cuda() -> dict[str, Any]:
    """What stands for each name of `torch.cuda`."""
    stream = Stream()
    named: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
        "current_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "synchronize": lambda device=None: _wait_for("device"),
        "graph_pool_handle": lambda: (0, 1),
        "set_sync_debug_mode": _set_sync_mode,
        "get_sync_debug_mode": lambda: SYNC_MODES.index(LEDGER.sync_mode),
        "is_current_stream_capturing": lambda: Tape.current is not None,
        "get_rng_state": _state,
        "get_rng_state_all": lambda: [_state()],
    }
    constants: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "current_device": 0,
        "device_count": 1,
        "mem_get_info": (80 * GIB, 80 * GIB),
        "memory_reserved": 0,
        "memory_allocated": 0,
        "max_memory_allocated": 123,
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
        "_is_in_bad_fork": False,
    }
    constants |= dict.fromkeys(
        (
            "_lazy_init",
            "set_stream",
            "set_device",
            "reset_peak_memory_stats",
            "empty_cache",
            "set_rng_state",
            "set_rng_state_all",
            "manual_seed",
            "manual_seed_all",
        )
    )
    # A function for each: torch.compile keeps a table of them.
    answers = {name: lambda *args, _value=value, **kwargs: _value for name, value in constants.items()}
    return named | answers


@contextlib.contextmanager
def pretend_cuda() -> Iterator[Ledger]:
    """Inside there is one CUDA device; the ledger says what was asked of it."""
    assert str(torch.accelerator.current_accelerator()) == "cuda", "the hooks were not loaded before torch"
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)
    stand_ins = _torch_cuda()
    before = {name: getattr(torch.cuda, name) for name in stand_ins}
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    LEDGER.clear()
    try:
        with DeviceArguments(), DeviceFactories():
            yield LEDGER
    finally:
        for name, own in before.items():
            setattr(torch.cuda, name, own)
