"""Bootstrap intervals over prompts: tokens of one prompt are not independent, so whole prompts are resampled.

Shapes: P prompts, R resamples, C columns of sums, K numbers made of them.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np
from scipy import special

Interval = tuple[float, float]

# Minimum and maximum number of resamples, and resamples beyond each end, so that the end hardly depends on the seed.
RESAMPLES = 2000
BEYOND_EACH_END = 25
MOST_RESAMPLES = 100_000
# Of sums of a few thousand terms, relative: a smaller spread is rounding.
ROUNDING = 1e-12
# Entries (resamples x prompts) drawn at once.
DRAWN_AT_ONCE = 4_000_000
JOINT_DRAWS = 20_000  # from the law of several estimates: a tail of 5 % is known to a 30th of itself


def interval(ends: Sequence[float] | None, form: str = ".3f") -> str:
    """`[low, high]`, nothing for null."""
    return "" if ends is None else f"[{', '.join(format(end, form) for end in ends)}]"


def sum_by_prompt(prompt_keys: Sequence[Hashable], values_N: np.ndarray) -> np.ndarray:
    """Sums (P,) of the values of each prompt, prompts in order of first appearance."""
    index: dict[Hashable, int] = {}
    prompt_of_N = [index.setdefault(key, len(index)) for key in prompt_keys]
    return np.bincount(prompt_of_N, weights=np.asarray(values_N, dtype=np.float64), minlength=len(index))


def lower_share(pulls_RK: np.ndarray, error: float = 0.05) -> float:
    """Share of its usual tail error / 2 that the interval of each of K estimates may leave below its lower end, so that the interval of
    the largest of them misses its truth with probability `error`. pulls_RK: what R independent sources add to the error of each.

    The largest is too high more often than one estimate is, and hardly ever too low, so the lower end alone moves
    (Benjamini, Hechtlinger and Stark, arXiv 1906.00505). It is a max-t bound by the estimates' own correlations, not Bonferroni's.
    """
    count = pulls_RK.shape[1]
    if count == 1:
        return 1.0
    scale_K = np.sqrt((pulls_RK**2).sum(0))
    unit_RK = pulls_RK / np.where(scale_K > 0.0, scale_K, 1.0)
    values_K, axes_KK = np.linalg.eigh(unit_RK.T @ unit_RK)
    draws_DK = np.random.default_rng(0).standard_normal((JOINT_DRAWS, count))
    largest_D = (draws_DK * np.sqrt(np.maximum(values_K, 0.0)) @ axes_KK.T).max(1)
    too_low = float((largest_D < special.ndtri(error / 2.0)).mean())
    # The largest of several is hardly ever too low; a seventh of the error stays in reserve for spreads that are estimated.
    too_high = error - max(too_low, error / 7.0)
    return min(1.0, float(special.ndtr(-np.quantile(largest_D, 1.0 - too_high))) / (error / 2.0))


def expanded_tail(confidence: float, prompts: int) -> float:
    """Tail to leave at each end so that a bootstrap over few prompts has its nominal coverage: resampling n values underestimates the
    spread by sqrt((n - 1) / n), and an estimated spread requires Student's t (Hesterberg, arXiv 1411.5279). Without it, 30 prompts cover
    92-93 %, not 95 %.
    """
    end = special.stdtrit(prompts - 1, (1.0 - confidence) / 2.0) * np.sqrt(prompts / (prompts - 1))
    return float(special.ndtr(end))


def ratio_interval(
    numerators_P: np.ndarray, denominators_P: np.ndarray, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """`intervals_of_sums` of the one number sum(numerators) / sum(denominators), over the prompts that count."""
    denominators_P = np.asarray(denominators_P, dtype=np.float64)
    counts_P = denominators_P != 0.0
    numerators_P, denominators_P = np.asarray(numerators_P, dtype=np.float64)[counts_P], denominators_P[counts_P]
    if not counts_P.any():
        return math.nan, math.nan
    estimate = float(numerators_P.sum() / denominators_P.sum())
    if np.ptp(numerators_P - estimate * denominators_P) < ROUNDING:
        return estimate, estimate

    def ratio(sums_C: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return sums_C[..., :1] / sums_C[..., 1:]

    return intervals_of_sums(np.stack((numerators_P, denominators_P), 1), ratio, confidence, seed)[0]


def intervals_of_sums(
    sums_PC: np.ndarray,
    numbers_of: Callable[[np.ndarray], np.ndarray],
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int | None = None,
) -> list[Interval]:
    """Bootstrap intervals over prompts of K numbers that are made of C sums: one draw of prompts serves them all.

    numbers_of takes sums (..., C) to numbers (..., K). Bias-corrected and accelerated (Efron 1987), the ends widened for few prompts by
    `expanded_tail`; percentile if BCa is undefined; the number twice for a single prompt, or if leaving out any prompt does not change it.
    resamples: by default as many as the ends need, up to `MOST_RESAMPLES`.
    """
    sums_PC = np.asarray(sums_PC, dtype=np.float64)
    prompts = len(sums_PC)
    total_C = sums_PC.sum(0)
    numbers_K = numbers_of(total_C)
    if prompts < 2:
        return [(float(number), float(number)) for number in numbers_K]
    tail = expanded_tail(confidence, prompts)
    if resamples is None:
        resamples = int(min(max(RESAMPLES, BEYOND_EACH_END / max(tail, 1e-12)), MOST_RESAMPLES))
    else:
        tail = max(tail, 1.0 / resamples)
    left_out_PK = numbers_of(total_C - sums_PC)
    drawn_RK = np.concatenate([numbers_of(counts_RP @ sums_PC) for counts_RP in _resamples(prompts, resamples, seed)])
    intervals: list[Interval] = []
    for number, left_out_P, drawn_R in zip(numbers_K, left_out_PK.T, drawn_RK.T, strict=True):
        if np.ptp(left_out_P) < ROUNDING * max(1.0, abs(number)):
            intervals.append((float(number), float(number)))
            continue
        low, high = np.quantile(drawn_R, bca_levels(number, left_out_P, drawn_R, tail))
        intervals.append((float(low), float(high)))
    return intervals


def _resamples(prompts: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Counts of each prompt in the resamples, (R, P) at a time."""
    rng = np.random.default_rng(seed)
    while resamples > 0:
        rows = min(resamples, max(1, DRAWN_AT_ONCE // prompts))
        drawn_RP = rng.integers(0, prompts, (rows, prompts)) + prompts * np.arange(rows)[:, None]
        yield np.bincount(drawn_RP.ravel(), minlength=rows * prompts).reshape(rows, prompts).astype(np.float64)
        resamples -= rows


def bca_levels(number: float, left_out_P: np.ndarray, drawn_R: np.ndarray, tail: float) -> tuple[float, float]:
    """Quantiles of the resamples at the two ends; `tail` and 1 - `tail` without bias and skew. left_out_P: number without each."""
    # Draws of the very same prompts count half; in another order their sums differ by rounding.
    apart_R = np.where(np.abs(drawn_R - number) < ROUNDING * max(1.0, abs(number)), 0.0, drawn_R - number)
    below = float(((apart_R < 0.0).mean() + (apart_R <= 0.0).mean()) / 2.0)
    deviations_P = left_out_P.mean() - left_out_P
    if not 0.0 < below < 1.0:
        return tail, 1.0 - tail
    bias = float(special.ndtri(below))
    acceleration = float((deviations_P**3).sum() / (6.0 * (deviations_P**2).sum() ** 1.5))
    levels = []
    # Few prompts leave a tail so small that 1 - tail is 1: the upper end is looked up from the tail itself.
    for end in (float(special.ndtri(tail)), float(-special.ndtri(tail))):
        stretched = 1.0 - acceleration * (bias + end)
        if stretched <= 0.0:
            return tail, 1.0 - tail
        levels.append(float(special.ndtr(bias + (bias + end) / stretched)))
    return (levels[0], levels[1]) if np.isfinite(levels).all() else (tail, 1.0 - tail)
