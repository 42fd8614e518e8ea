"""Anytime-valid intervals and evidence: two drafts, or one draft before and after a moment, are compared while requests arrive.

An arm's acceptance is a ratio of sums over requests, accepted / drafted: requests differ in length and each has a difficulty
of its own, so the sampling unit is the request, not the token. With residuals r_n = accepted_n - rate x drafted_n the estimate's
variance is v = sum(r_n^2) / (sum drafted_n)^2 (the linearised ratio). The variance of a difference is the sum over both arms.
Estimates of one difference after more and more requests have Cov(estimate_1, estimate_2) = v_2: in information time I = 1 / v the
score S = estimate x I is a Brownian motion with drift `difference`, for any shares that do not depend on acceptance
(Scharfstein, Tsiatis and Robins 1997). Mixing its likelihood ratio over differences N(0, scale^2) gives the martingale

    (1 + scale^2 I)^(-1/2) exp(scale^2 (S - difference I)^2 / (2 (1 + scale^2 I)))

which reaches 1 / level at any time with probability at most `level` (Ville; Robbins 1970), so that

    |estimate - difference| < sqrt((I + 1 / scale^2) (log(1 + scale^2 I) - 2 log(level))) / I        at all times at once.

With estimated variances this is the asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas
(arXiv 2103.06476); of two samples it is the always-valid interval of Johari, Koomen, Pekelis and Walsh (arXiv 1512.04922). The
test of this file simulates how often it is wrong. Requests must be independent. Those of one conversation are not, so a rollout
passes the sums of a conversation as one request. A change of one draft is searched among all moments that are a multiple of STEP
requests, each with its share of the level (Bonferroni), and neighbouring requests may be correlated: as in a first-order
autoregression, the variance is (1 + r) / (1 - r) times that of independent ones.

Shapes: N requests; S moments; functions of `Sums` also take arrays of sums of one shape.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from scipy import optimize, special

# a number, or an array with one per moment or simulated arm
Numbers = Any
FEWEST_REQUESTS = 16  # with fewer, the spread of an arm is not reliable
POWER = 0.9  # probability of being certain after `requests_to_see`
SCALE = 0.05  # standard deviation of the expected differences; others are found too, a little later
HORIZON = 1000  # requests that the level of a change covers; it at most doubles in streams of any length
STEP = 16  # requests between two moments at which a change may begin
_MOST_CORRELATED = 0.9


@dataclass(frozen=True)
class Sums:
    """Sums over an arm's requests of (numerator, denominator) = (accepted, drafted), and of their squares and product."""

    requests: Numbers = 0
    numerator: Numbers = 0.0
    denominator: Numbers = 0.0
    numerator2: Numbers = 0.0
    product: Numbers = 0.0
    denominator2: Numbers = 0.0


@dataclass(frozen=True)
class Estimate:
    """A rate and the variance of its estimate; infinite with too few requests."""

    value: Numbers
    variance: Numbers


def sums_of(numerators_N: np.ndarray, denominators_N: np.ndarray | None = None, *, running: bool = False) -> Sums:
    """Sums of requests along the last axis; `running`: after each request (..., N). Denominators: 1 by default, which gives a mean.

    Requests without drafted tokens are not counted.
    """
    numerators_N = np.asarray(numerators_N, dtype=np.float64)
    denominators_N = np.ones_like(numerators_N) if denominators_N is None else np.asarray(denominators_N, np.float64)
    counts_N = (denominators_N > 0).astype(np.float64)
    numerators_N = np.where(counts_N, numerators_N, 0.0)
    add = np.cumsum if running else np.sum
    return Sums(
        add(counts_N, axis=-1),
        add(numerators_N, axis=-1),
        add(denominators_N, axis=-1),
        add(numerators_N**2, axis=-1),
        add(numerators_N * denominators_N, axis=-1),
        add(denominators_N**2, axis=-1),
    )


def estimate_of(sums: Sums, doubt: float | None = None) -> Estimate:
    """sum(numerator) / sum(denominator) and its variance.

    doubt: residual, in units of the rate, of one extra request: the spread of few requests is underestimated, and it is zero if all
    tokens were accepted. Default: the largest residual of a rate in [0, 1].
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.divide(sums.numerator, sums.denominator)
        squares = sums.numerator2 - 2 * value * sums.product + value**2 * sums.denominator2
        off = np.maximum(value, 1 - value) if doubt is None else doubt
        squares = np.maximum(squares, 0.0) + np.square(np.divide(off * sums.denominator, sums.requests))
        variance = squares / np.square(sums.denominator) * np.divide(sums.requests, np.subtract(sums.requests, 1.0))
    enough = np.asarray(sums.requests) >= FEWEST_REQUESTS
    return Estimate(np.where(enough, value, 0.0), np.where(enough, variance, np.inf))


def difference_of(new: Estimate, old: Estimate) -> Estimate:
    """new - old of two arms whose requests are independent."""
    return Estimate(new.value - old.value, new.variance + old.variance)


def anytime_interval(estimate: Estimate, level: float, scale: float = SCALE) -> tuple[Numbers, Numbers]:
    """(low, high) that hold the truth at all times at once with probability 1 - `level`, two-sided; infinite with too few requests. scale:
    standard deviation of the expected differences.
    """
    half = boundary(estimate.variance, level, scale)
    return estimate.value - half, estimate.value + half


def boundary(variance: Numbers, level: Numbers, scale: float = SCALE) -> Numbers:
    """Half the width of the interval for this variance. Raises ValueError for a level outside (0, 1)."""
    if not np.all((np.asarray(level) > 0) & (np.asarray(level) < 1)) or not scale > 0:
        raise ValueError(f"level {level}, scale {scale}")
    variance = np.asarray(variance, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = variance / scale**2  # 1 / (scale^2 I)
        half = np.sqrt(variance * (1 + ratio) * (np.log1p(1 / ratio) - 2 * np.log(level)))
    return np.where(np.isfinite(variance), half, np.inf)[()]


@dataclass(frozen=True)
class Change:
    """A change of a stream's rate. since: its first request, counted from 1. value, interval: the rate since then minus that before."""

    since: int
    rate: float
    before: float
    interval: tuple[float, float]


