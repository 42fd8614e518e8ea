"""The sequential test: its sums against a loop, its stated probabilities against simulated servers."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import signal
from simulation import trials

from distill.live.alarm import cusum
from distill.live.alarm.cusum import (
    Chart,
    Crossing,
    alarms_of,
    block_variance_per_token,
    chart_for,
    correlation_of,
    cusum_path,
    increments,
    monitor,
    pool_of,
    watch,
)

GAMMA = 4


@pytest.fixture(autouse=True)
def _fewer_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the simulated streams: thresholds at 5 % are then as accurate as at 1 % with all. The promise covers 200 requests."""
    monkeypatch.setattr(cusum, "FEWEST_STREAMS", 400)
    monkeypatch.setattr(cusum, "HORIZON", 200)


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


def test_alarms_are_the_stretches_between_zeros_that_cross() -> None:
    path = np.array([0.0, 1.0, 3.0, 4.0, 0.0, 1.0, 0.0, 2.5, 3.0])
    assert alarms_of(path, 2.0) == [Crossing(2, 3, 5), Crossing(8, 8, None)]
    assert alarms_of(path, 4.0) == [], "met is not crossed"


def test_half_the_drop_as_allowance_makes_a_log_likelihood_ratio() -> None:
    pool = pool_of(*requests(np.random.default_rng(1), 50), GAMMA)
    accepted, drafted = np.array([30.0, 70.0]), np.array([80.0, 100.0])
    spread = pool.spread(drafted)
    before = -(((accepted - pool.rate * drafted) / spread) ** 2) / 2
    after = -(((accepted - (pool.rate - 0.1) * drafted) / spread) ** 2) / 2
    found = increments(pool, accepted, drafted, 0.1, 0.05)
    np.testing.assert_allclose(found * pool.inflation, after - before, rtol=1e-9)


def written_out(pool: cusum.Pool, drafted: np.ndarray, chart: Chart, streams: int, seed: int) -> np.ndarray:
    """The highest sums (streams,) of streams, computed request by request, each behind its own baseline.

    A baseline is as many requests as the pool: it gets the rate, the spread and the correlation a little wrong.
    """
    rng, told, own, count = np.random.default_rng(seed), pool.information_P, pool.residuals_P, len(pool.residuals_P)
    centred, highest = (own - own.mean()) / own.std(), []
    high = pool.correlation + math.sqrt((1 - pool.correlation**2) / count)
    for _ in range(streams):
        noise = [float(rng.choice(centred))]
        for _ in range(count + len(drafted) - 1):
            noise.append(high * noise[-1] + math.sqrt(1 - high**2) * float(rng.choice(centred)))
        first, later = np.array(noise[:count]), np.array(noise[count:])
        error = (told * first).sum() / (told**2).sum()
        left = first - error * told
        scale = ((told * left) ** 2).sum() / (told**2).sum() * count / (count - 1)
        believed = replace(
            pool, rate=pool.rate + error, within=pool.within * scale, between=pool.between * scale,
            correlation=float(correlation_of(left)),
        )  # fmt: skip
        accepted = pool.rate * drafted + later * pool.spread(drafted)
        highest.append(cusum_path(increments(believed, accepted, drafted, chart.drop, chart.allowance)).max())
    return np.array(highest)


def test_the_threshold_is_crossed_by_as_many_written_out_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cusum, "FEWEST_STREAMS", 20_000)  # the threshold's own error: 0.15 points
    monkeypatch.setattr(cusum, "HORIZON", 5)
    pool = replace(pool_of(*requests(np.random.default_rng(2), 30), GAMMA), correlation=0.3)
    drafted = np.array([40.0, 160.0, 80.0, 100.0, 60.0])
    chart = chart_for(pool, drafted, 0.05, 0.05)
    crossed = (written_out(pool, drafted, chart, 4000, seed=3) > chart.threshold).mean()
    assert crossed == pytest.approx(0.05, abs=0.011)  # three standard errors of 4,000 streams


def test_the_correlation_is_found_without_bias() -> None:
    rng = np.random.default_rng(6)
    for truth in (0.2, 0.5):
        noise = rng.standard_normal((2000, 100))
        noise[:, 1:] *= math.sqrt(1 - truth**2)
        found = correlation_of(signal.lfilter([1.0], [1.0, -truth], noise, axis=1))
        assert found.mean() == pytest.approx(truth, abs=0.015)  # uncorrected it is 0.016 and 0.025 lower
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


def test_a_chart_refuses_what_means_nothing() -> None:
    pool = pool_of(*requests(np.random.default_rng(0), 20), GAMMA)
    for level, drop, count in ((0.0, 0.05, 3), (1.0, 0.05, 3), (0.01, 0.0, 3), (0.01, 0.05, 0)):
        with pytest.raises(ValueError):
            chart_for(pool, np.full(count, 40), level, drop)


def test_a_pool_without_any_spread_still_has_a_threshold() -> None:
    pool = pool_of(np.full(20, 40), np.full(20, 40), GAMMA)  # a draft equal to its target
    chart = chart_for(pool, np.full(100, 40), 0.01, 0.05)
    assert chart.threshold == pytest.approx(math.log(200 / 0.01))
    assert monitor(pool, np.full(100, 40), np.full(100, 40), chart) == []
    assert monitor(pool, np.full(100, 30), np.full(100, 40), chart)


