"""How many tokens to propose: a fixed number, or the number that pays most by what was accepted and what it cost.

Shapes: R rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from speculative.errors import UserError


class GammaPolicy(Protocol):
    """Chooses gamma before each block and hears what came of it. `stop_below`: see `drafters.Ask`."""

    max_gamma: int
    stop_below: float

    def start(self, rows: int) -> None:
        """A decode call of this many rows begins."""

    def admit(self, row: int) -> None:
        """A new request sits in this row: nothing of the former one counts."""

    def choose(self, active_R: np.ndarray) -> int:
        """Drafted tokens of the next block, 0..max_gamma, for the whole batch."""

    def record(
        self, width: int, active_R: np.ndarray, drafted_R: np.ndarray, accepted_R: np.ndarray, seconds: float | None
    ) -> None:
        """A block that verified `width` drafted tokens (0 = plain) took so long; per row, what was drafted and kept.

        `seconds` is None for a block whose time says nothing (a model call was compiled in it).
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Compact to these rows, in this order."""


class FixedGamma:
    """The same gamma for every block."""

    def __init__(self, gamma: int, stop_below: float = 0.0):
        self.max_gamma = gamma
        self.stop_below = _checked_threshold(stop_below)

    def start(self, rows: int) -> None: ...

    def admit(self, row: int) -> None: ...

    def choose(self, active_R: np.ndarray) -> int:
        return self.max_gamma

    def record(
        self, width: int, active_R: np.ndarray, drafted_R: np.ndarray, accepted_R: np.ndarray, seconds: float | None
    ) -> None: ...

    def keep(self, rows: Sequence[int]) -> None: ...


class BlockSeconds:
    """Seconds of a block by its width, learnt while decoding: a running median per width, a line between them."""

    REMEMBERED = 9

    def __init__(self) -> None:
        self._seen: dict[int, list[float]] = {}

    def add(self, width: int, seconds: float) -> None:
        if width not in self._seen:
            self._seen[width] = []  # The first block of a width pays for its warm-up and is not counted.
            return
        self._seen[width] = [*self._seen[width], seconds][-self.REMEMBERED :]

    def known(self, width: int) -> bool:
        return bool(self._seen.get(width))

    def estimates(self, max_width: int) -> np.ndarray | None:
        """Seconds for widths 0..max_width; None until two widths were timed."""
        medians = {width: float(np.median(seen)) for width, seen in self._seen.items() if seen}
        if len(medians) < 2:
            return None
        widths = np.array(sorted(medians), dtype=np.float64)
        seconds = np.array([medians[int(width)] for width in widths])
        slope = max(0.0, float(np.polyfit(widths, seconds, 1)[0]))
        asked = np.arange(max_width + 1, dtype=np.float64)
        inside = np.interp(asked, widths, seconds)
        # Beyond what was timed: the line, from the nearest timed width.
        return inside + slope * np.maximum(asked - widths[-1], 0) - slope * np.maximum(widths[0] - asked, 0)


class AdaptiveGamma:
    """argmax over gamma of expected tokens per second, from each row's running acceptance and the measured block times.

    A row's chance that the next drafted token is accepted is a decayed mean of its own tested tokens and, as if they
    were its own too, some of all requests so far: a new request starts from those alone. Expected tokens of a block are 1 + a + ... + a^gamma summed over the rows; seconds are
    medians of the blocks of that width. Gamma 0 is plain decoding: chosen when nothing pays, not even with half a standard
    error more acceptance than was seen, and left for a short block after 16, 32, 64, ... plain ones to look again.

    Only tested tokens are counted (those up to the first rejection): a choice that looked at thrown-away drafts would
    bias sampled text. Under sampling the text still depends on the choices (a token drafted and accepted is drawn with
    other numbers than a plain one), so it is reproducible only with the same timings; its distribution never changes.
    """

    MEMORY = 0.95  # Weight of a row's past after each tested token: about twenty tokens.
    POOL_MEMORY = 0.995
    POOL_TOKENS = 10.0  # So many tokens of the mixture are those of all requests: one row's past is noise.
    PRIOR_TOKENS = 4.0  # Weight of `start_alpha` among all requests.
    FIRST_LOOK = 16
    LAST_LOOK = 256
    LOOK_BLOCKS = 1

    def __init__(self, max_gamma: int, stop_below: float = 0.0, start_alpha: float = 0.7):
        """`start_alpha`: the chance of acceptance assumed before anything was seen."""
        if max_gamma < 1:
            raise UserError(f"adaptive gamma needs room: the largest gamma is {max_gamma}, give at least 1")
        self.max_gamma = max_gamma
        self.stop_below = _checked_threshold(stop_below)
        self.block_seconds = BlockSeconds()
        self.chosen: dict[int, int] = {}
        self._pool = np.array([start_alpha * self.PRIOR_TOKENS, self.PRIOR_TOKENS])
        self._rows_R2 = np.zeros((0, 2))
        self._plain_blocks, self._look_after, self._looks_left = 0, self.FIRST_LOOK, 0
        self._last_width: int | None = None

    def start(self, rows: int) -> None:
        self._rows_R2 = np.zeros((rows, 2))
        for row in range(rows):
            self.admit(row)

    def admit(self, row: int) -> None:
        self._rows_R2[row] = 0.0

    def keep(self, rows: Sequence[int]) -> None:
        self._rows_R2 = self._rows_R2[list(rows)]

    def choose(self, active_R: np.ndarray) -> int:
        gamma = self._choice(active_R)
        if gamma == 0 and self._plain_blocks >= self._look_after:
            self._plain_blocks, self._look_after = 0, min(2 * self._look_after, self.LAST_LOOK)
            self._looks_left = self.LOOK_BLOCKS
        if gamma == 0 and self._looks_left > 0:
            gamma, self._looks_left = 1, self._looks_left - 1
        self.chosen[gamma] = self.chosen.get(gamma, 0) + 1
        return gamma

    def expected_tokens(self, active_R: np.ndarray, bonus: float = 0.0) -> np.ndarray:
        """Tokens of a block, all active rows together, for gamma 0..max_gamma; `bonus` is added to the acceptance."""
        mixed_R2 = self._rows_R2[active_R] + self._pool / self._pool[1] * self.POOL_TOKENS
        alphas_R = np.minimum(mixed_R2[:, 0] / mixed_R2[:, 1] + bonus, 1.0)
        return (alphas_R[:, None] ** np.arange(self.max_gamma + 1)).cumsum(1).sum(0)

    def _choice(self, active_R: np.ndarray) -> int:
        # Two widths have to be timed before anything can be compared, each twice: its first block is a warm-up.
        seconds = self.block_seconds.estimates(self.max_gamma)
        if seconds is None:
            # Two: a draft may stop early, so the width that was asked for need not be the one that was timed.
            drafted = any(self.block_seconds.known(width) for width in range(1, self.max_gamma + 1))
            return 0 if drafted else min(2, self.max_gamma)
        gamma = 1 + int(np.argmax((self.expected_tokens(active_R) / seconds)[1:]))
        # Plain decoding learns nothing, so it is left to those of whom enough is known.
        hopeful = self.expected_tokens(active_R, 0.5 / float(np.sqrt(self._pool[1]))) / seconds
        return gamma if hopeful[gamma] > hopeful[0] else 0

    def record(
        self, width: int, active_R: np.ndarray, drafted_R: np.ndarray, accepted_R: np.ndarray, seconds: float | None
    ) -> None:
        # The first draft behind plain decoding has text to catch up with: no block is like it.
        if seconds is not None and not (width > 0 and self._last_width == 0):
            self.block_seconds.add(width, seconds)
        self._last_width = width
        if width == 0:
            self._plain_blocks += 1
            return
        tested_R = np.minimum(accepted_R + 1, drafted_R) * active_R
        kept_R = np.minimum(accepted_R, drafted_R) * active_R
        self._rows_R2 *= (self.MEMORY**tested_R)[:, None]
        self._rows_R2 += np.stack((kept_R, tested_R), 1)
        self._pool = self._pool * self.POOL_MEMORY ** tested_R.sum() + np.array([kept_R.sum(), tested_R.sum()])
        if kept_R.any():
            self._look_after = self.FIRST_LOOK


def _checked_threshold(stop_below: float) -> float:
    if not 0.0 <= stop_below < 1.0:
        raise UserError(f"stop_below = {stop_below}: a probability of at least 0 (off) and under 1")
    return stop_below
