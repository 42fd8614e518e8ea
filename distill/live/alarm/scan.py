"""Has acceptance fallen? A sequential scan for a change point: a generalised likelihood ratio whose level before the change is unknown
(Siegmund and Venkatraman 1995), over the last few requests (Lai 1998).

In a request, `drafted` tokens were proposed and `accepted` kept. At each request, the rate of the last L requests is compared with that of all
before them, for each L of WINDOWS, so the baseline grows until the change and its error is part of the comparison. If nothing has changed, the
largest contrast crosses its threshold with the stated probability. Neighbouring requests may be correlated: the model is a first-order
autoregression, whose long-run variance is (1 + r) / (1 - r) times that of a request. Difficulty that varies more slowly than that causes
more alarms.

Shapes: P requests of the pool in their order, M of the stream in their order, the pool's first, B simulated streams.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from scipy import optimize, signal, special

from speculative.explain.rate_change import FEWEST_REQUESTS

HORIZON = 1000  # requests that the probability of a false alarm covers; doubled until the stream fits
WINDOWS = (16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512)  # latest requests that are compared with all before them
CELLS = 1 << 19  # entries (B, M) simulated at once: 2 MB per array
_EXCEEDING = 20  # simulated streams above the threshold; its level is then accurate to a fifth
FEWEST_STREAMS = 2000
_MOST_CORRELATED = 0.9
_NOTHING = 1e-9  # variance of residuals that differ only by rounding


@dataclass(frozen=True)
class Pool:
    """Baseline requests and the model of a request made from them.

    rate: accepted per drafted, each request weighted by its information (see `pool_of`). within, between: the variance of a
    request's accepted tokens is within x drafted + between x drafted^2. residuals_P: (accepted - rate x drafted) / spread. correlation: of
    the residuals of neighbours.
    """

    rate: float
    within: float
    between: float
    residuals_P: np.ndarray = field(repr=False)
    correlation: float = 0.0

    @property
    def inflation(self) -> float:
        """Long-run variance of the stream over that of independent requests."""
        return float(_inflation(np.asarray(self.correlation)))

    def spread(self, drafted_N: np.ndarray) -> np.ndarray:
        """Standard deviation (N,) of the accepted tokens of requests with ``drafted_N`` drafted tokens."""
        drafted_N = np.asarray(drafted_N, dtype=np.float64)
        return np.sqrt(self.within * drafted_N + self.between * drafted_N**2)


@dataclass(frozen=True)
class Crossing:
    """One crossing of the threshold; requests counted from 1.

    since: the most likely first request of the fall. at: the request that crossed. until: where the requests since then were again as
    likely at the rate before as at the fallen one (`_recovery`); None if they have not been.
    """

    since: int
    at: int
    until: int | None


def block_variance_per_token(rate: float, gamma: int) -> float:
    """Variance of a block's accepted tokens over gamma, if each is accepted with the same chance until the first rejection.

    P(A >= j) = a^j, with a such that E[A] = gamma x rate. It is larger than binomial, because a rejection also loses the tokens after it.
    """
    if not 0.0 < rate < 1.0:
        return 0.0
    places = np.arange(1, gamma + 1)
    chance = optimize.brentq(lambda chance: float((chance**places).sum()) - gamma * rate, 0.0, 1.0)
    survival = chance**places
    return float(((2 * places - 1) * survival).sum() - survival.sum() ** 2) / gamma


def _inflation(correlation: np.ndarray) -> np.ndarray:
    return (1 + correlation) / (1 - correlation)


def correlation_of(residuals_P: np.ndarray) -> float:
    """Lag-1 correlation, without the estimate's bias."""
    centred_P = residuals_P - residuals_P.mean()
    found = (centred_P[1:] * centred_P[:-1]).sum() / max((centred_P**2).sum(), _NOTHING)
    return float(_unbiased(found, len(residuals_P)))


def _unbiased(found: np.ndarray, count: np.ndarray | int) -> np.ndarray:
    """A lag-1 correlation of `count` values without its bias -(1 + 3r) / count (Kendall 1954), from 0 to _MOST_CORRELATED."""
    return np.clip(found + (1 + 3 * found) / count, 0.0, _MOST_CORRELATED)