# The stated probabilities.

CASES = {
    "as many as the pool": ({}, {}, 60, 60),
    "a stream much longer than the pool": ({}, {}, 20, 200),
    "the fewest of a pool": ({}, {}, 8, 100),
    "requests five times as long": ({}, {"blocks": (100, 130)}, 60, 60),
}


@pytest.mark.parametrize("case", CASES, ids=list(CASES))
def test_false_alarms_come_no_more_often_than_stated(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 300 new baselines and streams at 5 %, within three standard errors (1.3 points each)."""
    of_pool, of_stream, prompts, count = CASES[case]
    monkeypatch.setattr(cusum, "HORIZON", count)
    rng, level, trials, alarms = np.random.default_rng(10), 0.05, 300, 0
    for trial in range(trials):
        pool = pool_of(*requests(rng, prompts, **of_pool), GAMMA)
        accepted, drafted = requests(rng, count, **of_stream)
        chart = chart_for(pool, drafted, level, 0.05, seed=trial)
        alarms += bool(monitor(pool, accepted, drafted, chart))
    error = math.sqrt(level * (1 - level) / trials)
    assert 0 < alarms / trials <= level + 3 * error


def correlated(rng: np.random.Generator, count: int, correlation: float, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """(accepted, drafted) of requests whose rates have a standard deviation of 0.1 and this lag-1 correlation."""
    noise = rng.standard_normal(count)
    noise[1:] *= math.sqrt(1 - correlation**2)
    drafted = 3 * rng.integers(10, 30, count)
    wanted = (rate + 0.1 * signal.lfilter([1.0], [1.0, -correlation], noise)) * drafted
    return np.clip(np.rint(wanted), 0, drafted), drafted


@pytest.mark.simulation
@pytest.mark.parametrize("correlation", [0.0, 0.1, 0.21, 0.35, 0.5])
def test_neighbours_that_correlate_cause_no_more_false_alarms(
    correlation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 requests behind a baseline of 150. In full 500 streams at 1 %, the default; in `make test` 60 at 5 % of 300 requests.

    And a fall by 0.09, about what `make loop` shows, is mostly heard within 100 requests where they correlate by 0.21 or less.
    """
    count, horizon, level = trials(60, 500), trials(300, 1000), 1 / trials(20, 100)
    monkeypatch.setattr(cusum, "FEWEST_STREAMS", trials(400, 2000))
    monkeypatch.setattr(cusum, "HORIZON", horizon)
    rng, alarms, heard = np.random.default_rng(20), 0, 0
    for trial in range(count):
        accepted, drafted = correlated(rng, 150 + horizon, correlation, 0.45)
        pool = pool_of(accepted[:150], drafted[:150], 3)
        alarms += bool(watch(pool, accepted[150:], drafted[150:], level, 0.05, seed=trial))
        fallen = correlated(rng, 100, correlation, 0.36)
        joined = (np.concatenate([old[150:200], new]) for old, new in zip((accepted, drafted), fallen, strict=True))
        heard += any(alarm.at > 50 for alarm in watch(pool, *joined, level, 0.05, seed=trial))
    print(f"correlation {correlation}: {alarms} of {count} streams alarmed, {heard} falls heard within 100 requests")
    assert alarms / count <= level + 3 * math.sqrt(level * (1 - level) / count)
    assert correlation > 0.21 or heard >= trials(51, 300)


def test_the_second_chart_hears_a_large_fall_sooner() -> None:
    rng = np.random.default_rng(3)
    accepted, drafted = (
        np.concatenate(pair)
        for pair in zip(correlated(rng, 150, 0.2, 0.5), correlated(rng, 300, 0.2, 0.38), strict=True)
    )
    pool = pool_of(accepted[:150], drafted[:150], 3)
    stream = accepted[150:], drafted[150:]
    one = monitor(pool, *stream, chart_for(pool, stream[1], 0.05, 0.05))
    both = watch(pool, *stream, 0.05, 0.05)
    assert both
    assert both[0].at < (one[0].at if one else math.inf)


def test_an_error_of_the_baseline_raises_the_allowance_where_it_must() -> None:
    rng = np.random.default_rng(14)
    few, many = pool_of(*requests(rng, 40), GAMMA), pool_of(*requests(rng, 4000), GAMMA)
    drafted = requests(rng, 1000)[1]
    wary, sure = chart_for(few, drafted, 0.05, 0.05), chart_for(many, drafted, 0.05, 0.05)
    assert wary.allowance > sure.allowance == pytest.approx(0.025)
    assert wary.threshold > sure.threshold


def test_simulating_in_small_portions_keeps_the_stated_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(*requests(np.random.default_rng(17), 60), GAMMA)
    whole = chart_for(pool, np.full(80, 80), 0.05, 0.05)
    monkeypatch.setattr(cusum, "CELLS", 80 * 7)
    # Other coins: 400 streams know their 95 % quantile to about a tenth.
    assert chart_for(pool, np.full(80, 80), 0.05, 0.05).threshold == pytest.approx(whole.threshold, rel=0.3)