def change_at(accepted_N: np.ndarray, drafted_N: np.ndarray, starts_S: np.ndarray, level: Numbers) -> list[Change]:
    """The change at each moment, after that many requests, with its anytime-valid interval."""
    running = sums_of(accepted_N, drafted_N, running=True)
    first = Sums(*(getattr(running, name.name)[starts_S - 1] for name in fields(Sums)))
    rest = Sums(*(getattr(running, name.name)[-1] - getattr(first, name.name) for name in fields(Sums)))
    before, after = estimate_of(first), estimate_of(rest)
    change = difference_of(after, before)
    half_S = boundary(change.variance * _inflation(accepted_N, drafted_N, starts_S, before.value), level)
    low_S, high_S = change.value - half_S, change.value + half_S
    rows = zip(
        starts_S.tolist(), after.value.tolist(), before.value.tolist(), low_S.tolist(), high_S.tolist(), strict=True
    )
    return [Change(start + 1, rate, usual, (low, high)) for start, rate, usual, low, high in rows]


def certain_change(
    accepted_N: np.ndarray, drafted_N: np.ndarray, sign: int, level: float, burn_in: int, least: float = 0.0
) -> Change | None:
    """The most certain fall (``sign`` -1) or rise (1) of the rate that lasts until the last request; None without one.

    level: probability of any, at any length up to HORIZON requests. burn_in: requests before the first moment. least: a smaller measured
    change does not count.
    """
    starts_S = np.arange(burn_in, len(drafted_N) - FEWEST_REQUESTS + 1, STEP)
    if not len(starts_S):
        return None
    moments = HORIZON / STEP
    level_S = level / moments * np.minimum(1.0, (moments / np.arange(1, len(starts_S) + 1)) ** 2)
    changes = change_at(accepted_N, drafted_N, starts_S, 2 * level_S)  # one side of a two-sided interval
    certain = [
        one for one in changes if sign * (one.rate - one.before) >= least and min(sign * np.array(one.interval)) > 0
    ]
    # Far from zero in units of its half-width: the likeliest moment, but for the levels.
    return max(certain, key=lambda one: abs(sum(one.interval)) / (one.interval[1] - one.interval[0]), default=None)


def _inflation(accepted_N: np.ndarray, drafted_N: np.ndarray, starts_S: np.ndarray, rate_S: np.ndarray) -> np.ndarray:
    """Long-run variance over that of independent requests before each moment, from their lag-1 correlation without its
    bias -(1 + 3r) / count (Kendall 1954).
    """

    def products(lag: int) -> np.ndarray:
        first, second = (
            np.stack([accepted_N, drafted_N]).astype(np.float64)[:, place]
            for place in (slice(lag, None), slice(len(drafted_N) - lag))
        )
        mixed = first[0] * second[1] + first[1] * second[0]
        sums = np.cumsum([first[0] * second[0], mixed, first[1] * second[1]], axis=1)[:, starts_S - 1 - lag]
        return sums[0] - rate_S * sums[1] + rate_S**2 * sums[2]  # of the residuals accepted - rate x drafted

    raw_S = products(1) / np.maximum(products(0), 1e-9)
    near_S = np.clip(raw_S + (1 + 3 * raw_S) / starts_S, 0.0, _MOST_CORRELATED)
    return (1 + near_S) / (1 - near_S)


def requests_to_see(difference: float, spread: float, share: float, level: float) -> int:
    """Requests of both arms together after which a difference is certain with probability POWER; an earlier certainty is ignored. spread:
    standard deviation of a request's residual, in units of the rate (sqrt(variance x requests) of an arm). share: of the new arm.
    """

    def short(log_variance: float) -> float:
        variance = np.exp(log_variance)
        return float(boundary(variance, level) + special.ndtri(POWER) * np.sqrt(variance) - abs(difference))

    log_variance = optimize.brentq(short, np.log(1e-12), np.log(10.0))
    return int(np.ceil(spread**2 * (1 / share + 1 / (1 - share)) / np.exp(log_variance)))


def evidence_of_more(successes: Numbers, trials: Numbers, rate: float) -> Numbers:
    """Evidence (a test martingale) that trials succeed more often than `rate`, in (0, 1); it reaches 1 / level by chance with probability
    at most `level`. The likelihood ratio against `rate`, mixed uniformly over all higher rates. It is exact, also for zero successes.
    """
    failures = np.asarray(trials) - np.asarray(successes)
    beyond = special.betaincc(successes + 1.0, failures + 1.0, rate)
    log_tail = special.betaln(successes + 1.0, failures + 1.0) + np.log(np.maximum(beyond, 1e-300))
    log_null = successes * np.log(rate) + (failures + 1.0) * np.log1p(-rate)
    return np.exp(np.minimum(log_tail - log_null, 700.0))[()]
