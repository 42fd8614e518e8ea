"""Has acceptance fallen? A sequential test (CUSUM, Page 1954) of a stream of requests against the baseline requests before them.

In a request, `drafted` tokens were proposed and `accepted` kept. The shortfall against the baseline, minus an allowance, is summed
and kept at zero or above. If nothing has changed, the sum crosses its threshold with the stated probability. Neighbouring requests may be
correlated: the model is a first-order autoregression, whose long-run variance is (1 + r) / (1 - r) times that of a request. Difficulty that
varies more slowly than that causes more alarms.

Shapes: P requests of the pool in their order, N of the stream in their order, B simulated pools and streams.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import optimize, signal

from speculative.explain.rate_change import FEWEST_REQUESTS

HORIZON = 1000  # requests that the probability of a false alarm covers; doubled until the stream fits
CELLS = 1 << 21  # entries (B, N) simulated at once: 16 MB per array
_EXCEEDING = 20  # simulated streams above the threshold; its level is then accurate to a fifth
FEWEST_STREAMS = 2000
_TRIAL_STREAMS = 400
_MOST_CORRELATED = 0.9
LARGE = 3.0  # drops of the second chart, in drops of the first
# The charts share half of the level: simulated streams with correlated rates alarmed twice as often as stated (docs/traffic.md).
CAUTION = 2.0
_NOTHING = 1e-9  # variance of residuals that differ only by rounding

_ALLOWANCES = (0.5, 0.6, 0.7, 0.8)  # shares of the drop
_TRIAL_LEVEL = 0.02  # rarer alarms would be too few among _TRIAL_STREAMS


@dataclass(frozen=True)
class Pool:
    """Baseline requests and the model of a request made from them.

    rate: accepted per drafted, each request weighted by its information (see `pool_of`). within, between: the variance of a
    request's accepted tokens is within x drafted + between x drafted^2. information_P: drafted / spread, so that a drop by
    x moves a request by x times its information, in standard deviations. residuals_P: (accepted - rate x drafted) / spread.
    correlation: of the residuals of neighbours.
    """

    rate: float
    within: float
    between: float
    information_P: np.ndarray = field(repr=False)
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
class Chart:
    """A test before it sees a stream. drop: the fall that it is tuned to; allowance: the fall that it ignores, Page's reference value;
    threshold: the sum that raises an alarm; level: the probability of any false alarm.
    """

    drop: float
    allowance: float
    threshold: float
    level: float


@dataclass(frozen=True)
class Crossing:
    """One crossing of the threshold; requests counted from 1.

    since: the first request after the last zero of the sum, the usual estimate of when the change began. at: the request
    that crossed. until: where the sum returned to zero; None if it has not.
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


def correlation_of(residuals_BP: np.ndarray) -> np.ndarray:
    """Lag-1 correlation along the last axis, without the estimate's bias -(1 + 3r)/P (Kendall 1954), from 0 to _MOST_CORRELATED."""
    centred_BP = residuals_BP - residuals_BP.mean(-1, keepdims=True)
    found = (centred_BP[..., 1:] * centred_BP[..., :-1]).sum(-1) / np.maximum((centred_BP**2).sum(-1), _NOTHING)
    return np.clip(found + (1 + 3 * found) / residuals_BP.shape[-1], 0.0, _MOST_CORRELATED)


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
    spread_P = np.sqrt(within * drafted_P + between * drafted_P**2)
    residuals_P = (accepted_P - rate * drafted_P) / spread_P
    # Weighted as the sum weights them, so that it holds for the sum even where the model of the spread is wrong at some lengths.
    weights_P = (drafted_P / spread_P) ** 2
    scale = float((weights_P * residuals_P**2).sum() / weights_P.sum() * count / (count - 1))
    scale = scale if scale > _NOTHING else 1.0
    root = math.sqrt(scale)
    information_P = drafted_P / (spread_P * root)
    correlation = float(correlation_of(residuals_P))
    return Pool(rate, within * scale, between * scale, information_P, residuals_P / root, correlation)


