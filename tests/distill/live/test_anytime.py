"""Anytime-valid intervals: formulas against quadrature and loops, false alarm rates by simulation."""

import math

import numpy as np
import pytest
from scipy import integrate, stats
from simulation import trials

from distill.live.anytime import (
    FEWEST_REQUESTS,
    Sums,
    anytime_interval,
    boundary,
    difference_of,
    estimate_of,
    evidence_of_more,
    requests_to_see,
    sums_of,
)

GAMMA = 4


def requests(
    rng: np.random.Generator, shape: tuple[int, int], ease: float = 0.8, alike: float = 20.0, blocks: float = 20.0
) -> tuple[np.ndarray, np.ndarray]:
    """(accepted, drafted) of requests with lognormal length and their own difficulty, drafted block by block."""
    blocks_N = np.clip(blocks * np.exp(rng.normal(-0.32, 0.8, math.prod(shape))), 1, 400).astype(int)
    ease_N = np.minimum(rng.beta(alike * ease, alike * (1 - ease), len(blocks_N)), 1 - 1e-9)
    request_B = np.repeat(np.arange(len(blocks_N)), blocks_N)
    kept_B = np.minimum(rng.geometric(1 - ease_N[request_B]) - 1, GAMMA)
    return np.bincount(request_B, kept_B, len(blocks_N)).reshape(shape), (blocks_N * GAMMA).reshape(shape)


def served(
    rng: np.random.Generator, streams: int, length: int, share: float, new: float, old: float, **law: float
) -> tuple[Sums, Sums]:
    """Sums of (new, old) after each request of randomly split streams."""
    mine = rng.random((streams, length)) < share
    found = []
    for ease, here in ((new, mine), (old, ~mine)):
        accepted, drafted = requests(rng, mine.shape, ease, **law)
        found.append(sums_of(accepted * here, drafted * here, running=True))
    return found[0], found[1]


def test_an_estimate_is_the_ratio_and_its_linearised_variance() -> None:
    rng = np.random.default_rng(0)
    accepted, drafted = requests(rng, (1, 40))
    found = estimate_of(sums_of(accepted[0], drafted[0]))
    rate = accepted.sum() / drafted.sum()
    squares = sum((kept - rate * tried) ** 2 for kept, tried in zip(accepted[0], drafted[0], strict=True))
    squares += (max(rate, 1 - rate) * drafted.mean()) ** 2  # the extra request
    assert found.value == pytest.approx(rate)
    assert found.variance == pytest.approx(squares / drafted.sum() ** 2 * 40 / 39)
    mean = estimate_of(sums_of(drafted[0]), doubt=0.0)
    assert mean.value == pytest.approx(drafted.mean())
    assert mean.variance == pytest.approx(drafted.var(ddof=1) / 40)


@pytest.mark.parametrize(("variance", "level", "scale"), [(1e-4, 0.05, 0.05), (0.02, 0.01, 0.05), (3e-6, 0.2, 0.3)])
def test_at_the_boundary_the_mixture_is_one_over_the_level(variance: float, level: float, scale: float) -> None:
    away = boundary(variance, level, scale)

    def ratio(difference: float) -> float:
        likelihood = math.exp((away * difference - difference**2 / 2) / variance)
        return likelihood * stats.norm.pdf(difference, scale=scale)

    centre = away * scale**2 / (scale**2 + variance)
    width = 12 * math.sqrt(variance)
    assert integrate.quad(ratio, centre - width, centre + width, points=[centre])[0] == pytest.approx(1 / level)


def test_the_interval_lies_about_the_difference_and_narrows() -> None:
    rng = np.random.default_rng(0)
    new, old = served(rng, 1, 3000, 0.3, 0.85, 0.8)
    difference = difference_of(estimate_of(new), estimate_of(old))
    low, high = anytime_interval(difference, 0.05)
    first = int(np.argmax(new.requests[0] >= FEWEST_REQUESTS))
    assert np.isinf(low[0, : first - 1]).all()
    assert np.isfinite(low[0, first])
    np.testing.assert_allclose((low[0, first:] + high[0, first:]) / 2, difference.value[0, first:])
    assert (high - low)[0, -1] < (high - low)[0, first] / 3