def pool_of(accepted_P: np.ndarray, drafted_P: np.ndarray, gamma: float) -> Pool:
    """The pool of baseline requests that drafted about `gamma` tokens a block.

    Within a request the variance is that of its blocks (`block_variance_per_token`). The rest, between requests, is their difficulty; it
    grows with drafted^2 and is estimated by the method of moments. Raises ValueError for fewer than FEWEST_REQUESTS requests, one without
    drafted tokens, or accepted beyond drafted.
    """
    accepted_P, drafted_P = np.asarray(accepted_P, dtype=np.float64), np.asarray(drafted_P, dtype=np.float64)
    if len(accepted_P) != len(drafted_P) or len(accepted_P) < FEWEST_REQUESTS:
        raise ValueError(f"{len(accepted_P)} and {len(drafted_P)} requests: a pool has {FEWEST_REQUESTS} or more")
    if (drafted_P <= 0).any() or (accepted_P < 0).any() or (accepted_P > drafted_P).any():
        raise ValueError("0 <= accepted <= drafted and drafted > 0 for every request")
    count = len(accepted_P)
    squares_P = (accepted_P - accepted_P.sum() / drafted_P.sum() * drafted_P) ** 2 * count / (count - 1)
    own = block_variance_per_token(float(accepted_P.sum() / drafted_P.sum()), max(1, round(gamma)))
    within = min(squares_P.sum() / drafted_P.sum(), own)
    between = max(0.0, (squares_P - within * drafted_P).sum() / (drafted_P**2).sum())
    # If all requests are alike, assume half a token, which also keeps the arithmetic finite.
    within = max(within, 0.25 / drafted_P.mean())
    weights_P = drafted_P / (within * drafted_P + between * drafted_P**2)
    rate = float((weights_P * accepted_P).sum() / (weights_P * drafted_P).sum())
    residuals_P = (accepted_P - rate * drafted_P) / np.sqrt(within * drafted_P + between * drafted_P**2)
    return Pool(rate, within, between, residuals_P, correlation_of(residuals_P))


def cusum_path(increments_N: np.ndarray) -> np.ndarray:
    """S_n = max(0, S_{n-1} + x_n) with S_0 = 0, along the last axis: the sum minus its lowest value so far (Page 1954)."""
    sums_N = np.cumsum(increments_N, axis=-1)
    return sums_N - np.minimum(np.minimum.accumulate(sums_N, axis=-1), 0.0)


class Stream:
    """Sums of a stream up to each request, from which the contrast of any two parts follows.

    Args:
        scores_BM: (accepted - rate x drafted) / spread of each request, at any rate and in any unit of the spread.
        information_M: drafted / spread, the weight of a request's score in its rate.
        burn_in: the fewest requests of a part before a change.
    """

    def __init__(self, scores_BM: np.ndarray, information_M: np.ndarray, burn_in: int) -> None:
        kind, squares_M = scores_BM.dtype, information_M**2
        moved_BM = scores_BM * information_M.astype(kind)
        self.burn_in, self.length = burn_in, len(information_M)
        self.weight, self.sums = _sums(squares_M), _sums(moved_BM)
        self.means = self.sums[:, burn_in:] / self.weight[burn_in:].astype(kind)
        self.scales = self._scales(moved_BM, squares_M)

    def _scales(self, moved_BM: np.ndarray, squares_M: np.ndarray) -> np.ndarray:
        """Long-run variance (B, heads) of the weighted sum of the first requests, per weight, for each number of them."""
        kind, first = moved_BM.dtype, self.burn_in
        counts = np.arange(first, self.length + 1, dtype=kind)
        weights_M = squares_M.astype(kind)
        own = _sums(moved_BM**2)[:, first:] + self.means * (
            self.means * _sums(weights_M**2)[first:] - 2 * _sums(moved_BM * weights_M)[:, first:]
        )
        crossed_BM = moved_BM[:, 1:] * weights_M[:-1] + moved_BM[:, :-1] * weights_M[1:]
        both = _sums(moved_BM[:, 1:] * moved_BM[:, :-1])[:, first - 1 :] + self.means * (
            self.means * _sums(weights_M[1:] * weights_M[:-1])[first - 1 :] - _sums(crossed_BM)[:, first - 1 :]
        )
        correlation = _unbiased(both / np.maximum(own, _NOTHING), counts)
        scales = own * (counts / (counts - 1) / self.weight[first:].astype(kind)) * _inflation(correlation)
        # If all requests are alike, the spread that the pool assumes.
        return np.where(scales > _NOTHING, scales, 1).astype(kind, copy=False)

    def contrast(self, head: slice, end: slice) -> np.ndarray:
        """How far the requests from `head` to `end` fall below the first `head`, in standard deviations, (B, number of heads)."""
        kind, own = self.sums.dtype, slice(head.start - self.burn_in, head.stop - self.burn_in)
        rest = self.weight[end] - self.weight[head]
        below = self.means[:, own] - (self.sums[:, end] - self.sums[:, head]) / rest.astype(kind)
        return below / np.sqrt(self.scales[:, own] * (1 / self.weight[head] + 1 / rest).astype(kind))

    def largest(self) -> np.ndarray:
        """The largest contrast over WINDOWS (B, M + 1) after each number of requests; -inf before there is one."""
        found = np.full((len(self.sums), self.length + 1), -np.inf, dtype=self.sums.dtype)
        for window in WINDOWS:
            if self.burn_in + window <= self.length:
                end = slice(self.burn_in + window, self.length + 1)
                told = self.contrast(slice(self.burn_in, self.length + 1 - window), end)
                np.maximum(found[:, end], told, out=found[:, end])
        return found


