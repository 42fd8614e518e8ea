"""The alarm: where a fall begins and ends, slices, and how often it rings without one."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import signal
from simulation import trials
from traffic_log import record_of, write_log

from distill.live.alarm import MOST_SLICES, OTHERS, _by_slice, alarm, find_fall, slice_alarm
from distill.live.traffic.reader import read_traffic
from speculative.errors import UserError


def stretches(*parts: tuple[int, float], seed: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """(accepted, drafted) of requests; the parts are (requests, rate)."""
    rng = np.random.default_rng(seed)
    rates = np.concatenate([np.full(count, rate) for count, rate in parts])
    return np.rint(100 * (rates + 0.05 * rng.standard_normal(len(rates)))), np.full(len(rates), 100)


def test_each_fall_is_detected_and_leaves_the_baseline_when_it_is_over() -> None:
    accepted, drafted = stretches((200, 0.5), (60, 0.35), (150, 0.5), (60, 0.4))
    fall, over = find_fall(accepted, drafted, 100, 0.05)
    assert fall is not None
    ((first, last),) = over
    assert (first, last, fall.since) == pytest.approx((201, 260, 411), abs=16)
    assert (fall.before, fall.rate) == pytest.approx((0.5, 0.4), abs=0.01)
    assert fall.interval[0] < -0.1 < fall.interval[1] < 0
    assert find_fall(accepted[:410], drafted[:410], 100, 0.05) == (None, over)


def test_a_small_fall_does_not_ring_and_a_rise_neither() -> None:
    for parts, least in ((((200, 0.5), (100, 0.45)), 0.1), (((200, 0.5), (100, 0.6)), 0.0)):
        assert find_fall(*stretches(*parts), 100, 0.05, least) == (None, [])
    assert find_fall(*stretches((200, 0.5), (100, 0.45)), 100, 0.05)[0] is not None


def test_requests_that_are_all_alike_have_a_fall_too() -> None:
    drafted = np.full(200, 40)
    assert find_fall(drafted, drafted, 100, 0.01) == (None, [])
    assert find_fall(np.r_[np.full(130, 40), np.full(70, 30)], drafted, 100, 0.01)[0] is not None


def test_the_interval_is_wider_where_neighbours_correlate() -> None:
    rng = np.random.default_rng(6)
    rates = rng.normal(0.5, 0.1, 200)
    alike = np.sort(rates).reshape(20, 10).T.ravel()  # each ten requests rise
    widths = []
    for stream in (rates, alike):
        records = [record_of(n, accepted=round(90 * rate), drafted=90, blocks=30) for n, rate in enumerate(stream)]
        low, high = slice_alarm("code", records, 150, 0.01).ci
        widths.append(high - low)
    assert widths[1] > 1.5 * widths[0]


def test_the_baseline_of_a_version_and_slice_is_its_first_requests(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    parts = [("v0001", "code", 0.5)] * 80 + [("v0002", "code", 0.6)] * 40 + [("v0002", "code", 0.3)] * 40
    rows = [
        record_of(n, accepted=int(rate * 90 + rng.integers(-9, 10)), drafted=90, blocks=30, draft_version=v, slice=s)
        for n, (v, s, rate) in enumerate([*parts, *[("v0002", "chat", 0.2)] * 20])
    ]
    log = read_traffic(write_log(tmp_path / "log", rows))
    old, new = alarm(log, "v0001", burn_in=40), alarm(log, "v0002", burn_in=40)
    assert (old.holds, new.holds, new.waiting) == (False, True, {"chat": 20})
    (part,) = new.slices
    assert (part.since, part.time) == (41, "1970-01-01T00:02:00+00:00")
    assert part.baseline == pytest.approx(0.6, abs=0.02)
    assert "1 without a baseline of 40 requests yet (at most 20)" in new.sentence
    assert part.sentence.startswith(f"code: accepted/drafted fell from {part.baseline:.3f} to {part.rate:.3f} (-0.3")
    assert any("left out: v0001 (80)" in note for note in new.notes)
    early = alarm(log, "v0001")
    assert (early.holds, early.slices, early.waiting) == (False, [], {"code": 80})
    with pytest.raises(UserError, match=r"for version v0009; found: v0001 \(80\), v0002 \(100\)"):
        alarm(log, "v0009")


def test_a_slice_leaves_the_combined_ones_once_at_most_as_the_log_grows() -> None:
    rng = np.random.default_rng(8)
    names = [f"s{number}" for number in (rng.zipf(1.3, 3000) - 1) % 40]
    records, alone = [record_of(n, slice=name) for n, name in enumerate(names)], set[str]()
    for count in range(600, 3001, 200):
        by_slice, notes = _by_slice(records[:count], 30)
        assert len(by_slice) <= MOST_SLICES
        assert alone <= {*by_slice} - {OTHERS}
        assert notes[0].endswith(f"combined as `{OTHERS}`")
        alone = {*by_slice} - {OTHERS}


def correlated(rng: np.random.Generator, count: int, correlation: float, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """(accepted, drafted) of requests whose rates have a standard deviation of 0.1 and this lag-1 correlation."""
    noise = rng.standard_normal(count)
    noise[1:] *= math.sqrt(1 - correlation**2)
    drafted = 3 * rng.integers(10, 30, count)
    wanted = (rate + 0.1 * signal.lfilter([1.0], [1.0, -correlation], noise)) * drafted
    return np.clip(np.rint(wanted), 0, drafted), drafted


@pytest.mark.simulation
@pytest.mark.parametrize("correlation", trials([0.0, 0.35], [0.0, 0.1, 0.21, 0.35, 0.5]))
def test_false_alarms_are_rare_however_neighbours_correlate(correlation: float) -> None:
    """A look every four of 1,000 requests behind the first 150. A fall by 0.12 is mostly heard within 100 requests."""
    count, level, rng = trials(20, 500), 1 / trials(10, 100), np.random.default_rng(20)
    alarms = heard = 0
    for _ in range(count):
        accepted, drafted = correlated(rng, 1150, correlation, 0.45)
        looks = range(166, 1151, 4)
        alarms += any(find_fall(accepted[:n], drafted[:n], 150, level, 0.0)[0] is not None for n in looks)
        fallen = correlated(rng, 100, correlation, 0.33)
        joined = [np.concatenate([old[:450], new]) for old, new in zip((accepted, drafted), fallen, strict=True)]
        heard += find_fall(joined[0], joined[1], 150, 0.01)[0] is not None
    print(f"correlation {correlation}: {alarms} of {count} streams alarmed, {heard} falls heard within 100 requests")
    assert alarms / count <= level + 3 * math.sqrt(level * (1 - level) / count)
    assert heard >= count * (0.9 if correlation <= 0.21 else 0.5)
