"""Which sequences of which pool make a step: counts follow the shares, orders are plans, nothing depends on what was asked before."""

import itertools
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches.mixture import Mixture, Pool
from data.batches.packing import batches_per_epoch, plan_epoch

NAMES = ("target", "student", "speculative", "text")
shares_strategy = st.lists(
    st.one_of(st.floats(0.001, 10.0), st.sampled_from([0.1, 0.25, 1.0, 3.0])), min_size=1, max_size=4
)
lengths_strategy = st.lists(st.integers(1, 60), min_size=1, max_size=120)


def pools_of(shares: list[float], every: int | None = None) -> list[Pool]:
    rolling = {"student", "speculative"}
    return [Pool(name, share, every if name in rolling else None) for name, share in zip(NAMES, shares, strict=False)]


@settings(max_examples=150, deadline=None)
@given(shares_strategy, st.integers(1, 40), st.integers(1, 60))
def test_counts_fill_every_step_and_stay_within_one_of_each_share(
    shares: list[float], batch_size: int, steps: int
) -> None:
    mixture = Mixture(pools_of(shares), batch_size, seed=0)
    exact = [Fraction(repr(share)) for share in shares]
    total = [0] * len(shares)
    for step in range(steps):
        counts = list(mixture.counts(step).values())
        assert sum(counts) == batch_size
        assert min(counts) >= 0
        total = [given + count for given, count in zip(total, counts, strict=True)]
        for given_so_far, share in zip(total, exact, strict=True):
            assert abs(given_so_far - (step + 1) * batch_size * share / sum(exact)) < 1


@settings(max_examples=60, deadline=None)
@given(lengths_strategy, st.integers(1, 24), st.integers(0, 9))
def test_one_pool_that_never_changes_is_plan_epoch_itself(lengths: list[int], batch_size: int, seed: int) -> None:
    mixture = Mixture([Pool("target", 0.7)], batch_size, seed)
    for step in range(2 * batches_per_epoch(len(lengths), batch_size) + 1):
        epoch, index = divmod(step, batches_per_epoch(len(lengths), batch_size))
        expected = plan_epoch(lengths, batch_size, seed, epoch)[index]
        np.testing.assert_array_equal(mixture.chosen("target", step, lengths), expected)


@settings(max_examples=60, deadline=None)
@given(shares_strategy, st.integers(1, 16), st.integers(0, 5), st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_a_step_is_the_same_whatever_was_asked_before(
    shares: list[float], batch_size: int, seed: int, asked: list[int]
) -> None:
    sets = {name: np.arange(5, 5 + size) % 11 + 1 for name, size in zip(NAMES, (30, 9, 3, 17), strict=True)}
    wandering = Mixture(pools_of(shares, every=7), batch_size, seed)
    for step in asked:
        fresh = Mixture(pools_of(shares, every=7), batch_size, seed)
        assert wandering.counts(step) == fresh.counts(step)
        for name, count in fresh.counts(step).items():
            chosen = fresh.chosen(name, step, sets[name])
            assert len(chosen) == count
            np.testing.assert_array_equal(wandering.chosen(name, step, sets[name]), chosen)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([0.1, 0.3, 0.5, 0.8]), st.integers(2, 12), st.integers(1, 50), st.integers(0, 5))
def test_a_pool_is_gone_through_epoch_after_epoch(share: float, batch_size: int, size: int, seed: int) -> None:
    lengths = np.arange(size) % 9 + 1
    mixture = Mixture([Pool("target", 1 - share), Pool("text", share)], batch_size, seed)
    stream = list(itertools.chain.from_iterable(mixture.chosen("text", step, lengths).tolist() for step in range(120)))
    planned = max(1, int(batch_size * Fraction(repr(share)) + Fraction(1, 2)))
    in_epoch = batches_per_epoch(size, planned) * planned
    for start in range(0, len(stream) - in_epoch + 1, in_epoch):
        counts = np.bincount(stream[start : start + in_epoch], minlength=size)
        assert counts.max() - counts.min() <= 1, "an epoch has each at most once, or all evenly"


def test_a_generation_begins_a_plan_of_its_own() -> None:
    lengths = np.arange(40) % 7 + 1
    mixture = Mixture([Pool("student", 1.0, every=5)], batch_size=8, seed=3)
    assert [mixture.generation("student", step) for step in (0, 4, 5, 9, 10)] == [0, 0, 1, 1, 2]
    for generation in range(3):
        steps = [mixture.chosen("student", 5 * generation + offset, lengths) for offset in range(5)]
        assert sorted(np.concatenate(steps).tolist()) == list(range(40)), "all of a generation once in 5 steps of 8"
    first, second = (mixture.chosen("student", step, lengths) for step in (0, 5))
    assert not np.array_equal(first, second)
    # A generation may have another number of sequences.
    assert mixture.chosen("student", 10, lengths[:12]).max() < 12
