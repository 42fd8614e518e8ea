"""Deal jobs to servers: each takes the next one when it has room, and others do what a dead or slow one leaves.

One thread runs one request. Only the caller's thread deals, so nothing here needs a lock.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from data.responses.server_identity import WrongServer
from speculative.errors import UserError
from speculative.progress import note

RECHECK_SECONDS = 30.0  # between two looks at a server that is out
_PATIENCE_SECONDS = 20.0  # for the first look at a server, before the others begin without it
_TICK_SECONDS = 0.5  # how often servers that are out or slow are thought of while nothing finishes
_SLOW = 3.0  # a request that takes so many times longer than another server's longest is sent there too
_FEWEST_SECONDS = 2.0  # shorter requests are not slow
_MOST_FAILURES = 5  # of one job, each of which put a server out


@dataclass
class Lane:
    """A server and what it has to do. fault: why it is out; None while it works. new: it is looked at before it works."""

    target: Any  # an EndpointTarget
    busy: int = 0
    fault: UserError | None = None
    new: bool = False
    compared: bool = False  # with the local weights, since it was out
    looking: bool = False
    look_at: float = 0.0
    longest: float = 0.0

    @property
    def url(self) -> str:
        return str(self.target.endpoint.url)

    @property
    def room(self) -> int:
        return 0 if self.fault else self.target.endpoint.concurrency - self.busy

    def out(self, fault: UserError, many: bool) -> None:
        """Give it no more jobs until a look at it succeeds."""
        if self.fault is None and many:
            note(f"warning: {fault}; the other servers take its share")
        self.fault, self.look_at = fault, max(self.look_at, time.monotonic() + RECHECK_SECONDS)
        self.new = self.compared = False


@dataclass(eq=False)
class _Request:
    lane: Lane
    number: int | None  # of the job; None: a look
    started: float
    result: Any = None
    error: BaseException | None = None


class Dealing:
    """Jobs on their way through servers."""

    def __init__(
        self, lanes: list[Lane], work: Callable[[Any, Any], Any], look: Callable[[Lane], None], jobs: Iterable[Any]
    ) -> None:
        """``work``: of a target and a job. ``look``: raises UserError for a server that cannot work."""
        self.lanes, self.work, self.look = lanes, work, look
        self.waiting, self.again, self.jobs = enumerate(jobs), deque[int](), dict[int, Any]()
        self.under_way, self.copied, self.failures = list[_Request](), set[int](), Counter[int]()
        self.ended: SimpleQueue[_Request] = SimpleQueue()
        self.fault: UserError | None = None  # the last one of a job
        self.begin_at = time.monotonic() + _PATIENCE_SECONDS

    def results(self) -> Iterator[tuple[Any, Any]]:
        """(job, result) as they finish. After an error or Ctrl-C no more requests are made.

        Raises UserError: no server works, a new one has another model, or a job fails at any server. What was under way elsewhere is
        given first.
        """
        try:
            while self._deal():
                try:
                    request = self.ended.get(timeout=_TICK_SECONDS)
                except Empty:
                    continue
                self.under_way.remove(request)
                if request.number is None:
                    self._looked(request)
                elif self._succeeded(request):
                    yield self.jobs.pop(request.number), request.result
        finally:
            for lane in self.lanes:
                lane.looking, lane.busy = False, 0
            for target in {id(one.lane): one.lane.target for one in self.under_way}.values():
                target.close()  # Its answers are not needed.

    def _deal(self) -> bool:
        """Give jobs to servers with room; whether any is left. UserError: no server works."""
        now = time.monotonic()
        for lane in self.lanes:
            if lane.new and lane.looking and now >= self.begin_at:
                lane.out(UserError(f"{lane.url}: no answer within {_PATIENCE_SECONDS:g} s"), len(self.lanes) > 1)
            elif (lane.new or lane.fault is not None) and not lane.looking and lane.look_at <= now:
                lane.looking = True
                self._send(_Request(lane, None, now))
        if any(lane.new for lane in self.lanes):
            return True
        while (lane := max(self.lanes, key=lambda lane: lane.room)).room > 0:
            if (number := self._next(lane, now)) is None:
                if not self.jobs:
                    return False
                break
            lane.busy += 1
            self._send(_Request(lane, number, now))
        if any(lane.busy or lane.looking for lane in self.lanes):
            return True
        if not self.jobs and self._next(lane, now) is None:
            return False
        fault = self.fault or lane.fault
        assert fault is not None
        raise fault

    def _next(self, lane: Lane, now: float) -> int | None:
        """The number of the next job for a server: of one that failed elsewhere, of a new one, or of one that is slow elsewhere."""
        while self.again:
            if (number := self.again.popleft()) in self.jobs:
                return number
        if (pair := next(self.waiting, None)) is not None:
            self.jobs[pair[0]] = pair[1]
            return pair[0]
        patience = max(_FEWEST_SECONDS, _SLOW * lane.longest)
        for request in self.under_way if lane.longest else ():
            slow = request.lane is not lane and now - request.started > patience
            if request.number in self.jobs and request.number not in self.copied and slow:
                self.copied.add(request.number)
                return request.number
        return None

    def _send(self, request: _Request) -> None:
        def run() -> None:
            try:
                if request.number is None:
                    self.look(request.lane)
                else:
                    request.result = self.work(request.lane.target, job)
            except BaseException as error:
                request.error = error
            self.ended.put(request)

        job = None if request.number is None else self.jobs[request.number]
        self.under_way.append(request)
        # A daemon, because the interpreter would wait for a request that nobody needs.
        threading.Thread(target=run, daemon=True, name="endpoint").start()

    def _looked(self, request: _Request) -> None:
        lane, error = request.lane, request.error
        lane.looking = False
        if error is None:
            if lane.fault is not None:
                note(f"{lane.url}: answers again")
            lane.fault, lane.new = None, False
        elif not isinstance(error, UserError) or (lane.new and isinstance(error, WrongServer)):
            raise error
        else:
            lane.out(error, len(self.lanes) > 1)
            if isinstance(error, WrongServer):
                note(f"warning: {error}; it gets no more work")
                lane.look_at = float("inf")

    def _succeeded(self, request: _Request) -> bool:
        lane, number, error = request.lane, request.number, request.error
        assert number is not None
        lane.busy -= 1
        if error is None:
            lane.longest = max(lane.longest, time.monotonic() - request.started)
            return number in self.jobs
        if not isinstance(error, UserError):
            raise error
        if number in self.jobs:
            lane.out(error, len(self.lanes) > 1)
            self.fault = error
            self.failures[number] += 1
            self.again.append(number)
            if self.failures[number] >= _MOST_FAILURES:
                raise error
        return False
