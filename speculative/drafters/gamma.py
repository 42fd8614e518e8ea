"""Policies for gamma: a fixed number of tokens, or the number with the most expected tokens per second.

Shapes: R rows of the batch.
"""

import math
import statistics
import sys
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from speculative.errors import UserError


class GammaPolicy(Protocol):
    """Chooses gamma before a block and gets the outcome after it. `holds`: blocks that the last choice may
    be used for, if compiled code can run them without asking; no longer than the rows are the same.
    """

    max_gamma: int
    holds: int = 1

    def start(self, rows: int) -> None:
        """A decode call of this many rows begins."""
        return

    def admit(self, row: int) -> None:
        """A new request is in this row: forget the former one."""
        return

    def choose(self, active_R: np.ndarray) -> int:
        """Drafted tokens of the next block, 0..max_gamma, for the whole batch."""

    def record(
        self, width: int, active_R: np.ndarray, drafted_R: np.ndarray, accepted_R: np.ndarray, seconds: float | None
    ) -> None:
        """Record a block that verified `width` drafted tokens (0 = plain): its time (None if a model call was compiled in it), and drafted
        and accepted tokens per row.
        """
        return

    def keep(self, rows: Sequence[int]) -> None:
        """Compact to these rows, in this order."""
        return


class FixedGamma(GammaPolicy):
    """The same gamma for every block."""

    def __init__(self, gamma: int):
        self.max_gamma = gamma

    def choose(self, active_R: np.ndarray) -> int:
        self.holds = sys.maxsize if type(self) is FixedGamma else 1
        return self.max_gamma


class BlockSeconds:
    """Seconds of a block by its width, measured while decoding: a running median per width, linear in between."""

    REMEMBERED = 5  # Few, so that a slow period of the machine is soon forgotten.

    def __init__(self) -> None:
        self._seen: dict[int, list[float]] = {}
        self._estimates: np.ndarray | None = None
        self._added = 0

    def add(self, width: int, seconds: float) -> None:
        if width not in self._seen:
            self._seen[width] = []  # The first block of a width includes warm-up and is not counted.
            return
        self._seen[width] = [*self._seen[width], seconds][-self.REMEMBERED :]
        self._added += 1
        # Medians change slowly, and updating them at every block is too expensive for a small model.
        if len(self._seen[width]) <= 3 or self._added % 8 == 0:
            self._estimates = None

    def known(self, width: int) -> bool:
        return bool(self._seen.get(width))

    def estimates(self, max_width: int) -> np.ndarray | None:
        """Seconds for widths 0..max_width; None until two widths were timed."""
        if self._estimates is None or len(self._estimates) <= max_width:
            medians = sorted((width, statistics.median(seen)) for width, seen in self._seen.items() if seen)
            if len(medians) < 2:
                return None
            widths, seconds = zip(*medians, strict=True)
            slope = max(0.0, (seconds[-1] - seconds[0]) / (widths[-1] - widths[0]))
            asked = np.arange(max_width + 1, dtype=np.float64)
            # Outside the timed widths: linear, from the nearest timed width.
            outside = np.maximum(asked - widths[-1], 0) - np.maximum(widths[0] - asked, 0)
            self._estimates = np.interp(asked, widths, seconds) + slope * outside
        return self._estimates[: max_width + 1]


