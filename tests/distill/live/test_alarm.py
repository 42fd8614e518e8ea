"""The alarm on slices of traffic, with baselines written by hand and with a trained run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from traffic_log import record_of, write_log

from data.responses.acceptance_log import AcceptanceRecord
from distill.commands.drift.baseline import Baseline, BaselinePrompt, Slice, baseline_of
from distill.commands.options import DriftOptions
from distill.live.alarm import cusum
from distill.live.alarm.alarm import SliceAlarm, alarm, slice_alarm
from distill.live.traffic.reader import read_traffic
from speculative.errors import UserError

GAMMA = 4


@pytest.fixture(autouse=True)
def _fewer_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cusum, "FEWEST_STREAMS", 400)


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
    judged = records(np.random.default_rng(0), 80)
    prompts = [BaselinePrompt("code", one.drafted, one.accepted, one.blocks or 0) for one in judged]
    part = Slice("code", list(stream), list(range(80)), "code")
    return slice_alarm(part, Baseline(GAMMA, "sample", prompts), level=0.01, drop=0.05)


def test_a_fall_is_found_where_it_began() -> None:
    rng = np.random.default_rng(2)
    before, after = records(rng, 150), records(rng, 100, 0.75)
    found = told(*before, *after)
    assert found.ringing is not None
    assert 135 <= found.ringing.since <= 165 < found.ringing.at < 200
    truth = sum(one.accepted for one in after) / sum(one.drafted for one in after)
    assert found.rate == pytest.approx(truth, abs=0.02)
    assert found.ci[1] < 0
    assert found.sentence.startswith(f"code: accepted/drafted fell from {found.baseline:.3f} to {found.rate:.3f} ")
    assert f"since request {found.ringing.since} of 250 (day " in found.sentence


def test_low_from_the_first_request_points_at_the_settings() -> None:
    half = [replace(one, accepted=one.accepted // 2) for one in records(np.random.default_rng(4), 60)]
    assert "from the first request: check that the server's template" in told(*half).sentence


def test_a_fall_that_passed_is_told_and_does_not_ring() -> None:
    rng = np.random.default_rng(5)
    found = told(*records(rng, 60), *records(rng, 40, 0.6), *records(rng, 500, 0.87))
    assert found.ringing is None
    assert len(found.alarms) == 1
    assert "it fell at request" in found.sentence


def test_the_log_of_one_version_is_compared_with_the_run(tmp_path: Path, tiny_run: Path) -> None:
    baseline = baseline_of(DriftOptions(tiny_run))
    rows, without = baseline.prompts * 40, {"response_ids": None, "response_tokens": None}
    same = [
        record_of(n, accepted=row.accepted, drafted=row.drafted, blocks=row.blocks, slice=row.domain, **without)
        for n, row in enumerate(rows[:40])
    ]
    fallen = [record_of(number, accepted=0, drafted=90, blocks=45, draft_version="v0002") for number in range(40, 80)]
    log = read_traffic(write_log(tmp_path / "log", [*same, *fallen]))
    old, new = alarm(log, "v0001", tiny_run, 0.05), alarm(log, "v0002", tiny_run, drop=0.2)
    assert (old.holds, new.holds) == (False, True)
    assert "over 40 requests" in old.sentence
    assert any("left out: v0001 (40)" in note for note in new.notes)
    assert new.slices[0].compared_with == "all"
    assert new.record()["slices"][0]["alarms"][0]["since"] == 1
    with pytest.raises(UserError, match=r"for version v0009; found: v0001 \(40\), v0002 \(40\)"):
        alarm(log, "v0009", tiny_run)
    for options, words in (({"false_alarms": 0.0}, "--false-alarms 0.0"), ({"drop": 1.0}, "--drop 1.0")):
        with pytest.raises(UserError, match=words):
            alarm(log, "v0001", tiny_run, **options)
