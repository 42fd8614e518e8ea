"""Group sequences into steps: a pure function of lengths and seed, so a position in the data is one number.

Legend: a *batch* is all sequences of one optimizer step over all ranks; a *micro-batch* is one forward of one rank; a packed *row*
holds several sequences one after another.
"""

from collections.abc import Sequence

import numpy as np

# Number of batches sorted by length together. More batches mean less padding and a less random order; 16 keeps padding under 10 % on
# real responses (see tests/tokens/test_packing.py).
POOL_BATCHES = 16
Lengths = Sequence[int] | np.ndarray


def plan_epoch(lengths: Lengths, batch_size: int, seed: int | Sequence[int], epoch: int) -> list[np.ndarray]:
    """The batches of one epoch: index arrays of `batch_size`, each sorted by falling length.

    Sequences of similar length share a batch. An epoch drops the remainder, which differs each epoch. A set smaller than a
    batch is repeated to fill one.
    """
    lengths = np.asarray(lengths)
    words = (seed,) if isinstance(seed, int) else seed
    generator = np.random.default_rng([*words, epoch])
    order = generator.permutation(len(lengths))
    if len(order) < batch_size:
        order = np.resize(order, batch_size)
    order = order[: len(order) // batch_size * batch_size]
    batches: list[np.ndarray] = []
    for start in range(0, len(order), POOL_BATCHES * batch_size):
        pool = order[start : start + POOL_BATCHES * batch_size]
        pool = pool[np.argsort(-lengths[pool], kind="stable")]
        batches.extend(pool.reshape(-1, batch_size))
    return [batches[index] for index in generator.permutation(len(batches))]


def batches_per_epoch(count: int, batch_size: int) -> int:
    """Steps in an epoch of `count` sequences."""
    return max(1, count // batch_size)


def micro_batches(batch: np.ndarray, micro_batch_size: int, rank: int, ranks: int) -> list[np.ndarray]:
    """This rank's share of a batch, in forward order. Every rank gets the same number: a batch divides by micro-batches x ranks."""
    return list(batch.reshape(-1, micro_batch_size)[rank::ranks])


def pack(lengths: Lengths, row_tokens: int) -> list[list[int]]:
    """Pack sequences into rows of at most `row_tokens` tokens by first-fit decreasing: at most 11/9 of the minimum number of rows + 1.

    Each row lists positions in `lengths`, the longest first; equal lengths keep their order. Raises ValueError for a sequence
    that is empty or longer than a row.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= row_tokens:
        raise ValueError(f"lengths of {lengths.min()} to {lengths.max()} do not go into rows of {row_tokens}")
    rows: list[list[int]] = []
    free = np.zeros(len(lengths), dtype=np.int64)  # free tokens per row; there are never more rows than sequences
    for position in np.argsort(-lengths, kind="stable").tolist():
        fitting = np.flatnonzero(free[: len(rows)] >= lengths[position])
        row = int(fitting[0]) if len(fitting) else len(rows)
        if row == len(rows):
            rows.append([])
            free[row] = row_tokens
        rows[row].append(position)
        free[row] -= lengths[position]
    return rows


def packed_micro_batches(
    lengths: Lengths, row_tokens: int, micro_batch_size: int, rank: int, ranks: int
) -> list[list[list[int]]]:
    """This rank's share of a packed batch: micro-batches of at most `micro_batch_size` rows of positions in `lengths`.

    The batch is packed once for all ranks and its rows are assigned round robin. Every rank gets the same number of micro-batches;
    the last ones can have fewer rows, or none.
    """
    rows = pack(lengths, row_tokens)
    most = -(-len(rows) // ranks)
    mine = rows[rank::ranks]
    return [mine[start : start + micro_batch_size] for start in range(0, most, micro_batch_size)]
