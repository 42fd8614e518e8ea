"""The change of a ratio, accepted per drafted, between requests that were judged and requests that came later, with one interval.

Requests differ in length and difficulty, so the request is the unit. Both rates are linearised: request n adds
(accepted_n - rate x drafted_n) / sum(drafted) to the error of its rate. Later requests may have labels, each compared with
the judged ones of its own; the rates are then weighted by what was drafted later, so that a different mix of labels
does not count as a change.

Shapes: N later requests, P judged ones, S labels; the first axis of two is (accepted, drafted).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from speculative.measure.intervals import Interval

FEWEST_REQUESTS = 8  # Fewer give no useful estimate of their spread.


@dataclass(frozen=True)
class RateChange:
    """rate, baseline: accepted per drafted, later and as judged at the later mix of labels. ci: interval of `change`, their difference."""

    rate: float
    baseline: float
    change: float
    ci: Interval


def rate_change(
    later_2N: np.ndarray,
    label_N: Sequence[int],
    judged_2P: np.ndarray,
    members_SP: np.ndarray,
    *,
    sums: bool = False,
    confidence: float = 0.95,
) -> RateChange:
    """The later requests' rate minus that of the judged ones; the interval includes the error of both.

    label_N: of each later request, as a row of ``members_SP``: which judged requests it is compared with. sums: a later record is the sum
    of many requests, as an engine's log line is. Raises ValueError: fewer than FEWEST_REQUESTS judged requests in all or for a label, or
    nothing drafted.
    """
    later_2N, judged_2P = np.asarray(later_2N, np.float64), np.asarray(judged_2P, np.float64)
    if members_SP.sum(1).min() < FEWEST_REQUESTS or (later_2N[1] <= 0).any() or (judged_2P[1] <= 0).any():
        raise ValueError(f"{FEWEST_REQUESTS} judged requests for each label, and drafted > 0 for every request")
    total, labels, count = later_2N[1].sum(), np.unique(label_N), later_2N.shape[1]
    off_N, error_P, baseline = np.zeros(count), np.zeros(judged_2P.shape[1]), 0.0
    for label in labels:
        own_N, own_P = np.asarray(label_N) == label, members_SP[label]
        weight, judged = later_2N[1, own_N].sum() / total, judged_2P[:, own_P].sum(1)
        off_N[own_N] = _off(later_2N[:, own_N], later_2N[:, own_N].sum(1))
        # A judged request may belong to several labels: its errors are added before they are squared.
        error_P[own_P] += weight * _off(judged_2P[:, own_P], judged) / judged[1]
        baseline += weight * judged[0] / judged[1]
    prompts, free = len(error_P), count - len(labels)
    variance = (error_P**2).sum() * prompts / (prompts - 1)
    if free >= FEWEST_REQUESTS:
        variance += (off_N**2).sum() / total**2 * count / free
    else:  # the judged requests' spread: within one request it grows with its length squared, of sums with their number
        power = 1 if sums else 2
        spread = (_off(judged_2P, judged_2P.sum(1)) ** 2).sum() / (judged_2P[1] ** power).sum()
        variance += spread * (later_2N[1] ** power).sum() / total**2
    rate, half = later_2N[0].sum() / total, special.ndtri((1 + confidence) / 2) * math.sqrt(variance)
    change = float(rate - baseline)
    return RateChange(float(rate), float(baseline), change, (change - float(half), change + float(half)))


def _off(counts_2N: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Deviation of each request from its group's rate, in accepted tokens."""
    return counts_2N[0] - sums[0] / sums[1] * counts_2N[1]
