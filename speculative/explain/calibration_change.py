"""The change of a draft's calibration between two texts of the same rule, with an interval.

The expected calibration error is the mean distance between confidence and acceptance over bins of confidence (Naeini et al. 2015, AAAI).
Noise makes it larger, most with few prompts. Here the expected excess at the gap found in each bin is subtracted, |gap| being the absolute
value of a normal variable: about half of what noise adds. So the error can be below zero.

Shapes: P prompts, C bins, B resamples.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from speculative.explain.calibration import by_prompt
from speculative.explain.slices import SlicedText
from speculative.measure.intervals import Interval
from speculative.measure.record import Record
from speculative.measure.token_scores import TokenScores

_RESAMPLES = 1000

Scored = tuple[Sequence[SlicedText], Sequence[TokenScores]]


class CalibrationChange(Record):
    """now, judged: expected calibration error on the later and on the judged text, corrected for noise. ci: interval of `change`."""

    now: float
    judged: float
    change: float
    ci: Interval


def calibration_change(now: Scored, judged: Scored, rule: str, confidence: float = 0.95) -> CalibrationChange:
    """Compare the expected calibration error of two texts. The interval includes the error of both: bootstrap over prompts, Student's t.

    Raises ValueError for fewer than 2 prompts on a side, or sampled drafting when the scores lack `confidence_mass_TC`.
    """
    rng = np.random.default_rng(0)
    (later, later_variance, later_free), (old, old_variance, old_free) = (
        _error(*side, rule, rng) for side in (now, judged)
    )
    variance = max(later_variance + old_variance, 1e-12)
    # Welch and Satterthwaite.
    free = variance**2 / (later_variance**2 / later_free + old_variance**2 / old_free + 1e-24)
    half = float(special.stdtrit(free, (1 + confidence) / 2)) * math.sqrt(variance)
    return CalibrationChange(now=later, judged=old, change=later - old, ci=(later - old - half, later - old + half))


def _error(
    texts: Sequence[SlicedText], scores: Sequence[TokenScores], rule: str, rng: np.random.Generator
) -> tuple[float, float, int]:
    """(expected calibration error corrected for noise, its variance, degrees of freedom)."""
    drafted_PC, accepted_PC, means_C = by_prompt(texts, scores, rule)
    count = len(drafted_PC)
    if count < 2:
        raise ValueError(f"{count} prompts: at least 2 show their spread")
    gaps_PC = accepted_PC - drafted_PC * means_C
    off_PC = gaps_PC - drafted_PC * gaps_PC.sum(0) / np.maximum(drafted_PC.sum(0), 1e-12)
    spread_C = np.maximum(np.sqrt((off_PC**2).sum(0) * count / (count - 1)), 1e-12)

    def distance(gaps_BC: np.ndarray) -> np.ndarray:
        size_BC = np.abs(gaps_BC)
        z_BC = size_BC / spread_C
        folded_BC = spread_C * math.sqrt(2 / math.pi) * np.exp(-(z_BC**2) / 2) + size_BC * (1 - 2 * special.ndtr(-z_BC))
        return (2 * size_BC - folded_BC).sum(-1)

    weights_BP = rng.multinomial(count, np.full(count, 1 / count), size=_RESAMPLES)
    drawn_B = distance(weights_BP @ gaps_PC) / (weights_BP @ drafted_PC.sum(1))
    return float(distance(gaps_PC.sum(0)) / drafted_PC.sum()), float(drawn_B.var() * count / (count - 1)), count - 1
