"""The fastest of several ways is chosen: how often something is wrongly faster for certain, and whether the chosen one's interval holds."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from simulation import trials

from distill.verdict.timing import CERTAINLY_SLOWER, Timing
from speculative.measure.effects import confidence_of
from speculative.measure.intervals import lower_share
from speculative.measure.measured import TARGET, Way
from speculative.measure.timing import FEWEST_SAMPLES, ROUND, Sample, SpeedEstimates, spread_order

PROMPTS, TIMED, SPREAD = 64, 24, 0.25


def setup(looks: int = 1) -> Any:
    return SimpleNamespace(confidence=lambda picked: confidence_of(looks if picked else 1))


def timing(truths: dict[str, float], rng: np.random.Generator) -> Timing:
    """Made-up samples at one request. They differ by 5 %, rounds by 2 %, the texts' logarithm of tau by `SPREAD`; all ways
    share the target's samples.
    """
    tokens = rng.integers(30, 120, PROMPTS)
    blocks = {name: tokens / np.exp(rng.normal(np.log(2.0), SPREAD, PROMPTS)) for name in truths}
    samples: dict[str, dict[str, Sample]] = {name: {} for name in (TARGET, *truths)}
    for place, index in enumerate(spread_order(PROMPTS)[:TIMED]):
        if place % ROUND == 0:
            moved = {name: 1.0 + 0.02 * rng.standard_normal() for name in samples}
        said = int(tokens[index])
        for name, own in samples.items():
            count = said if name == TARGET else max(1, round(float(blocks[name][index])))
            price = 1.0 if name == TARGET else 2.0 * np.exp(-(SPREAD**2) / 2.0) / truths[name]
            seconds = count * price * moved[name] * (1.0 + 0.05 * rng.standard_normal())
            own[str(index)] = Sample(0.0, float(seconds), said, count, place // ROUND)
    return timing_of(truths, samples, tokens, blocks)


def timing_at_load(truths: dict[str, float], rng: np.random.Generator) -> Timing:
    """The same at 8 requests: samples of 16 blocks that differ by 2 %."""
    tokens = rng.integers(30, 120, PROMPTS).astype(float)
    blocks = {name: tokens / np.exp(rng.normal(np.log(2.0), SPREAD, PROMPTS)) for name in truths}
    samples = {}
    for name in (TARGET, *truths):
        rho = 1.0 if name == TARGET else 2.0 * np.exp(-(SPREAD**2) / 2.0) / truths[name]
        seconds = 16 * rho * np.exp(0.02 * rng.standard_normal(FEWEST_SAMPLES))
        samples[name] = {str(place): Sample(0.0, one, 32.0, 16, place // ROUND) for place, one in enumerate(seconds)}
    return timing_of(truths, samples, tokens, blocks, 8)


def timing_of(truths: dict[str, float], samples: Any, tokens: Any, blocks: Any, load: int = 1) -> Timing:
    estimates = SpeedEstimates(samples, range(PROMPTS), tokens, blocks, 6, load)
    return Timing(setup(), load, tuple(map(Way, truths)), samples, estimates)


def wrong(make: Any, truths: dict[str, float], runs: int) -> tuple[float, float]:
    """(share of runs in which a way that is no faster is certainly faster, share in which the chosen way's interval misses its truth)."""
    rng, claimed, missed, chosen = np.random.default_rng(len(truths)), 0, 0, 0
    for _ in range(runs):
        drawn = make(truths, rng)
        run = drawn.to_run()
        claimed += any(drawn.beats(name) for name, truth in truths.items() if truth <= 1.0)
        if run != TARGET:
            low, high = drawn.speed(run).interval
            chosen, missed = chosen + 1, missed + (not low <= truths[run] <= high)
    return claimed / runs, missed / max(1, chosen)


def equal(count: int, speed_up: float) -> dict[str, float]:
    return {f"way {number}": speed_up for number in range(count)}


@pytest.mark.simulation
@pytest.mark.parametrize("count", [1, 3, 6, 10])
def test_nothing_is_certainly_faster_in_more_than_one_run_of_twenty(count: int) -> None:
    runs = trials(15, 2000)
    claimed, _ = wrong(timing, equal(count, 1.0), runs)
    assert claimed <= trials(0.05 + 3.0 * np.sqrt(0.05 * 0.95 / runs), 0.05)


@pytest.mark.simulation
@pytest.mark.parametrize("count", [1, 3, 6, 10])
def test_the_interval_of_the_way_to_run_knows_that_it_was_chosen(count: int) -> None:
    runs = trials(15, 2000)
    _, missed = wrong(timing, equal(count, 1.3), runs)
    assert missed <= trials(0.05 + 3.0 * np.sqrt(0.05 * 0.95 / runs), 0.06)
    assert missed >= trials(0.0, 0.04)


@pytest.mark.simulation
@pytest.mark.parametrize(
    "speed_ups", [(1.5, *[1.0] * 5), (1.3, 1.25, 1.2, 1.15, 1.1, 1.05), (1.3, 1.3, 0.9, 0.9, 0.9, 0.9)]
)
def test_a_way_that_is_certainly_slower_does_not_widen_the_interval_of_the_fastest(
    speed_ups: tuple[float, ...],
) -> None:
    runs = trials(15, 2000)
    _, missed = wrong(timing, {f"way {number}": own for number, own in enumerate(speed_ups)}, runs)
    assert missed <= trials(0.05 + 3.0 * np.sqrt(0.05 * 0.95 / runs), 0.06)
    assert missed >= trials(0.0, 0.03)


@pytest.mark.simulation
@pytest.mark.parametrize("count", [1, 6])
def test_a_timing_under_load_has_a_family_of_its_own(count: int) -> None:
    runs = trials(5, 1000)
    claimed, _ = wrong(timing_at_load, equal(count, 1.0), runs)
    _, missed = wrong(timing_at_load, equal(count, 1.3), runs)
    assert claimed <= trials(0.05 + 3.0 * np.sqrt(0.05 * 0.95 / runs), 0.05)
    assert missed <= trials(0.05 + 3.0 * np.sqrt(0.05 * 0.95 / runs), 0.07)


def test_looks_and_ways_are_each_counted_once() -> None:
    """The number of ways moves the lower end by a share of the tail that the looks have left."""
    drawn = timing(equal(6, 1.3), np.random.default_rng(0))
    names = list(equal(6, 1.3))
    looked = Timing(setup(20), 1, drawn.ways, drawn.samples, drawn.estimates, frozenset([names[0]]))
    for name, looks in ((names[0], 20), (names[1], 1)):
        tail, slow = 0.05 / looks, CERTAINLY_SLOWER
        family = [
            name,
            *(one for one in names if one != name and drawn.estimates.against(name, one, slow)[1][0] <= 1.0),
        ]
        share = lower_share(drawn.estimates.errors_of(family, TARGET))
        assert 0.0 < share < 0.6
        low = drawn.estimates.against(name, TARGET, 1.0 - share * tail)[1][0]
        high = drawn.estimates.against(name, TARGET, 1.0 - tail)[1][1]
        assert looked.speed(name).interval == pytest.approx((low, high))
    # Every row shows the interval that decides.
    alone = Timing(setup(), 1, drawn.ways[:1], drawn.samples, drawn.estimates)
    assert alone.speed(names[0]).interval == drawn.estimates.speed(names[0]).interval
    assert drawn.beats(names[0]) == (drawn.speed(names[0]).interval[0] > 1.0)


def test_ways_that_are_one_way_count_once_and_independent_ones_fully() -> None:
    rng = np.random.default_rng(0)
    one_R1 = rng.standard_normal((400, 1))
    assert lower_share(one_R1) == pytest.approx(1.0, abs=0.03)
    assert lower_share(np.repeat(one_R1, 10, 1)) == pytest.approx(1.0, abs=0.03)
    # Of ten independent estimates each may be too high in 0.437 of 100 runs: 1 - (1 - 0.00437)^10 = 0.0429.
    assert lower_share(np.eye(10)) == pytest.approx(0.00437 / 0.025, rel=0.08)
    assert lower_share(np.eye(10)) < lower_share(np.eye(3)) < lower_share(np.eye(2)) < 1.0
