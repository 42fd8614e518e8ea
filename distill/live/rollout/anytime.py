"""Anytime-valid intervals and evidence: two drafts are compared while requests arrive, and may be checked at any time.

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
test of this file simulates how often it is wrong. Requests must be independent. Those of one conversation are not, so callers
pass the sums of a conversation as one request.

Shapes: N requests; functions of `Sums` also take arrays of sums of one shape.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, special

# a number, or an array with one per moment or simulated arm
Numbers = Any
FEWEST_REQUESTS = 16  # with fewer, the spread of an arm is not reliable
POWER = 0.9  # probability of being certain after `requests_to_see`
SCALE = 0.05  # standard deviation of the expected differences; others are found too, a little later


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
    told_N = (denominators_N > 0).astype(np.float64)
    numerators_N = np.where(told_N, numerators_N, 0.0)
    add = np.cumsum if running else np.sum
    return Sums(
        add(told_N, axis=-1),
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


def boundary(variance: Numbers, level: float, scale: float = SCALE) -> Numbers:
    """Half the width of the interval for this variance. Raises ValueError for a level outside (0, 1)."""
    if not 0 < level < 1 or not scale > 0:
        raise ValueError(f"level {level}, scale {scale}")
    variance = np.asarray(variance, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = variance / scale**2  # 1 / (scale^2 I)
        half = np.sqrt(variance * (1 + ratio) * (np.log1p(1 / ratio) - 2 * np.log(level)))
    return np.where(np.isfinite(variance), half, np.inf)[()]


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
