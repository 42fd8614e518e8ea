"""The sequential test: its contrasts against loops, its stated probabilities against simulated servers."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import signal
from simulation import trials

from distill.live.alarm import scan
from distill.live.alarm.scan import (
    Pool,
    Stream,
    block_variance_per_token,
    correlation_of,
    cusum_path,
    pool_of,
    threshold_for,
    watch,
)

GAMMA = 4


@pytest.fixture(autouse=True)
def _fewer_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the simulated streams: thresholds at 5 % are then as accurate as at 1 % with all. The promise covers 200 requests."""
    monkeypatch.setattr(scan, "FEWEST_STREAMS", 400)
    monkeypatch.setattr(scan, "HORIZON", 200)


def requests(
    rng: np.random.Generator, count: int, ease: float = 0.8, blocks: tuple[int, int] = (10, 40), alike: float = 20.0
) -> tuple[np.ndarray, np.ndarray]:
    """(accepted, drafted) of requests, block by block; each prompt has its own difficulty."""
    blocks_N = rng.integers(*blocks, count)
    ease_N = np.minimum(rng.beta(alike * ease, alike * (1 - ease), count), 1 - 1e-9)
    kept_NB = np.minimum(rng.geometric(np.repeat(1 - ease_N[:, None], blocks[1], 1)) - 1, GAMMA)
    return (kept_NB * (np.arange(blocks[1]) < blocks_N[:, None])).sum(1), blocks_N * GAMMA


# The sum.


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=40))
@settings(deadline=None, max_examples=100)
def test_the_path_is_pages_recursion(values: list[float]) -> None:
    expected, sums = [], 0.0
    for value in values:
        sums = max(0.0, sums + value)
        expected.append(sums)
    # Cumulated sums differ from a recursion by rounding of the largest sum.
    np.testing.assert_allclose(cusum_path(np.array(values)), expected, atol=1e-12)


def test_zeros_of_the_path_are_exact() -> None:
    path = cusum_path(np.array([0.1, -0.3, 0.2, 0.7, -5.0, 0.1]))
    assert (path == 0).tolist() == [False, True, False, False, True, False]


# The scan.


def highest(
    scores: np.ndarray, information: np.ndarray, burn_in: int, windows: Sequence[int] | None = None
) -> tuple[float, int]:
    """(the highest contrast of a stream, the number of requests before it), request by request and window by window."""
    found = (-math.inf, 0)
    for end in range(burn_in + 1, len(scores) + 1):
        for window in windows or scan.WINDOWS:
            head = end - window
            if head < burn_in:
                continue
            weights, rates = information**2, scores / information
            before = np.average(rates[:head], weights=weights[:head])
            after = np.average(rates[head:end], weights=weights[head:end])
            off = weights[:head] * (rates[:head] - before)
            raw = (off[1:] * off[:-1]).sum() / (off**2).sum()
            near = min(0.9, max(0.0, raw + (1 + 3 * raw) / head))
            per_weight = (off**2).sum() / weights[:head].sum() * head / (head - 1) * (1 + near) / (1 - near)
            error = math.sqrt(per_weight * (1 / weights[:head].sum() + 1 / weights[head:end].sum()))
            found = max(found, ((before - after) / error, head))
    return found


def test_contrasts_are_those_of_a_loop() -> None:
    rng = np.random.default_rng(1)
    scores, information = rng.standard_normal((3, 90)) + 0.3, rng.uniform(2.0, 9.0, 90)
    scores[1, 60:] -= 1
    for row, found in zip(scores, Stream(scores, information, 20).largest().max(1), strict=True):
        assert found == pytest.approx(highest(row, information, 20)[0], rel=1e-9)
    # What is simulated is in float32, whose sums of 90 numbers are exact to 1e-5.
    np.testing.assert_allclose(
        Stream(scores.astype(np.float32), information, 20).largest(),
        Stream(scores, information, 20).largest(),
        atol=1e-4,
    )


def test_neither_the_rate_nor_the_unit_of_the_spread_matters() -> None:
    rng = np.random.default_rng(3)
    scores, information = rng.standard_normal((1, 90)), rng.uniform(2.0, 9.0, 90)
    moved = Stream(5 * (scores + 0.4 * information), 5 * information, 20).largest()
    np.testing.assert_allclose(moved[:, 40:], Stream(scores, information, 20).largest()[:, 40:], rtol=1e-8)


