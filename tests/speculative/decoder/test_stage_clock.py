"""The clock of stages: what it books under which name, by the wall clock and by a device's events."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from speculative.decoder import responses as clock_module
from speculative.decoder.responses import StageClock


@pytest.fixture
def _a_second_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: float(next(looks))))


@pytest.mark.usefixtures("_a_second_between_two_looks")
def test_time_is_booked_under_the_stage_that_ends() -> None:
    clock = StageClock(torch.device("cpu"), exact=True)
    for stage in ("draft", "verify", "draft"):
        clock.mark(stage)
    assert clock.seconds() == {"draft": 2.0, "verify": 1.0}
    clock.start()
    assert clock.seconds() == {}


class _Events:
    """In place of `torch.cuda`: a device that works a second between two events, and counts who waited for it."""

    def __init__(self) -> None:
        self.now, self.waited, self.synchronized = 0.0, 0, 0
        outer = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: str) -> None:
                outer.now += 1.0
                self.at = outer.now

            def query(self) -> bool:
                return False

            def synchronize(self) -> None:
                outer.waited += 1

            def elapsed_time(self, other: "Event") -> float:
                return 1e3 * (other.at - self.at)

        self.Event = Event

    def current_stream(self, device: torch.device) -> str:
        return f"the stream of {device}"

    def synchronize(self, device: torch.device) -> None:
        self.synchronized += 1


@pytest.mark.usefixtures("_a_second_between_two_looks")
@pytest.mark.parametrize("exact", [False, True])
def test_a_device_is_waited_for_once_or_at_every_mark(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Events()
    monkeypatch.setattr(clock_module.torch, "cuda", cuda)
    clock = StageClock(torch.device("cuda"), exact)
    for stage in ("draft", "verify", "draft"):
        clock.mark(stage)
    assert clock.seconds() == {"draft": 2.0, "verify": 1.0}
    assert (cuda.synchronized, cuda.waited) == ((4, 0) if exact else (0, 1))