class AdaptiveGamma(GammaPolicy):
    """argmax over gamma of expected tokens per second, from running acceptance and the measured block times.

    Expected tokens of a block are 1 + a_1 + a_1 a_2 + ... summed over the rows. a_j, the acceptance of the j-th drafted token given the
    earlier ones, is counted over all requests: it rises with j, because texts have easy stretches. a_1 is each row's own running rate,
    which starts at that of all.

    Seconds are medians of the blocks of that width at the present load (active rows, rounded up to a power of two): more tokens per row
    are nearly free in a small batch and cost their own time in a full one. A new load is timed in about five blocks.

    Gamma 0, plain decoding, is chosen if no gamma pays even with half a standard error more acceptance than observed. After 16, 32, 64,
    ... plain blocks one short block is drafted to check again (after 16 if the last check was better than expected); plain decoding is
    timed again in the same way while drafting pays only a little.

    Only tested tokens count (those up to the first rejection). Widths and seconds depend on discarded tokens too, so the text keeps its
    distribution only because no block uses their random numbers again (`sampling.block_uniforms`). A block of another gamma uses others, so
    sampled text is reproducible only with the same timings.
    """

    MEMORY = 0.9  # Weight of a row's past after each block: about ten blocks.
    POOL_MEMORY = 0.997
    POOL_BLOCKS = 5.0  # Weight, in blocks, of all requests in a row's rate: the past of one row is noisy.
    START_ALPHA = 0.7  # Acceptance assumed at the start.
    PRIOR_TOKENS = 4.0  # Its weight at the first position; at later ones, the weight of the position before.
    FIRST_LOOK = 16
    LAST_LOOK = 256
    LAST_TIMING = 64
    CLEAR_GAIN = 1.5  # Larger than any timing error of a plain block.
    HOLDS = 4  # Blocks of a choice to draft; once plain decoding is timed, it holds until acceptance is checked again.

    def __init__(self, max_gamma: int):
        if max_gamma < 1:
            raise UserError(f"adaptive gamma with max_gamma = {max_gamma}: must be at least 1")
        self.max_gamma = max_gamma
        self._block_seconds: dict[int, BlockSeconds] = {}  # by load
        self.chosen: dict[int, int] = {}
        self._kept_G, self._tested_G = np.zeros(max_gamma), np.zeros(max_gamma)
        self._rows_R2 = np.zeros((0, 2))
        self._plain_blocks, self._look_after = 0, self.FIRST_LOOK
        self._drafted_blocks, self._time_after, self._small_gain = 0, self.FIRST_LOOK, False
        self._last_chosen = -1
        self._catches_up = False
        self._settled = False  # Plain decoding was chosen and there is no new information.
        self._looks = False  # The last block was drafted only to check acceptance again.
        self._load = 0

    def start(self, rows: int) -> None:
        self._rows_R2 = np.zeros((rows, 2))
        self._settled = False

    def admit(self, row: int) -> None:
        self._rows_R2[row] = 0.0
        self._settled = False

    def keep(self, rows: Sequence[int]) -> None:
        self._rows_R2 = self._rows_R2[list(rows)]

    def choose(self, active_R: np.ndarray) -> int:
        load = _load_of(active_R)
        if self._load != load:
            self._load, self._settled = load, False
        gamma = 0 if self._settled else self._choice(active_R)
        self._settled = gamma == 0 and self._timed(active_R).known(0)
        self._looks = gamma == 0 and self._plain_blocks >= self._look_after
        if gamma > 0:
            self._look_after = self.FIRST_LOOK
        if self._looks:
            gamma, self._plain_blocks, self._look_after = 1, 0, min(2 * self._look_after, self.LAST_LOOK)
        elif gamma > 0 and self._small_gain and self._drafted_blocks >= self._time_after:
            gamma, self._time_after = 0, min(2 * self._time_after, self.LAST_TIMING)
        self._catches_up = gamma > 0 and self._last_chosen == 0
        self._last_chosen, self.holds = gamma, 1
        if self._settled and gamma == 0:
            self.holds = self._look_after - self._plain_blocks
        elif gamma > 0 and not self._looks and self._timed(active_R).estimates(self.max_gamma) is not None:
            self.holds = self.HOLDS
        return gamma

    def expected_tokens(self, active_R: np.ndarray, bonus: float = 0.0) -> np.ndarray:
        """Tokens of a block, all active rows together, for gamma 0..max_gamma; `bonus` is added to the acceptance."""
        rates_G = self._rates()
        own_R2 = self._rows_R2[active_R]
        first_R = (own_R2[:, 0] + rates_G[0] * self.POOL_BLOCKS) / (own_R2[:, 1] + self.POOL_BLOCKS)
        firsts = float(np.minimum(first_R + bonus, 1.0).sum())
        further_G = np.minimum(rates_G[1:] + bonus, 1.0).cumprod()
        return len(first_R) + np.concatenate(([0.0, firsts], firsts * (1.0 + further_G.cumsum())))

    def _rates(self) -> np.ndarray:
        """Acceptance by position, given the earlier positions; with few counts, close to that of the position before."""
        rates, before = [], self.START_ALPHA
        for kept, tested in zip(self._kept_G.tolist(), self._tested_G.tolist(), strict=True):
            before = (kept + before * self.PRIOR_TOKENS) / (tested + self.PRIOR_TOKENS)
            rates.append(before)
        return np.array(rates)

    def _timed(self, active_R: np.ndarray) -> BlockSeconds:
        return self._block_seconds.setdefault(_load_of(active_R), BlockSeconds())

    def _choice(self, active_R: np.ndarray) -> int:
        timed = self._timed(active_R)
        seconds = timed.estimates(self.max_gamma)
        if seconds is None:
            # A draft may stop early, so the requested width need not be the timed one.
            drafted = any(timed.known(width) for width in range(1, self.max_gamma + 1))
            return 0 if drafted else min(3, self.max_gamma)
        gamma = 1 + int(np.argmax((self.expected_tokens(active_R) / seconds)[1:]))
        # Plain decoding gives no information about acceptance, so it needs enough evidence.
        hopeful = self.expected_tokens(active_R, 0.5 / math.sqrt(self._tested_G.sum() + 1.0)) / seconds
        self._small_gain = hopeful[gamma] < self.CLEAR_GAIN * hopeful[0]
        return gamma if hopeful[gamma] > hopeful[0] else 0

    def record(
        self, width: int, active_R: np.ndarray, drafted_R: np.ndarray, accepted_R: np.ndarray, seconds: float | None
    ) -> None:
        self.chosen[self._last_chosen] = self.chosen.get(self._last_chosen, 0) + 1
        # The first draft after plain decoding has to catch up with the text, so its time is not typical.
        if seconds is not None and not self._catches_up:
            self._timed(active_R).add(width, seconds)
        self._catches_up = False
        if width == 0:
            self._plain_blocks, self._drafted_blocks = self._plain_blocks + 1, 0
            return
        self._drafted_blocks += 1
        self._settled = False
        kept_R, drafted_R = accepted_R[active_R], drafted_R[active_R]
        kept_R = np.minimum(kept_R, drafted_R)
        tested_R = np.minimum(kept_R + 1, drafted_R)
        if self._looks and self._better_than_known(kept_R[tested_R > 0] > 0):
            self._look_after = self.FIRST_LOOK
        places_G = np.arange(self.max_gamma)
        decay = self.POOL_MEMORY ** int(tested_R.sum())
        self._kept_G = decay * self._kept_G + (places_G < kept_R[:, None]).sum(0)
        self._tested_G = decay * self._tested_G + (places_G < tested_R[:, None]).sum(0)
        tried_R = tested_R > 0
        self._rows_R2[active_R] = self._rows_R2[active_R] * np.where(tried_R, self.MEMORY, 1.0)[:, None] + np.stack(
            (kept_R > 0, tried_R), 1
        )

    def _better_than_known(self, first_kept_R: np.ndarray) -> bool:
        """Whether a check found half a standard deviation more acceptance than known: then check again soon."""
        rate, looks = float(self._rates()[0]), len(first_kept_R)
        return looks > 0 and bool(first_kept_R.mean() >= rate + 0.5 * math.sqrt(rate * (1.0 - rate) / looks))


def _load_of(active_R: np.ndarray) -> int:
    """1, 2, 4, 8, ...: because a decoder drops empty rows when half are empty."""
    return 1 << max(int(active_R.sum()) - 1, 0).bit_length()
