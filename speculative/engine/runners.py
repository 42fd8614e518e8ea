"""How a model call is run: as it is, in compiled code, or replayed from a CUDA graph. All give the same tokens.

A static runner gets a function and tensors whose shapes, with the given constants, decide everything the function does.
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
COMPILED_GRAPH = "compiled graph"  # What `compile` is on CUDA: graphs of calls whose layers are compiled.
RECORDED = (GRAPHED, COMPILED_GRAPH)
UNRECORDED = (EAGER, COMPILED)  # Any shapes, and rows that come and go.
GRAPH_TOLERANCE = 0.05  # Relative to the largest logit: kernels may round differently under capture, faults do not.

StepFunction = Callable[..., torch.Tensor]
T = TypeVar("T")


class Runner:
    """Runs `function(*tensors, *constants)` as it is: the twin of the others.

    static: the same shapes must give the same work. prefixes: how many sizes of what attention reads lie between a size and its
    double; more are closer to what is needed. recordings: how many calls so far were compiled or captured first, which takes
    seconds and is no decoding.
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
    """CUDA graphs, one per shape: the whole call becomes one launch, its inputs are copied into fixed memory.

    A capture is compared with the eager call it stands for before it is trusted. A model that cannot be captured (it asks
    the device for a value inside its forward) runs eagerly, with one warning; its capture is never begun, because torch's
    allocator goes on believing in one that failed.
    """

    static = True
    prefixes = 4

    def __init__(self) -> None:
        self._recorded: dict[Any, Recording] = {}
        self._usable = True
        # Its handle, made when it is asked for. Who takes turns on one stream, and is read before the next one's turn, may share.
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
        # The next replay writes over it; whoever keeps logits across steps has to have his own.
        return recording.output.clone()

    def knows(self, key: Any) -> bool:
        """Whether a launch of this key records nothing."""
        return key in self._recorded or not self._usable

    def launch(
        self, key: Any, function: Callable[[], T], state: tuple[torch.Tensor, ...], checked: Callable[[T], torch.Tensor]
    ) -> T:
        """What `function` returns, which reads and writes nothing but tensors that stay where they are: one launch, no copy.

        The result is written over by the next launch of this key. `state`: what the function changes and starts from, put
        back between the calls that make sure of a recording. `checked`: the part of the result that they must agree on.
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
        """The recording of a call, replayed once; None, and none ever after, when it is not what the call itself gives."""
        self.recordings += 1
        stream = torch.cuda.current_stream(expected.device) if expected.is_cuda else None
        try:
            recording = self._record(function, inputs, expected.device)
        except RuntimeError as error:
            if stream is not None:
                torch.cuda.set_stream(stream)  # A capture that fails does not always leave its own stream.
            self._give_up(f"cannot be captured in a CUDA graph ({str(error).splitlines()[0]})")
            return None
        reset()
        output = checked(recording.output)
        output.fill_(torch.nan)  # A graph that does nothing must not pass for one that computes.
        recording.replay()
        difference, largest = (output - expected).abs().amax(), expected.abs().amax()
        # Logits that are broken themselves (NaN) are the loop's to report, not a fault of the capture.
        if not bool((difference <= GRAPH_TOLERANCE * largest.clamp_min(1e-6)) | expected.isnan().any()):
            self._give_up("gives different logits when replayed from a CUDA graph")
            return None
        self._recorded[key] = recording
        return recording

    def _give_up(self, why: str) -> None:
        self._usable = False
        self._recorded.clear()
        warnings.warn(f"the model {why}: it runs eagerly", stacklevel=2)

    def _record(self, function: Callable[[], Any], inputs: tuple[torch.Tensor, ...], device: torch.device) -> Recording:
        with torch.cuda.device(device), _casting_anew():
            side = _capture_stream(device)
            side.wait_stream(torch.cuda.current_stream())
            # On the stream of the capture, so that libraries have their workspaces there.
            with torch.cuda.stream(side), _refusing_waits():
                function()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device.
            with torch.cuda.graph(graph, pool=self.pool(), stream=side, capture_error_mode="thread_local"):
                output = function()
        return Recording(graph.replay, inputs, output)


@cache
def _capture_stream(device: torch.device) -> Any:
    """One for all captures: captures that share a pool share a stream, and libraries keep a workspace for every stream."""
    return torch.cuda.Stream(device)


@contextmanager
def _casting_anew() -> Iterator[None]:
    """Autocast forgets its copies of the weights when it ends: a recording must make its own."""
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
    """What would wait for the device, and so cannot be captured, raises RuntimeError instead."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That the mode is a prototype: what it misses, the capture itself refuses.
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def make_runner(kind: str) -> Runner:
    """Of a kind that `resolve_runner` gave. Raises UserError for graphs without CUDA."""
    if kind == GRAPHED and not torch.cuda.is_available():
        raise UserError("runner = 'graph' needs a CUDA device: use 'eager' or 'compile'")
    makers = {EAGER: Runner, COMPILED: Runner, GRAPHED: GraphRunner, COMPILED_GRAPH: GraphRunner}
    return makers[kind]()


def resolve_runner(kind: str, device: torch.device) -> str:
    """`auto`: graphs on CUDA, compiled code elsewhere. `compile` is in a graph where there are graphs."""
    if kind not in RUNNERS:
        raise UserError(f"runner = {kind!r}: must be one of {', '.join(RUNNERS)}")
    if kind == COMPILED and device.type == "cuda":
        return COMPILED_GRAPH
    if kind != "auto":
        return kind
    return GRAPHED if device.type == "cuda" else COMPILED
