"""Choose the examples of each pool for each step: a pure function of seed and step.

A *pool* is a set of sequences of one kind with a share of every step. A pool can be generated again every few steps (rollouts); each
version is a *generation*.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import numpy as np

from data.batches.packing import Lengths, batches_per_epoch, plan_epoch


@dataclass(frozen=True)
class Pool:
    """One kind of sequences. `share`: relative to the other pools'. `every`: steps that use one generation; None = it never changes."""

    name: str
    share: float
    every: int | None = None


class Mixture:
    """Draw `batch_size` sequences per step from several pools, independently of ranks and micro-batches.

    A pool's count follows its share: over the first N steps, for every N, it is less than one sequence away from
    N x batch_size x share. Within a pool the order is that of `plan_epoch`, epoch by epoch, with the pool's average number of sequences
    per step as batch size. The first pool, if it never changes, has the same order as without other pools. The others add their name and
    generation to the seed, so that a pool's order does not depend on which others exist.
    """

    def __init__(self, pools: Sequence[Pool], batch_size: int, seed: int) -> None:
        """`pools`: at least one, with distinct names and shares above zero."""
        self.pools, self.batch_size, self.seed = {pool.name: pool for pool in pools}, batch_size, seed
        # Exact decimal fractions, so that 0.1 + 0.2 + 0.7 is one.
        shares = [Fraction(repr(float(pool.share))) for pool in pools]
        self._rates = [share * batch_size / sum(shares) for share in shares]
        self._drawn = [tuple(0 for _ in pools)]  # sequences drawn by each pool before step 0, 1, ...
        self._plans: dict[str, tuple[tuple[int, int, int], np.ndarray]] = {}

    def drawn(self, step: int) -> dict[str, int]:
        """Number of sequences drawn from each pool before `step`.

        Every step takes the integer part of each pool's rate. The rest of the batch is assigned one by one with the quota
        method (Balinski and Young 1975): among the pools that stay below their quota, the one with the largest rate / (given
        + 1). This keeps every pool within one sequence of its quota at all times.
        """
        whole = [floor(rate) for rate in self._rates]
        rest = [rate - floor(rate) for rate in self._rates]
        left = self.batch_size - sum(whole)
        while len(self._drawn) <= step:
            steps = len(self._drawn) - 1
            extra = [given - steps * part for given, part in zip(self._drawn[-1], whole, strict=True)]
            for item in range(steps * left + 1, (steps + 1) * left + 1):
                open_to = [j for j, rate in enumerate(rest) if extra[j] * left < rate * item]
                extra[max(open_to, key=lambda j: rest[j] / (extra[j] + 1))] += 1
            self._drawn.append(tuple((steps + 1) * part + more for part, more in zip(whole, extra, strict=True)))
        return dict(zip(self.pools, self._drawn[step], strict=True))

    def counts(self, step: int) -> dict[str, int]:
        """Sequences of each pool in a step; they sum to `batch_size`."""
        before, after = self.drawn(step), self.drawn(step + 1)
        return {name: after[name] - before[name] for name in self.pools}

    def generation(self, name: str, step: int) -> int:
        """Generation of a pool that a step uses; 0 for a pool that never changes."""
        every = self.pools[name].every
        return 0 if every is None else step // every

    def chosen(self, name: str, step: int, lengths: Lengths) -> np.ndarray:
        """Numbers of a pool's examples in a step. `lengths`: of all examples in this step's generation."""
        pool, generation = self.pools[name], self.generation(name, step)
        first = generation * (pool.every or 0)
        start = self.drawn(step)[name] - self.drawn(first)[name]
        stop = self.drawn(step + 1)[name] - self.drawn(first)[name]
        size = max(1, floor(self._rates[list(self.pools).index(name)] + Fraction(1, 2)))
        in_epoch = batches_per_epoch(len(lengths), size) * size
        parts = [np.zeros(0, dtype=np.int64)]
        while start < stop:
            epoch, offset = divmod(start, in_epoch)
            taken = min(stop - start, in_epoch - offset)
            parts.append(self._epoch(pool, generation, epoch, size, lengths)[offset : offset + taken])
            start += taken
        return np.concatenate(parts)

    def _epoch(self, pool: Pool, generation: int, epoch: int, size: int, lengths: Lengths) -> np.ndarray:
        """All numbers of an epoch in order. The latest epoch of each pool is cached."""
        key = (generation, epoch, len(lengths))
        if pool.name not in self._plans or self._plans[pool.name][0] != key:
            alone = pool.every is None and pool.name == next(iter(self.pools))
            words = (self.seed,) if alone else (self.seed, zlib.crc32(pool.name.encode()), generation)
            self._plans[pool.name] = key, np.concatenate(plan_epoch(lengths, size, words, epoch))
        return self._plans[pool.name][1]