@pytest.mark.parametrize(
    ("accepted", "drafted"),
    [([4] * 400, [4] * 400), ([0] * 400, [4] * 400), ([0] * 400, [0] * 400), ([], []), ([3], [4])],
)
def test_rates_at_the_edge_and_nothing_drafted_do_not_break_it(accepted: list[int], drafted: list[int]) -> None:
    other = estimate_of(sums_of(*(part[0] for part in requests(np.random.default_rng(0), (1, 100)))))
    found = estimate_of(sums_of(np.array(accepted), np.array(drafted)))
    low, high = anytime_interval(difference_of(found, other), 0.05)
    if sum(drafted) < 100:
        assert (low, high) == (-np.inf, np.inf)
    else:
        assert low < accepted[0] / 4 - other.value < high
        assert high - low < 0.4


@pytest.mark.parametrize(
    ("successes", "count", "rate"), [(0, 0, 0.1), (2, 2, 0.1), (3, 40, 0.02), (30, 60, 0.4), (0, 50, 0.3)]
)
def test_evidence_is_the_likelihood_ratio_mixed_over_higher_rates(successes: int, count: int, rate: float) -> None:
    def ratio(other: float) -> float:
        return (other / rate) ** successes * ((1 - other) / (1 - rate)) ** (count - successes) / (1 - rate)

    assert evidence_of_more(successes, count, rate) == pytest.approx(integrate.quad(ratio, rate, 1)[0], rel=1e-6)
    assert evidence_of_more(5000, 5000, 1e-4) > 1e300, "no overflow"


@pytest.mark.simulation
@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize(
    "law", [{"ease": 0.8}, {"ease": 0.6, "alike": 4.0}, {"ease": 0.98, "blocks": 5.0}, {"ease": 0.05, "blocks": 5.0}]
)
def test_a_look_after_every_request_is_wrong_no_more_often_than_stated(share: float, law: dict[str, float]) -> None:
    level, streams, rng = 0.1, trials(60, 2000), np.random.default_rng(1)
    law = dict(law)
    ease = law.pop("ease")
    wrong = [0, 0]
    for _ in range(0, streams, 20):
        new, old = served(rng, 20, 800, share, ease, ease, **law)
        low, high = anytime_interval(difference_of(estimate_of(new), estimate_of(old)), level)
        wrong[0] += int((low > 0).any(1).sum())
        wrong[1] += int((high < 0).any(1).sum())
    # Three standard errors above half the level on either side.
    for side in wrong:
        assert side / streams <= level / 2 + 3 * math.sqrt(level / 2 / streams)


@pytest.mark.simulation
def test_a_difference_is_certain_after_as_many_requests_as_stated() -> None:
    rng, level, share = np.random.default_rng(2), 0.05, 0.3
    whole = [estimate_of(sums_of(*(part[0] for part in requests(rng, (1, 100_000), ease)))) for ease in (0.83, 0.8)]
    difference = float(whole[0].value - whole[1].value)
    needed = requests_to_see(difference, math.sqrt(whole[1].variance * 100_000), share, level)
    seen, streams = 0, trials(60, 1000)
    for _ in range(0, streams, 20):
        new, old = served(rng, 20, needed, share, 0.83, 0.8)
        seen += int((anytime_interval(difference_of(estimate_of(new), estimate_of(old)), level)[0] > 0).any(1).sum())
    assert 0.9 - 3 * math.sqrt(0.09 / streams) <= seen / streams
    assert seen / streams < 1 or streams < 100, "the number is no upper bound of all"


@pytest.mark.simulation
@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5])
def test_evidence_by_chance_is_rare(rate: float) -> None:
    count, streams = 400, trials(300, 20_000)
    trial_N = np.arange(1, count + 1)
    successes = np.cumsum(np.random.default_rng(3).random((streams, count)) < rate, axis=1)
    reached = (evidence_of_more(successes, trial_N, rate) >= 20).any(1).mean()
    assert reached <= 0.05 + 3 * math.sqrt(0.05 / streams)
