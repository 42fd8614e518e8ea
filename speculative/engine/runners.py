"""How a model call runs: eagerly, in compiled code, or replayed from a CUDA graph. All give the same tokens
in float32, up to near-ties.

A static runner gets a function whose work depends only on the shapes of its tensors and on the given constants.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import torch

from speculative.errors import UserError

EAGER, COMPILED, GRAPHED = "eager", "compile", "graph"
RUNNERS = ("auto", EAGER, COMPILED, GRAPHED)
FUSED_GRAPH = "fused graph"  # `graph` for a model that fused kernels compute.
RECORDED = (GRAPHED, FUSED_GRAPH)
UNRECORDED = (EAGER, COMPILED)  # Any shapes; rows may be dropped.
GRAPH_TOLERANCE = 0.05  # Of the largest logit: kernels may round differently under capture; real faults are larger.

StepFunction = Callable[..., torch.Tensor]
T = TypeVar("T")


class Runner:
    """Runs `function(*tensors, *constants)` eagerly; the reference for the other runners. static: the same shapes must mean the same work.
    prefixes: number of prefix lengths between a length and its double; more waste less. recordings: calls so far that were compiled or
    captured first, which takes seconds.
    """

    static = False
    prefixes = 1
    recordings = 0

    def run(
        self, function: StepFunction, tensors: tuple[torch.Tensor, ...], constants: tuple[int, ...]
    ) -> torch.Tensor:
        return function(*tensors, *constants)


class Recording(NamedTuple):
    """A captured call: copy into `inputs`, `replay`, read `output`."""

    replay: Callable[[], None]
    inputs: tuple[torch.Tensor, ...]
    output: Any


class GraphRunner(Runner):
    """CUDA graphs, one per shape: the whole call becomes one launch, its inputs are copied into fixed memory. A capture is compared with
    its eager call before it is used. A model that cannot be captured (its forward reads a value from the device) runs eagerly, with one
    warning; its capture is never started, because torch's allocator does not recover from a failed one.
    """

    static = True
    prefixes = 4

    def __init__(self) -> None:
        self._recorded: dict[Any, Recording] = {}
        self._usable = True
        # Pool handle, created on demand. Runners may share it if they take turns on one stream and are read before the next turn.
        self.pool: Callable[[], Any] = cache(torch.cuda.graph_pool_handle)
        self.recordings = 0

    def run(
        self, function: StepFunction, tensors: tuple[torch.Tensor, ...], constants: tuple[int, ...]
    ) -> torch.Tensor:
        if not self._usable:
            return function(*tensors, *constants)
        key = (tuple(tensor.shape for tensor in tensors), constants)
        recording = self._recorded.get(key)
        if recording is None:
            expected = function(*tensors, *constants)
            inputs = tuple(tensor.clone() for tensor in tensors)
            self._record_checked(key, lambda: function(*inputs, *constants), inputs, expected)
            return expected
        for buffer, tensor in zip(recording.inputs, tensors, strict=True):
            buffer.copy_(tensor)
        recording.replay()
        # The next replay overwrites it, so logits that are kept across steps need a copy.
        return recording.output.clone()

    def knows(self, key: Any) -> bool:
        """Whether a launch of this key needs no recording."""
        return key in self._recorded or not self._usable

    def launch(
        self, key: Any, function: Callable[[], T], state: tuple[torch.Tensor, ...], checked: Callable[[T], torch.Tensor]
    ) -> T:
        """Result of `function`, which uses only tensors with fixed addresses: one launch, no copy; the next launch of this key overwrites
        it. `state`: tensors that the function changes; they are restored between the calls that verify a recording. `checked`: the part of
        the result that must agree.
        """
        if not self._usable:
            return function()
        recording = self._recorded.get(key)
        if recording is not None:
            recording.replay()
            return cast(T, recording.output)
        before = [tensor.clone() for tensor in state]
        expected = function()
        after = [tensor.clone() for tensor in state]
        _put(state, before)
        recording = self._record_checked(key, function, (), checked(expected), checked, lambda: _put(state, before))
        if recording is None:
            _put(state, after)
            return expected
        return cast(T, recording.output)

    def _record_checked(
        self,
        key: Any,
        function: Callable[[], Any],
        inputs: tuple[torch.Tensor, ...],
        expected: torch.Tensor,
        checked: Callable[[Any], torch.Tensor] = lambda output: output,
        reset: Callable[[], None] = lambda: None,
    ) -> Recording | None:
        """The recording of a call, replayed once. None, also for all later calls, if it does not equal the eager call."""
        self.recordings += 1
        stream = torch.cuda.current_stream(expected.device) if expected.is_cuda else None
        try:
            recording = self._record(function, inputs, expected.device)
        except RuntimeError as error:
            if stream is not None:
                torch.cuda.set_stream(stream)  # A failed capture may leave its own stream active.
            self._give_up(f"cannot be captured in a CUDA graph ({str(error).splitlines()[0]})")
            return None
        reset()
        output = checked(recording.output)
        output.fill_(torch.nan)  # So that a graph that does nothing fails the check.
        recording.replay()
        # Logits of forbidden tokens are -inf.
        finite = expected.isfinite()
        difference = torch.where(finite, output - expected, 0.0).abs().amax()
        largest = torch.where(finite, expected, 0.0).abs().amax()
        same = (finite | (output == expected)).all() & (difference <= GRAPH_TOLERANCE * largest.clamp_min(1e-6))
        # NaN logits of the model are not a fault of the capture; the loop reports them.
        if not bool(same | expected.isnan().any()):
            self._give_up("gives different logits when replayed from a CUDA graph")
            return None
        self._recorded[key] = recording
        return recording

    def _give_up(self, why: str) -> None:
        self._usable = False
        self._recorded.clear()
        warnings.warn(f"the model {why}: it runs eagerly", stacklevel=2)

    def _record(self, function: Callable[[], Any], inputs: tuple[torch.Tensor, ...], device: torch.device) -> Recording:
        with torch.cuda.device(device), _casting_again():
            side = _capture_stream(device)
            side.wait_stream(torch.cuda.current_stream())
            # Warm up on the capture stream, so that libraries allocate their workspaces there.
            with torch.cuda.stream(side), _refusing_waits():
                function()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self.pool(), stream=side, capture_error_mode="thread_local"):
                output = function()
        return Recording(graph.replay, inputs, output)


@cache
def _capture_stream(device: torch.device) -> Any:
    """One stream for all captures: captures that share a pool share a stream, and libraries keep a workspace per stream."""
    return torch.cuda.Stream(device)


@contextmanager
def _casting_again() -> Iterator[None]:
    """Clear autocast's copies of the weights: they are dropped when autocast ends, so a recording must make its own."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _put(state: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(state, values, strict=True):
        tensor.copy_(value)


@contextmanager
def _refusing_waits() -> Iterator[None]:
    """Context manager: operations that would wait for the device, and so cannot be captured, raise RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # The mode warns that it is a prototype; the capture itself refuses what the mode misses.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def make_runner(kind: str) -> Runner:
    """Return a runner of a kind from `resolve_runner`. Raises UserError for graphs without CUDA."""
    if kind == GRAPHED and not torch.cuda.is_available():
        raise UserError("runner = 'graph' needs a CUDA device: use 'eager' or 'compile'")
    return GraphRunner() if kind in RECORDED else Runner()


def resolve_runner(kind: str, device: torch.device) -> str:
    """Resolve `auto`: graphs on CUDA, compiled code elsewhere. Raises UserError for `compile` on CUDA."""
    if kind not in RUNNERS:
        raise UserError(f"runner = {kind!r}: must be one of {', '.join(RUNNERS)}")
    if kind == COMPILED and device.type == "cuda":
        raise UserError("runner = 'compile' is for a CPU: use 'auto' or 'graph' on CUDA")
    if kind != "auto":
        return kind
    return GRAPHED if device.type == "cuda" else COMPILED