def cusum_path(increments_N: np.ndarray) -> np.ndarray:
    """S_n = max(0, S_{n-1} + x_n) with S_0 = 0, along the last axis: the sum minus its lowest value so far (Page 1954)."""
    sums_N = np.cumsum(increments_N, axis=-1)
    return sums_N - np.minimum(np.minimum.accumulate(sums_N, axis=-1), 0.0)


def increments(pool: Pool, accepted_N: np.ndarray, drafted_N: np.ndarray, drop: float, allowance: float) -> np.ndarray:
    """What each request (N,) adds to the sum: drop x information x (z - allowance x information) / inflation.

    z: the standardised residual, of mean drop x information under the drop. With an allowance of half the drop this is
    the normal log-likelihood ratio of the drop against no change, in nats, so that a request counts by its information. Correlated
    requests carry less: the ratio of many is that of independent ones over the inflation.
    """
    spread_N, drafted_N = pool.spread(drafted_N), np.asarray(drafted_N, dtype=np.float64)
    information_N = drafted_N / spread_N
    z_N = (pool.rate * drafted_N - np.asarray(accepted_N)) / spread_N
    return drop * information_N * (z_N - allowance * information_N) / pool.inflation


def _worlds(pool: Pool, drafted_N: np.ndarray, streams: int, seed: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Simulated baselines (B of `streams` at a time), and the stream that follows each: (noise_BN, errors_B, scales_B).

    noise_BN: cumulated information x residual of the streams. errors_B: estimated minus true rate. scales_B: estimated long-run variance
    over the variance of a request. Each stream has its own baseline, because the pool is one draw of the baseline. Dividing by its own
    variance gives the tail of a small sample (bootstrap-t). The residuals are the pool's, resampled and filtered to its correlation, taken a
    standard error higher because it is an estimate too.
    """
    rng = np.random.default_rng(seed)
    count, length = len(pool.residuals_P), len(pool.residuals_P) + len(drafted_N)
    told_P = pool.information_P
    information_N = np.asarray(drafted_N) / pool.spread(drafted_N)
    centred_P = pool.residuals_P - pool.residuals_P.mean()
    centred_P = (centred_P / max(1e-12, centred_P.std())).astype(np.float32)
    correlation = min(_MOST_CORRELATED, pool.correlation + math.sqrt((1 - pool.correlation**2) / count))
    rows = max(1, CELLS // length)
    for start in range(0, streams, rows):
        drawn_BL = centred_P[rng.integers(count, size=(min(rows, streams - start), length), dtype=np.uint32)]
        drawn_BL[:, 1:] *= math.sqrt(1 - correlation**2)
        drawn_BL = signal.lfilter([1.0], [1.0, -correlation], drawn_BL, axis=1)
        own_BP, noise_BN = drawn_BL[:, :count], drawn_BL[:, count:] * information_N
        errors_B = (told_P * own_BP).sum(1) / (told_P**2).sum()
        own_BP = own_BP - errors_B[:, None] * told_P
        scales_B = ((told_P * own_BP) ** 2).sum(1) / (told_P**2).sum() * count / (count - 1)
        scales_B *= _inflation(correlation_of(own_BP))
        yield np.cumsum(noise_BN, axis=1, dtype=np.float64), errors_B, np.maximum(scales_B, 1e-6)


def _thresholds(pool: Pool, drafted_N: np.ndarray, charts: Sequence[Chart], streams: int, seed: int) -> list[float]:
    """For each chart the height that a share `level` of simulated unchanged streams crosses."""
    squares_N = np.cumsum((np.asarray(drafted_N) / pool.spread(drafted_N)) ** 2)
    highest: list[list[np.ndarray]] = [[] for _ in charts]
    for noise_BN, errors_B, scales_B in _worlds(pool, drafted_N, streams, seed):
        for chart, found in zip(charts, highest, strict=True):
            # sums of unchanged streams, minus their lowest value so far
            sums_BN = errors_B[:, None] * squares_N - noise_BN - chart.allowance * squares_N
            sums_BN -= np.minimum(np.minimum.accumulate(sums_BN, axis=1), 0.0)
            found.append(sums_BN.max(1) * (chart.drop / scales_B))
    # With B values exchangeable with the real one, P(it exceeds the k-th of them) <= level.
    return [
        float(np.sort(np.concatenate(found))[min(streams, math.ceil((streams + 1) * (1 - chart.level))) - 1])
        for chart, found in zip(charts, highest, strict=True)
    ]


def chart_for(pool: Pool, drafted_N: np.ndarray, level: float, drop: float, seed: int = 0) -> Chart:
    """The chart that an unchanged stream crosses with probability `level` in HORIZON requests, or twice, four times ... as many if longer.

    So a look at a growing stream does not change the threshold until its length doubles. The threshold is simulated with the pool's
    residuals and includes the error of the baseline; otherwise a long stream would detect that the estimated rate is not the true one
    (Gandy and Kvaloy 2013, arXiv 1111.4180). The allowance is half the drop, or more if that error would raise the sum: of a few values,
    the one that detects the drop first. Neither depends on what the stream accepted. Raises ValueError for a level outside (0, 1), a drop
    that is not positive, or no request.
    """
    if not 0 < level < 1 or not drop > 0 or len(drafted_N) == 0:
        raise ValueError(f"level {level}, drop {drop}, {len(drafted_N)} requests")
    chart = Chart(drop, drop / 2, math.inf, level)
    drafted_N = np.resize(drafted_N, HORIZON << max(0, math.ceil(math.log2(len(drafted_N) / HORIZON))))
    if pool.residuals_P.var() < _NOTHING:
        # Nothing to simulate with. From each of N starts, a likelihood ratio reaches e^h with probability at most e^-h.
        return replace(chart, threshold=math.log(len(drafted_N) / level))
    tried = [replace(chart, allowance=drop * share, level=max(level, _TRIAL_LEVEL)) for share in _ALLOWANCES]
    heights = _thresholds(pool, drafted_N, tried, _TRIAL_STREAMS, seed + 1)
    # After the drop the sum rises by drop x (drop - allowance) x information^2 per request.
    soonest = min(zip(heights, tried, strict=True), key=lambda pair: pair[0] / (drop - pair[1].allowance))[1]
    chart = replace(soonest, level=level)
    streams = max(FEWEST_STREAMS, math.ceil(_EXCEEDING / level))
    return replace(chart, threshold=_thresholds(pool, drafted_N, [chart], streams, seed)[0])


def monitor(pool: Pool, accepted_N: np.ndarray, drafted_N: np.ndarray, chart: Chart) -> list[Crossing]:
    """The alarms of a stream under the chart that `chart_for` made for its `drafted_N`."""
    return alarms_of(cusum_path(increments(pool, accepted_N, drafted_N, chart.drop, chart.allowance)), chart.threshold)


def watch(
    pool: Pool, accepted_N: np.ndarray, drafted_N: np.ndarray, level: float, drop: float, seed: int = 0
) -> list[Crossing]:
    """The alarms of a stream at a `level`, split between a chart for the drop and one for LARGE drops, which hears those sooner.

    Of the two charts, the alarms of the one whose open alarm began to ring first; without an open alarm, of the one with most alarms.
    Raises ValueError as `chart_for`.
    """
    charts = [chart_for(pool, drafted_N, level / 2 / CAUTION, own, seed) for own in (drop, LARGE * drop)]
    found = [monitor(pool, accepted_N, drafted_N, chart) for chart in charts]
    return min(found, key=lambda own: (min((one.at for one in own if one.until is None), default=math.inf), -len(own)))


def alarms_of(path_N: np.ndarray, threshold: float) -> list[Crossing]:
    """One alarm for each stretch between zeros that crosses the threshold."""
    zeros = np.flatnonzero(path_N == 0)
    alarms: list[Crossing] = []
    for index in np.flatnonzero(path_N > threshold):
        behind = int(np.searchsorted(zeros, index))
        since = int(zeros[behind - 1]) + 2 if behind else 1
        if not alarms or alarms[-1].since != since:
            until = int(zeros[behind]) + 1 if behind < len(zeros) else None
            alarms.append(Crossing(since, int(index) + 1, until))
    return alarms