def test_the_threshold_is_crossed_by_as_many_written_out_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "FEWEST_STREAMS", 20_000)  # the threshold's own error: 0.15 points
    monkeypatch.setattr(scan, "HORIZON", 6)
    monkeypatch.setattr(scan, "WINDOWS", (2, 4))
    pool = replace(pool_of(*requests(np.random.default_rng(2), 30), GAMMA), correlation=0.3)
    drafted = np.resize(np.array([40.0, 160.0, 80.0, 100.0, 60.0]), 36)
    threshold, rng, crossed = threshold_for(pool, drafted, 0.05), np.random.default_rng(3), 0
    centred, high = pool.residuals_P - pool.residuals_P.mean(), 0.3 + math.sqrt((1 - 0.3**2) / 30)
    for _ in range(2000):
        noise = [float(rng.choice(centred))]
        for _ in range(35):
            noise.append(high * noise[-1] + math.sqrt(1 - high**2) * float(rng.choice(centred)))
        crossed += highest(np.array(noise), drafted / pool.spread(drafted), 30)[0] > threshold
    assert crossed / 2000 == pytest.approx(0.05, abs=0.015)  # three standard errors of 2,000 streams


def stretches(*parts: tuple[int, float], seed: int = 4) -> tuple[Pool, np.ndarray, np.ndarray]:
    """A pool of 100 requests at a rate of 0.5 and a stream that begins with it; the parts behind it are (requests, rate)."""
    rng = np.random.default_rng(seed)
    rates = np.concatenate([np.full(count, rate) for count, rate in ((100, 0.5), *parts)])
    accepted, drafted = np.rint(100 * (rates + 0.05 * rng.standard_normal(len(rates)))), np.full(len(rates), 100)
    return pool_of(accepted[:100], drafted[:100], GAMMA), accepted, drafted


def test_each_fall_is_found_and_the_requests_of_one_that_is_over_are_no_baseline() -> None:
    pool, accepted, drafted = stretches((100, 0.5), (40, 0.35), (100, 0.52), (40, 0.4))
    found = watch(pool, accepted, drafted, 0.05, 0.03)
    assert [one.since for one in found] == pytest.approx([201, 341], abs=3)
    assert found[0].until is not None
    assert 250 < found[0].until < 300  # the requests behind it have to make up for it
    assert found[1].until is None
    # Without the first fall the second is found at the same request: 40 requests of it would lower the baseline.
    without = [np.delete(one, slice(found[0].since - 1, found[0].until)) for one in (accepted, drafted)]
    (alone,) = watch(pool, *without, 0.05, 0.03)
    assert alone.at == found[1].at - (found[0].until - found[0].since + 1)


def test_a_fall_smaller_than_asked_for_does_not_ring() -> None:
    stream = stretches((100, 0.5), (100, 0.45))
    assert watch(*stream, 0.05, 0.03)
    assert watch(*stream, 0.05, 0.1) == []


def test_the_correlation_is_found_without_bias() -> None:
    rng = np.random.default_rng(6)
    for truth in (0.2, 0.5):
        noise = rng.standard_normal((2000, 100))
        noise[:, 1:] *= math.sqrt(1 - truth**2)
        found = [correlation_of(row) for row in signal.lfilter([1.0], [1.0, -truth], noise, axis=1)]
        assert np.mean(found) == pytest.approx(truth, abs=0.015)  # uncorrected it is 0.016 and 0.025 lower
    assert correlation_of(np.array([1.0, -1.0] * 10)) == 0.0
    assert correlation_of(np.arange(100.0)) == 0.9


@pytest.mark.parametrize(("rate", "gamma"), [(0.3, 1), (0.55, 4), (0.9, 3), (0.2, 8)])
def test_the_variance_of_a_block_is_that_of_its_outcomes(rate: float, gamma: int) -> None:
    found = block_variance_per_token(rate, gamma)
    # By enumeration: the chance that gives this rate, found by bisection here too, over all accept/refuse strings.
    low, high = 0.0, 1.0
    for _ in range(60):
        chance = (low + high) / 2
        low, high = (chance, high) if sum(chance**j for j in range(1, gamma + 1)) < gamma * rate else (low, chance)
    mean = square = 0.0
    for outcome in itertools.product([True, False], repeat=gamma):
        kept = next((place for place, accepted in enumerate(outcome) if not accepted), gamma)
        weight = math.prod(chance if accepted else 1 - chance for accepted in outcome)
        mean, square = mean + weight * kept, square + weight * kept**2
    assert found == pytest.approx((square - mean**2) / gamma, rel=1e-9)
    assert block_variance_per_token(0.0, gamma) == block_variance_per_token(1.0, gamma) == 0.0


def test_a_pool_knows_its_rate_and_spread_at_every_length() -> None:
    rng = np.random.default_rng(4)
    pool = pool_of(*requests(rng, 4000), GAMMA)
    truth = requests(rng, 200_000)
    assert pool.rate == pytest.approx(truth[0].sum() / truth[1].sum(), abs=0.01)  # four standard errors
    for blocks in (12, 35, 200):
        accepted, drafted = requests(rng, 4000, blocks=(blocks, blocks + 1))
        # The model of the spread, not its sampling, is what a fifth allows for.
        assert accepted.std() == pytest.approx(pool.spread(drafted[:1])[0], rel=0.2)


