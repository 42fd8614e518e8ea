"""The clock of stages: what it books under which name, by the wall clock and by a device's events."""

import time

import pytest
import torch

from speculative.decoder import stage_clock
from speculative.decoder.stage_clock import StageClock


def test_time_is_booked_under_the_stage_that_ends() -> None:
    clock = StageClock(torch.device("cpu"), exact=True)
    for stage, pause in (("draft", 0.02), ("verify", 0.0), ("draft", 0.02)):
        time.sleep(pause)
        clock.mark(stage)
    spent = clock.seconds()
    assert list(spent) == ["draft", "verify"]
    assert spent["draft"] >= 0.04
    assert 0.0 <= spent["verify"] < 0.02
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


@pytest.mark.parametrize("exact", [False, True])
def test_a_device_is_waited_for_once_or_at_every_mark(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Events()
    monkeypatch.setattr(stage_clock.torch, "cuda", cuda)
    clock = StageClock(torch.device("cuda"), exact)
    for stage in ("draft", "verify", "draft"):
        clock.mark(stage)
    spent = clock.seconds()
    assert list(spent) == ["draft", "verify"]
    if exact:
        assert (cuda.synchronized, cuda.waited) == (4, 0)
        assert all(0.0 <= seconds < 0.5 for seconds in spent.values())
    else:
        assert (cuda.synchronized, cuda.waited) == (0, 1)
        assert spent == {"draft": 2.0, "verify": 1.0}
