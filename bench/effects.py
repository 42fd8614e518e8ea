"""Tests whether one way of training a draft beats another, with variation over prompts and seeds and many comparisons.

Shapes: P prompts, S seeds, H hypotheses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Effect:
    """A gain with its 95 % interval and two-sided p-value."""

    gain: float
    low: float
    high: float
    p_value: float


def seed_effect(gains_S: Sequence[float], prompt_error: float, prompts: int) -> Effect:
    """The mean of the paired gains of drafts trained with S seeds and judged on P prompts.

    The variance is that over prompts, prompt_error^2 at the seeds that were trained, and that over seeds, s^2 / S; degrees of freedom
    after Welch and Satterthwaite. s^2 includes a part of the prompts' noise, which makes the interval conservative. With one seed: prompts alone.
    """
    seeds, gain = len(gains_S), float(np.mean(gains_S))
    seed_variance = float(np.var(gains_S, ddof=1)) / seeds if seeds > 1 else 0.0
    variance = prompt_error**2 + seed_variance
    if variance == 0.0:
        return Effect(gain, gain, gain, 0.0 if gain else 1.0)
    freedom = variance**2 / (prompt_error**4 / (prompts - 1) + seed_variance**2 / max(seeds - 1, 1))
    half = float(stats.t.ppf(0.975, freedom)) * variance**0.5
    p_value = float(2.0 * stats.t.sf(abs(gain) / variance**0.5, freedom))
    return Effect(gain, gain - half, gain + half, p_value)


def holm(p_values_H: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979): rejecting those below 0.05 keeps the probability of any false rejection below 0.05."""
    order = np.argsort(p_values_H, kind="stable")
    steps = np.asarray(p_values_H, np.float64)[order] * (len(order) - np.arange(len(order)))
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted.tolist()
