"""What a draft is worth at every gamma, with an interval, from one pass over stored text.

Shapes: N responses, P prompts (the resampling unit), R resamples, C columns of sums, K numbers made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy import stats

from speculative.errors import UserError
from speculative.measure.metrics import RESAMPLES, expanded_tail, sum_by_prompt
from speculative.measure.replay import expected_blocks_of, survival_of
from speculative.measure.token_scores import TokenScores

CURVE_GAMMAS = range(33)
# Resamples that should lie beyond each end of an interval, so that the end itself hardly depends on the seed; at most.
BEYOND_EACH_END = 25
MOST_RESAMPLES = 100_000
# Of sums of a few thousand terms, relative: less is no spread.
ROUNDING = 1e-12
# Entries (resamples x prompts) drawn at once.
DRAWN_AT_ONCE = 4_000_000


def intervals_of_sums(
    sums_PC: np.ndarray, numbers_of: Callable[[np.ndarray], np.ndarray], confidence: float = 0.95, seed: int = 0
) -> list[list[float]]:
    """Bootstrap intervals over prompts of K numbers that are made of C sums: one draw of prompts serves them all.

    numbers_of takes sums (..., C) to numbers (..., K). A resample is a count of each prompt, so its sums are one matrix
    product. Bias-corrected and accelerated (Efron 1987), its ends widened for few prompts by `expanded_tail`;
    percentile where BCa is undefined; the number twice for a single prompt or where it is the same without any of them.
    """
    sums_PC = np.asarray(sums_PC, dtype=np.float64)
    prompts = len(sums_PC)
    total_C = sums_PC.sum(0)
    numbers_K = numbers_of(total_C)
    if prompts < 2:
        return [[float(number)] * 2 for number in numbers_K]
    tail = expanded_tail(confidence, prompts)
    left_out_PK = numbers_of(total_C - sums_PC)
    drawn_RK = np.concatenate([numbers_of(counts_RP @ sums_PC) for counts_RP in _resamples(prompts, tail, seed)])
    intervals = []
    for number, left_out_P, drawn_R in zip(numbers_K, left_out_PK.T, drawn_RK.T, strict=True):
        if np.ptp(left_out_P) < ROUNDING * max(1.0, abs(number)):
            intervals.append([float(number)] * 2)
            continue
        low, high = np.quantile(drawn_R, _bca_levels(number, left_out_P, drawn_R, tail))
        intervals.append([float(low), float(high)])
    return intervals


def _resamples(prompts: int, tail: float, seed: int) -> Iterator[np.ndarray]:
    """How often each prompt is drawn, (R, P) at a time."""
    rng = np.random.default_rng(seed)
    left = int(min(max(RESAMPLES, BEYOND_EACH_END / max(tail, 1e-12)), MOST_RESAMPLES))
    while left > 0:
        rows = min(left, max(1, DRAWN_AT_ONCE // prompts))
        drawn_RP = rng.integers(0, prompts, (rows, prompts)) + prompts * np.arange(rows)[:, None]
        yield np.bincount(drawn_RP.ravel(), minlength=rows * prompts).reshape(rows, prompts).astype(np.float64)
        left -= rows


def _bca_levels(number: float, left_out_P: np.ndarray, drawn_R: np.ndarray, tail: float) -> tuple[float, float]:
    """Which quantiles of the resamples are the two ends; `tail` and 1 - `tail` without bias and skew."""
    # Draws of the very same prompts count half; in another order their sums differ by rounding.
    apart_R = np.where(np.abs(drawn_R - number) < ROUNDING * max(1.0, abs(number)), 0.0, drawn_R - number)
    below = float(((apart_R < 0.0).mean() + (apart_R <= 0.0).mean()) / 2.0)
    deviations_P = left_out_P.mean() - left_out_P
    if not 0.0 < below < 1.0:
        return tail, 1.0 - tail
    bias = float(stats.norm.ppf(below))
    acceleration = float((deviations_P**3).sum() / (6.0 * (deviations_P**2).sum() ** 1.5))
    levels = []
    # Few prompts leave a tail so small that 1 - tail is 1: the upper end is looked up from the tail itself.
    for end in (float(stats.norm.ppf(tail)), float(stats.norm.isf(tail))):
        stretched = 1.0 - acceleration * (bias + end)
        if stretched <= 0.0:
            return tail, 1.0 - tail
        levels.append(float(stats.norm.cdf(bias + (bias + end) / stretched)))
    return (levels[0], levels[1]) if np.isfinite(levels).all() else (tail, 1.0 - tail)


def rule_curve(
    scores: Sequence[TokenScores],
    prompt_keys: Sequence[Hashable],
    rule: str,
    gammas: Iterable[int] = CURVE_GAMMAS,
    *,
    survival_gamma: int,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Alpha, tau at every gamma with intervals over prompts, and survival at one gamma, of text this rule may replay.

    {"rule", "alpha", "alpha_ci", "tokens", "prompts", "gammas", "tau", "tau_ci", "survival", "survival_gamma"}. All
    intervals come from the same resampled prompts. Raises UserError where there is no token to replay.
    """
    gammas = tuple(gammas)
    tokens = sum(len(text) for text in scores)
    if not tokens:
        raise UserError("there is no response token to replay: give held-out prompts with non-empty responses")
    blocks_NK = expected_blocks_of(scores, rule, gammas)
    columns = [
        np.array([len(text) for text in scores]),
        np.array([text.accept_probs(rule).sum() for text in scores]),
        *blocks_NK.T,
    ]
    sums_PC = np.stack([sum_by_prompt(prompt_keys, values_N) for values_N in columns], 1)

    def numbers_of(sums_C: np.ndarray) -> np.ndarray:
        alpha = sums_C[..., 1:2] / sums_C[..., :1]
        return np.concatenate((alpha, sums_C[..., :1] / sums_C[..., 2:]), -1)

    sums_PC = sums_PC[sums_PC[:, 0] > 0]
    alpha, *taus = numbers_of(sums_PC.sum(0)).tolist()
    alpha_ci, *tau_ci = intervals_of_sums(sums_PC, numbers_of, confidence)
    return {
        "rule": rule,
        "alpha": alpha,
        "alpha_ci": alpha_ci,
        "tokens": tokens,
        "prompts": len(sums_PC),
        "gammas": list(gammas),
        "tau": taus,
        "tau_ci": tau_ci,
        "survival": survival_of(scores, rule, survival_gamma),
        "survival_gamma": survival_gamma,
    }
