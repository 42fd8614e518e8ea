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
