"""The alarm on slices of traffic, with baselines written by hand and with a trained run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traffic_log import record_of, write_log

from data.responses.acceptance_log import AcceptanceRecord
from distill.live.alarm import scan
from distill.live.alarm.alarm import BURN_IN, SliceAlarm, alarm, slice_alarm
from distill.live.traffic.reader import read_traffic
from speculative.errors import UserError

GAMMA = 4


@pytest.fixture(autouse=True)
def _fewer_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "FEWEST_STREAMS", 400)


def records(rng: np.random.Generator, count: int, ease: float = 0.85) -> list[AcceptanceRecord]:
    """Requests with their own difficulty, drafted block by block."""
    found = []
    for number in range(count):
        blocks = int(rng.integers(15, 40))
        own = min(rng.beta(30 * ease, 30 * (1 - ease)), 1 - 1e-9)
        kept = int(np.minimum(rng.geometric(1 - own, blocks) - 1, GAMMA).sum())
        found.append(AcceptanceRecord(number, GAMMA * blocks, kept, blocks, "code", f"day {number}"))
    return found


def told(*stream: AcceptanceRecord) -> SliceAlarm:
    """The alarm of the baseline's requests and these behind them."""
    first = records(np.random.default_rng(0), BURN_IN)
    return slice_alarm("code", [*first, *stream], BURN_IN, GAMMA, level=0.01, drop=0.05)


def test_a_fall_is_found_where_it_began() -> None:
    rng = np.random.default_rng(2)
    before, after = records(rng, 150), records(rng, 100, 0.75)
    found = told(*before, *after)
    assert found.ringing is not None
    assert 285 <= found.ringing.since <= 315 < found.ringing.at < 380
    truth = sum(one.accepted for one in after) / sum(one.drafted for one in after)
    assert found.rate == pytest.approx(truth, abs=0.02)
    assert found.ci[1] < 0
    assert found.sentence.startswith(f"code: accepted/drafted fell from {found.baseline:.3f} to {found.rate:.3f} ")
    assert f"since request {found.ringing.since} of 400 (day " in found.sentence


def test_a_fall_that_passed_is_told_and_does_not_ring() -> None:
    rng = np.random.default_rng(5)
    found = told(*records(rng, 60), *records(rng, 40, 0.6), *records(rng, 500, 0.87))
    assert found.ringing is None
    assert len(found.alarms) == 1
    assert "it fell at request" in found.sentence


def test_an_interval_is_wider_where_neighbours_correlate() -> None:
    rng = np.random.default_rng(6)
    mixed, ordered = records(rng, 200), sorted(records(rng, 200), key=lambda one: one.accepted / one.drafted)
    runs = [ordered[place] for start in range(20) for place in range(start, 200, 20)]  # each ten rises
    plain = slice_alarm("code", mixed, 100, GAMMA, level=0.01, drop=0.05)
    found = slice_alarm("code", [*ordered[:50], *ordered[150:], *runs], 100, GAMMA, level=0.01, drop=0.05)
    assert plain.correlation < 0.2 < found.correlation
    assert found.ci[1] - found.ci[0] > 1.5 * (plain.ci[1] - plain.ci[0])


def test_the_baseline_of_a_version_and_slice_is_its_own_first_requests(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    rows = [
        record_of(
            number,
            accepted=int(rate * 90 + rng.integers(-9, 10)),
            drafted=90,
            blocks=30,
            draft_version=version,
            slice=label,
        )
        for number, (version, label, rate) in enumerate(
            [("v0001", "code", 0.5)] * 80
            + [("v0002", "code", 0.6)] * 40
            + [("v0002", "code", 0.3)] * 40
            + [("v0002", "chat", 0.2)] * 20
        )
    ]
    log = read_traffic(write_log(tmp_path / "log", rows))
    old, new = alarm(log, "v0001", burn_in=40), alarm(log, "v0002", burn_in=40)
    assert (old.holds, new.holds, new.waiting) == (False, True, {"chat": 20})
    assert new.slices[0].baseline == pytest.approx(0.6, abs=0.02)
    assert new.slices[0].alarms[0].since == 41
    assert "1 without a baseline of 40 requests yet (at most 20)" in new.sentence
    assert any("left out: v0001 (80)" in note for note in new.notes)
    early = alarm(log, "v0001")
    assert (early.holds, early.slices, early.waiting) == (False, [], {"code": 80})
    with pytest.raises(UserError, match=r"for version v0009; found: v0001 \(80\), v0002 \(100\)"):
        alarm(log, "v0009")
    bad: tuple[tuple[dict[str, Any], str], ...] = (
        ({"false_alarms": 0.0}, "--false-alarms 0.0"),
        ({"drop": 1.0}, "--drop 1.0"),
        ({"burn_in": 8}, "--burn-in 8: give at least 30"),
    )
    for options, words in bad:
        with pytest.raises(UserError, match=words):
            alarm(log, "v0001", **options)
