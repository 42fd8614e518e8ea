"""Which sequences share a step, or a row: partitions, determinism, padding."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches.packing import (
    batches_per_epoch,
    micro_batches,
    pack,
    packed_micro_batches,
    plan_epoch,
)

lengths_strategy = st.lists(st.integers(1, 300), min_size=1, max_size=400)


@settings(max_examples=100, deadline=None)
@given(lengths_strategy, st.integers(1, 24), st.integers(0, 5), st.integers(0, 5))
def test_an_epoch_uses_each_sequence_at_most_once_and_drops_less_than_a_batch(
    lengths: list[int], batch_size: int, seed: int, epoch: int
) -> None:
    plan = plan_epoch(lengths, batch_size, seed, epoch)
    used = np.concatenate(plan)
    assert len(plan) == batches_per_epoch(len(lengths), batch_size)
    assert all(len(batch) == batch_size for batch in plan)
    assert set(used) <= set(range(len(lengths)))
    if len(lengths) >= batch_size:
        assert len(set(used)) == len(used)
        assert len(lengths) - len(used) < batch_size
    else:
        counts = np.bincount(used, minlength=len(lengths))
        assert counts.max() - counts.min() <= 1, "a set smaller than a batch is repeated evenly"
    for batch in plan:
        sizes = np.asarray(lengths)[batch]
        assert (np.diff(sizes) <= 0).all(), "falling length"


def test_plan_depends_on_seed_and_epoch_alone() -> None:
    lengths = np.random.default_rng(0).integers(20, 200, 500)
    first = plan_epoch(lengths, 16, seed=3, epoch=2)
    np.random.default_rng(1).random(10)
    np.random.seed(5)
    for mine, again in zip(first, plan_epoch(lengths, 16, seed=3, epoch=2), strict=True):
        np.testing.assert_array_equal(mine, again)
    for other in (plan_epoch(lengths, 16, seed=3, epoch=3), plan_epoch(lengths, 16, seed=4, epoch=2)):
        assert not np.array_equal(np.concatenate(first), np.concatenate(other))


def test_the_dropped_remainder_changes_between_epochs() -> None:
    lengths = np.full(21, 10)
    dropped = [set(range(21)) - set(np.concatenate(plan_epoch(lengths, 8, 0, epoch))) for epoch in range(12)]
    assert all(len(left) == 5 for left in dropped)
    assert set.union(*dropped) == set(range(21)), "nothing is left out for ever"


def test_batches_of_one_length_do_not_come_in_order_of_length() -> None:
    lengths = np.random.default_rng(0).integers(20, 200, 2000)
    means = [lengths[batch].mean() for batch in plan_epoch(lengths, 16, 0, 0)]
    correlation = np.corrcoef(means, np.arange(len(means)))[0, 1]
    assert abs(correlation) < 0.3, "the order of batches is random"


def padding_share(lengths: np.ndarray, micro: list[np.ndarray]) -> float:
    """Padded positions / all positions when each micro-batch is padded to its own longest sequence."""
    return 1 - sum(lengths[own].sum() for own in micro) / sum(lengths[own].max() * len(own) for own in micro)


@pytest.mark.parametrize("count", [400, 1200, 20000])
@pytest.mark.parametrize("micro_batch_size", [8, 16, 32])
def test_padding_of_real_responses_is_under_ten_percent(count: int, micro_batch_size: int) -> None:
    # Prompt lengths like those of standard-library function heads in tokens (log-normal, 20 to 160), and responses
    # that mostly run into their budget of 96 and sometimes end before.
    generator = np.random.default_rng(0)
    prompts = np.clip(generator.lognormal(4.2, 0.6, count), 20, 160).astype(int)
    responses = np.where(generator.random(count) < 0.6, 96, generator.integers(5, 96, count))
    lengths = prompts + responses
    micro = [
        share
        for batch in plan_epoch(lengths, 32, seed=0, epoch=0)
        for share in micro_batches(batch, micro_batch_size, 0, 1)
    ]
    assert padding_share(lengths, micro) < 0.10
    shuffled = generator.permutation(count)[: count // 32 * 32].reshape(-1, micro_batch_size)
    assert padding_share(lengths, list(shuffled)) > 0.15, "the test would notice if lengths were not grouped"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_a_batch_without_overlap(ranks: int) -> None:
    batch = np.random.default_rng(0).permutation(16)
    shares = [micro_batches(batch, 2, rank, ranks) for rank in range(ranks)]
    assert {len(share) for share in shares} == {8 // ranks}, "every rank makes the same number of forwards"
    assert sorted(np.concatenate([part for share in shares for part in share])) == list(range(16))


def test_ranks_get_sequences_of_like_length_at_the_same_time() -> None:
    batch = np.arange(16)[::-1]  # falling length when index is length
    first, second = (micro_batches(batch, 2, rank, 2) for rank in range(2))
    for mine, theirs in zip(first, second, strict=True):
        assert abs(int(mine.max()) - int(theirs.max())) <= 2


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=80), st.integers(40, 120))
def test_rows_hold_every_sequence_once_and_could_not_be_merged(lengths: list[int], row_tokens: int) -> None:
    rows = pack(lengths, row_tokens)
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(len(lengths)))
    fills = [sum(lengths[position] for position in row) for row in rows]
    assert all(0 < fill <= row_tokens for fill in fills)
    # First fit: nothing in a later row has room in an earlier one, so at most one row is half empty.
    for earlier, later in itertools.combinations(range(len(rows)), 2):
        assert all(fills[earlier] + lengths[position] > row_tokens for position in rows[later])
    assert sum(2 * fill <= row_tokens for fill in fills) <= 1
    for row in rows:
        assert all(lengths[first] >= lengths[second] for first, second in itertools.pairwise(row))


@pytest.mark.parametrize("lengths", [[3, 11], [0, 4]])
def test_a_sequence_that_fits_no_row_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="rows of 10"):
        pack(lengths, 10)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 5))
def test_packed_rows_are_dealt_to_ranks_without_overlap(lengths: list[int], micro_batch_size: int, ranks: int) -> None:
    shares = [packed_micro_batches(lengths, 50, micro_batch_size, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1, "every rank makes the same number of forwards"
    assert all(len(rows) <= micro_batch_size for share in shares for rows in share)
    dealt = [tuple(row) for share in shares for rows in share for row in rows]
    assert sorted(dealt) == sorted(tuple(row) for row in pack(lengths, 50)), "packed alike for any number of ranks"