@pytest.mark.parametrize(
    ("accepted", "drafted"),
    [([1] * 7, [4] * 7), ([1] * 8, [4] * 7), ([5] * 8, [4] * 8), ([0] * 8, [0] * 8), ([-1] * 8, [4] * 8)],
)
def test_a_pool_refuses_what_is_none(accepted: list[int], drafted: list[int]) -> None:
    with pytest.raises(ValueError):
        pool_of(np.array(accepted), np.array(drafted), GAMMA)


def test_a_threshold_refuses_what_means_nothing() -> None:
    pool = pool_of(*requests(np.random.default_rng(0), 20), GAMMA)
    for level, count in ((0.0, 30), (1.0, 30), (0.01, 20)):
        with pytest.raises(ValueError):
            threshold_for(pool, np.full(count, 40), level)


def test_a_pool_without_any_spread_still_has_a_threshold() -> None:
    pool = pool_of(np.full(20, 40), np.full(20, 40), GAMMA)  # a draft equal to its target
    assert watch(pool, np.full(120, 40), np.full(120, 40), 0.01, 0.03) == []
    assert watch(pool, np.r_[np.full(60, 40), np.full(60, 30)], np.full(120, 40), 0.01, 0.03)


# The stated probabilities.

CASES = {
    "as many as the pool": ({}, {}, 60, 60),
    "a stream much longer than the pool": ({}, {}, 20, 200),
    "the fewest of a pool": ({}, {}, 8, 100),
    "requests five times as long": ({}, {"blocks": (100, 130)}, 60, 60),
}


@pytest.mark.simulation
@pytest.mark.parametrize("case", CASES, ids=list(CASES))
def test_false_alarms_come_no_more_often_than_stated(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over new baselines and streams at 5 %, within three standard errors (1.8 points each in `make test`)."""
    of_pool, of_stream, prompts, count = CASES[case]
    monkeypatch.setattr(scan, "HORIZON", count)
    rng, level, runs, alarms = np.random.default_rng(10), 0.05, trials(150, 2000), 0
    for trial in range(runs):
        first, later = requests(rng, prompts, **of_pool), requests(rng, count, **of_stream)
        alarms += bool(watch(pool_of(*first, GAMMA), *np.concatenate([first, later], 1), level, 0.0, seed=trial))
    error = math.sqrt(level * (1 - level) / runs)
    assert 0 < alarms / runs <= level + 3 * error


def correlated(rng: np.random.Generator, count: int, correlation: float, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """(accepted, drafted) of requests whose rates have a standard deviation of 0.1 and this lag-1 correlation."""
    noise = rng.standard_normal(count)
    noise[1:] *= math.sqrt(1 - correlation**2)
    drafted = 3 * rng.integers(10, 30, count)
    wanted = (rate + 0.1 * signal.lfilter([1.0], [1.0, -correlation], noise)) * drafted
    return np.clip(np.rint(wanted), 0, drafted), drafted


@pytest.mark.simulation
@pytest.mark.parametrize("correlation", trials([0.0, 0.35], [0.0, 0.1, 0.21, 0.35, 0.5]))
def test_neighbours_that_correlate_cause_no_more_false_alarms(
    correlation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 requests behind the first 150. In full 500 streams at 1 %, the default; in `make test` 60 at 5 % of 300 requests.

    And a fall by 0.09, about what `make loop` shows, is mostly heard within 100 requests.
    """
    count, horizon, level = trials(60, 500), trials(300, 1000), 1 / trials(20, 100)
    monkeypatch.setattr(scan, "FEWEST_STREAMS", trials(400, 2000))
    monkeypatch.setattr(scan, "HORIZON", horizon)
    rng, alarms, heard = np.random.default_rng(20), 0, 0
    for trial in range(count):
        unchanged = correlated(rng, 150 + horizon, correlation, 0.45)
        pool = pool_of(unchanged[0][:150], unchanged[1][:150], 3)
        alarms += bool(watch(pool, *unchanged, level, 0.0, seed=trial))
        fallen = correlated(rng, 100, correlation, 0.36)
        joined = (np.concatenate([old[:250], new]) for old, new in zip(unchanged, fallen, strict=True))
        heard += any(alarm.at > 250 for alarm in watch(pool, *joined, level, 0.03, seed=trial))
    print(f"correlation {correlation}: {alarms} of {count} streams alarmed, {heard} falls heard within 100 requests")
    assert alarms / count <= level + 3 * math.sqrt(level * (1 - level) / count)
    assert heard >= count * (0.9 if correlation <= 0.21 else 0.5)


def test_simulating_in_small_portions_keeps_the_stated_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(*requests(np.random.default_rng(17), 60), GAMMA)
    whole = threshold_for(pool, np.full(140, 80), 0.05)
    monkeypatch.setattr(scan, "CELLS", 260 * 7)
    # Other coins: 400 streams know their 95 % quantile to about a tenth.
    assert threshold_for(pool, np.full(140, 80), 0.05) == pytest.approx(whole, rel=0.1)