def _sums(values: np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, ... values along the last axis."""
    found = np.zeros((*values.shape[:-1], values.shape[-1] + 1), dtype=values.dtype)
    np.cumsum(values, axis=-1, out=found[..., 1:])
    return found


def threshold_for(pool: Pool, drafted_M: np.ndarray, level: float, seed: int = 0) -> float:
    """The height that an unchanged stream crosses with probability `level` in HORIZON requests behind the pool's, or twice, four times ...
    as many if it is longer, so that a look at a growing stream does not change the threshold until its length doubles.

    Streams are simulated with the pool's residuals, resampled and filtered to its correlation, taken a standard error higher because it is
    an estimate. They are scanned as the real one is, so the errors of rate, spread and correlation at each length are part of it. Raises
    ValueError for a level outside (0, 1) or no request behind the pool's.
    """
    count = len(pool.residuals_P)
    if not 0 < level < 1 or len(drafted_M) <= count:
        raise ValueError(f"level {level}, {len(drafted_M)} requests and a pool of {count}")
    length = HORIZON << max(0, math.ceil(math.log2((len(drafted_M) - count) / HORIZON)))
    drafted_M = np.concatenate([drafted_M[:count], np.resize(drafted_M[count:], length)])
    information_M = drafted_M / pool.spread(drafted_M)
    drawn_P = pool.residuals_P - pool.residuals_P.mean()
    if drawn_P.var() < _NOTHING:  # nothing to resample
        drawn_P = special.ndtri((np.arange(count) + 0.5) / count)
    drawn_P = (drawn_P / drawn_P.std()).astype(np.float32)
    correlation = min(_MOST_CORRELATED, pool.correlation + math.sqrt((1 - pool.correlation**2) / count))
    streams, highest, rng = max(FEWEST_STREAMS, math.ceil(_EXCEEDING / level)), [], np.random.default_rng(seed)
    rows = max(1, CELLS // len(drafted_M))
    for start in range(0, streams, rows):
        scores_BM = drawn_P[rng.integers(count, size=(min(rows, streams - start), len(drafted_M)), dtype=np.uint32)]
        scores_BM[:, 1:] *= math.sqrt(1 - correlation**2)
        one = np.ones(1, np.float32)
        scores_BM = signal.lfilter(one, np.array([1.0, -correlation], np.float32), scores_BM, axis=1)
        highest.append(Stream(scores_BM, information_M, count).largest().max(1))
    # With B values exchangeable with the real one, P(it exceeds the k-th of them) <= level.
    return float(np.sort(np.concatenate(highest))[min(streams, math.ceil((streams + 1) * (1 - level))) - 1])


def watch(
    pool: Pool, accepted_M: np.ndarray, drafted_M: np.ndarray, level: float, least: float, seed: int = 0
) -> list[Crossing]:
    """The alarms of a stream that begins with the pool's requests, at a `level` of any false alarm. least: a smaller measured fall of the
    rate does not ring. Requests of a fall that is over do not join the baseline of the next. Raises ValueError as `threshold_for`.
    """
    threshold, drafted_M = threshold_for(pool, drafted_M, level, seed), np.asarray(drafted_M, dtype=np.float64)
    spread_M, left_M, alarms = pool.spread(drafted_M), np.arange(len(drafted_M)), list[Crossing]()
    scores_M, information_M = (accepted_M - pool.rate * drafted_M) / spread_M, drafted_M / spread_M
    while True:
        stream = Stream(scores_M[None, left_M], information_M[left_M], len(pool.residuals_P))
        for end in np.flatnonzero(stream.largest()[0] > threshold).tolist():
            heads = slice(max(stream.burn_in, end - 2 * WINDOWS[-1]), end)  # a change need not begin a window
            head = heads.start + int(stream.contrast(heads, slice(end, end + 1))[0].argmax())
            before = float(stream.means[0, head - stream.burn_in])
            after = float((stream.sums[0, end] - stream.sums[0, head]) / (stream.weight[end] - stream.weight[head]))
            if before - after >= least:
                break
        else:
            return alarms
        until = _recovery(scores_M[left_M], information_M[left_M], head, end, (before + after) / 2)
        alarms.append(Crossing(int(left_M[head]) + 1, int(left_M[end - 1]) + 1, until and int(left_M[until - 1]) + 1))
        if until is None:
            return alarms
        left_M = np.delete(left_M, slice(head, until))


def _recovery(scores_M: np.ndarray, information_M: np.ndarray, head: int, end: int, middle: float) -> int | None:
    """The number of requests after `end` at which Page's sum of the shortfall below the `middle` rate, from `head` on, is back at zero."""
    path = cusum_path((information_M * (middle * information_M - scores_M))[head:])
    zeros = np.flatnonzero(path[end - head :] == 0)
    return int(zeros[0]) + end + 1 if len(zeros) else None
