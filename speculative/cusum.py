"""Has acceptance fallen? A sequential test (CUSUM, Page 1954) of a stream of requests against a pool of baseline ones.

Of a request, `drafted` tokens were proposed and `accepted` kept. The log-likelihood ratio of a drop against none is summed
and held at zero from below; it crosses the threshold with the stated probability when nothing has changed. That
probability is about this: the stream's requests are independent draws of what the pool was drawn from. Held-out prompts
are such draws; a server's traffic comes in order, and one user's requests resemble each other (`neighbour_correlation`).

Shapes: P requests of the pool, N of the stream in their order, B simulated pools and streams.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy import optimize, stats

from speculative.metrics import Interval

FEWEST_REQUESTS = 8  # A pool of fewer says too little of its own spread.
_CELLS = 1 << 21  # Entries (B, N) simulated at once: 16 MB an array.
_EXCEEDING = 20  # Simulated streams beyond the threshold: its level is then right to a fifth of itself.
_FEWEST_STREAMS = 2000
_POWER_STREAMS = 400
_HALVINGS = 12
_NOTHING = 1e-9  # Variance of residuals that are all the same but for rounding.

Direction = Literal["down", "up"]


@dataclass(frozen=True)
class Pool:
    """Baseline requests and what they say of any request.

    rate: accepted per drafted, each request weighted by what it tells (see `pool_of`). within, between: the variance of a
    request's accepted tokens is within x drafted + between x drafted^2. information_P: drafted / spread, so that a drop by
    x moves a request by x times its information, in standard deviations. residuals_P: (accepted - rate x drafted) / spread.
    """

    accepted_P: np.ndarray
    drafted_P: np.ndarray
    rate: float
    within: float
    between: float
    information_P: np.ndarray = field(repr=False)
    residuals_P: np.ndarray = field(repr=False)

    def spread(self, drafted_N: np.ndarray) -> np.ndarray:
        """Standard deviation (N,) of the accepted tokens of requests that drafted so many."""
        drafted_N = np.asarray(drafted_N, dtype=np.float64)
        return np.sqrt(self.within * drafted_N + self.between * drafted_N**2)


@dataclass(frozen=True)
class Alarm:
    """One crossing of the threshold; requests counted from 1.

    since: the first request behind the last zero of the sum, the usual estimate of when the change began. at: the request
    that crossed. until: where the sum came back to zero, None while it has not.
    """

    direction: Direction
    since: int
    at: int
    until: int | None


@dataclass(frozen=True)
class Monitored:
    """A stream under the test. path_N: the sum behind each request, in nats; threshold: the same; up_path_N: two-sided only."""

    path_N: np.ndarray
    up_path_N: np.ndarray | None
    threshold: float
    alarms: tuple[Alarm, ...]
    level: float
    drop: float


@dataclass(frozen=True)
class Power:
    """What the test would see. probability, delay: of a drop of the stated size from the first request on, and the mean
    number of requests until its alarm (None where none came). detectable: the drop seen with `wanted` probability, None
    where not even acceptance of zero would be.
    """

    probability: float
    delay: float | None
    detectable: float | None
    wanted: float


def block_variance_per_token(rate: float, gamma: int) -> float:
    """Variance of a block's accepted tokens over gamma, when each is accepted with the same chance until the first is not.

    P(A >= j) = a^j, with a such that E[A] = gamma x rate. It is more than binomial: one refusal costs all behind it.
    """
    if not 0.0 < rate < 1.0:
        return 0.0
    places = np.arange(1, gamma + 1)
    chance = optimize.brentq(lambda chance: float((chance**places).sum()) - gamma * rate, 0.0, 1.0)
    survival = chance**places
    return float(((2 * places - 1) * survival).sum() - survival.sum() ** 2) / gamma


def pool_of(accepted_P: np.ndarray, drafted_P: np.ndarray, gamma: float, *, sums: bool = False) -> Pool:
    """The pool of baseline requests that drafted about `gamma` tokens a block.

    Within a request the variance is that of its blocks (`block_variance_per_token`); what the requests vary beyond is
    their own difficulty and grows with drafted^2, by the method of moments. sums: the stream's records are sums over
    requests (an engine's line each ten seconds); then all variance grows with drafted.

    Raises ValueError for fewer than FEWEST_REQUESTS requests, one without drafted tokens, or accepted beyond drafted.
    """
    accepted_P, drafted_P = np.asarray(accepted_P, dtype=np.float64), np.asarray(drafted_P, dtype=np.float64)
    if len(accepted_P) != len(drafted_P) or len(accepted_P) < FEWEST_REQUESTS:
        raise ValueError(f"{len(accepted_P)} and {len(drafted_P)} requests: a pool has {FEWEST_REQUESTS} or more")
    if (drafted_P <= 0).any() or (accepted_P < 0).any() or (accepted_P > drafted_P).any():
        raise ValueError("0 <= accepted <= drafted and drafted > 0 for every request")
    count = len(accepted_P)
    squares_P = (accepted_P - accepted_P.sum() / drafted_P.sum() * drafted_P) ** 2 * count / (count - 1)
    within, between = squares_P.sum() / drafted_P.sum(), 0.0
    if not sums:
        own = block_variance_per_token(float(accepted_P.sum() / drafted_P.sum()), max(1, round(gamma)))
        within = min(within, own)
        between = max(0.0, (squares_P - within * drafted_P).sum() / (drafted_P**2).sum())
    # Where every request is alike nothing was seen to vary: half a token then, which also keeps the arithmetic finite.
    within = max(within, 0.25 / drafted_P.mean())
    weights_P = drafted_P / (within * drafted_P + between * drafted_P**2)
    rate = float((weights_P * accepted_P).sum() / (weights_P * drafted_P).sum())
    spread_P = np.sqrt(within * drafted_P + between * drafted_P**2)
    residuals_P = (accepted_P - rate * drafted_P) / spread_P
    scale = float((residuals_P**2).sum() / (count - 1))
    scale = scale if scale > _NOTHING else 1.0
    root = math.sqrt(scale)
    return Pool(
        accepted_P, drafted_P, rate, within * scale, between * scale, drafted_P / (spread_P * root), residuals_P / root
    )


def cusum_path(increments_N: np.ndarray) -> np.ndarray:
    """S_n = max(0, S_{n-1} + x_n) with S_0 = 0, along the last axis: the sum less its lowest value so far (Page 1954)."""
    sums_N = np.cumsum(increments_N, axis=-1)
    return sums_N - np.minimum(np.minimum.accumulate(sums_N, axis=-1), 0.0)


def log_likelihood_ratios(
    pool: Pool, accepted_N: np.ndarray, drafted_N: np.ndarray, drop: float, direction: Direction = "down"
) -> np.ndarray:
    """Increments (N,) in nats: normal log-likelihood ratio of acceptance moved by `drop` against the pool's.

    m z - m^2 / 2 with z the standardised residual and m = drop x drafted / spread its mean under the drop: Page's
    allowance, half the shift, weighted by what a request tells.
    """
    spread_N = pool.spread(drafted_N)
    means_N = drop * np.asarray(drafted_N) / spread_N
    z_N = (pool.rate * np.asarray(drafted_N) - np.asarray(accepted_N)) / spread_N
    return means_N * (z_N if direction == "down" else -z_N) - means_N**2 / 2


@dataclass(frozen=True)
class _Worlds:
    """Simulated baselines: what they take the pool's rate and spread for, and streams under the pool's truth.

    noise_BN: cumulated information x residual of the streams. errors_B: estimated less true rate. scales_B: estimated over
    true variance.
    """

    noise_BN: np.ndarray
    errors_B: np.ndarray
    scales_B: np.ndarray


def _worlds(pool: Pool, drafted_N: np.ndarray, streams: int, seed: int) -> Iterator[_Worlds]:
    """Streams of the pool's residuals, each with a baseline of its own, as the pool is one draw of the baseline.

    P - 1 of the P requests are drawn for a baseline: so the variance of its rate is the pool's unbiased one. Dividing by
    its own variance makes the tail that of few requests (bootstrap-t).
    """
    rng = np.random.default_rng(seed)
    count = len(pool.residuals_P)
    information_N = (np.asarray(drafted_N) / pool.spread(drafted_N)).astype(np.float32)
    centred_P = pool.residuals_P - pool.residuals_P.mean()
    centred_P = (centred_P / max(1e-12, centred_P.std())).astype(np.float32)
    rows = max(1, _CELLS // max(1, len(information_N)))
    for start in range(0, streams, rows):
        size = min(rows, streams - start)
        drawn_BP = rng.integers(count, size=(size, count - 1))
        own_BP, told_BP = pool.residuals_P[drawn_BP], pool.information_P[drawn_BP]
        errors_B = (told_BP * own_BP).sum(1) / (told_BP**2).sum(1)
        scales_B = ((own_BP - errors_B[:, None] * told_BP) ** 2).sum(1) / (count - 2)
        noise_BN = centred_P[rng.integers(count, size=(size, len(information_N)), dtype=np.uint32)] * information_N
        yield _Worlds(np.cumsum(noise_BN, axis=1, dtype=np.float64), errors_B, np.maximum(scales_B, 1e-6))


def _paths(
    worlds: _Worlds, squares_N: np.ndarray, drop: float, fallen_B: np.ndarray | float, direction: Direction
) -> np.ndarray:
    """CUSUM paths (B, N) of streams whose acceptance has fallen by `fallen_B` from the first request on.

    squares_N: cumulated squared information.
    """
    moved_B = worlds.errors_B + fallen_B
    seen_BN = moved_B[:, None] * squares_N - worlds.noise_BN
    sums_BN = (seen_BN if direction == "down" else -seen_BN) - drop / 2 * squares_N
    low_BN = np.minimum(np.minimum.accumulate(sums_BN, axis=1), 0.0)
    return (sums_BN - low_BN) * (drop / worlds.scales_B)[:, None]


def _squares(pool: Pool, drafted_N: np.ndarray) -> np.ndarray:
    return np.cumsum((np.asarray(drafted_N) / pool.spread(drafted_N)) ** 2)


def threshold_for(
    pool: Pool, drafted_N: np.ndarray, level: float, drop: float, *, two_sided: bool = False, seed: int = 0
) -> float:
    """The height that a stream of these requests crosses anywhere with probability `level` when nothing has changed.

    By simulation with the pool's own residuals; the error of the baseline is in it, because a long stream would
    otherwise find that the estimated rate is not the true one (Gandy and Kvaloy 2013, arXiv 1111.4180).
    """
    if pool.residuals_P.var() < _NOTHING:
        # Nothing to simulate with. A likelihood ratio reaches e^h with probability e^-h at most, from each of N starts.
        return math.log(len(drafted_N) / level)
    streams = max(_FEWEST_STREAMS, math.ceil(_EXCEEDING / level))
    squares_N = _squares(pool, drafted_N)
    sides: tuple[Direction, ...] = ("down", "up") if two_sided else ("down",)
    highest = [
        np.max([_paths(worlds, squares_N, drop, 0.0, side).max(1) for side in sides], axis=0)
        for worlds in _worlds(pool, drafted_N, streams, seed)
    ]
    ordered = np.sort(np.concatenate(highest))
    # With B exchangeable values beside the real one, P(it exceeds this one) <= level.
    return float(ordered[min(streams, math.ceil((streams + 1) * (1 - level))) - 1])


def monitor(
    pool: Pool,
    accepted_N: np.ndarray,
    drafted_N: np.ndarray,
    *,
    level: float,
    drop: float,
    two_sided: bool = False,
    seed: int = 0,
) -> Monitored:
    """The stream under the test. level: probability of any false alarm over these N requests; drop: the fall in
    acceptance that it is tuned to (others are seen too, later).

    Raises ValueError for a level outside (0, 1), a drop that is not positive, or an empty stream.
    """
    if not 0 < level < 1 or not drop > 0 or len(accepted_N) == 0 or len(accepted_N) != len(drafted_N):
        raise ValueError(f"level {level}, drop {drop}, {len(accepted_N)} requests")
    threshold = threshold_for(pool, drafted_N, level, drop, two_sided=two_sided, seed=seed)
    down_N = cusum_path(log_likelihood_ratios(pool, accepted_N, drafted_N, drop))
    up_N = cusum_path(log_likelihood_ratios(pool, accepted_N, drafted_N, drop, "up")) if two_sided else None
    alarms = _alarms(down_N, threshold, "down") + ([] if up_N is None else _alarms(up_N, threshold, "up"))
    return Monitored(down_N, up_N, threshold, tuple(sorted(alarms, key=lambda alarm: alarm.at)), level, drop)


def _alarms(path_N: np.ndarray, threshold: float, direction: Direction) -> list[Alarm]:
    """One alarm for each stretch between zeros in which the threshold is crossed."""
    zeros = np.flatnonzero(path_N == 0)
    alarms: list[Alarm] = []
    for index in np.flatnonzero(path_N > threshold):
        behind = int(np.searchsorted(zeros, index))
        since = int(zeros[behind - 1]) + 2 if behind else 1
        if not alarms or alarms[-1].since != since:
            until = int(zeros[behind]) + 1 if behind < len(zeros) else None
            alarms.append(Alarm(direction, since, int(index) + 1, until))
    return alarms


def power_of(
    pool: Pool, drafted_N: np.ndarray, threshold: float, drop: float, *, wanted: float = 0.9, seed: int = 1
) -> Power:
    """What the (one-sided) test sees in a stream of these requests, the spread staying as it is; by simulation."""
    squares_N = _squares(pool, drafted_N)
    delays: list[float] = []
    needed: list[np.ndarray] = []
    for worlds in _worlds(pool, drafted_N, _POWER_STREAMS, seed):
        over_BN = _paths(worlds, squares_N, drop, drop, "down") > threshold
        delays += (over_BN.argmax(1) + 1)[over_BN.any(1)].tolist()
        # A larger fall raises every increment: the smallest that crosses is found by halving.
        low_B, high_B = np.zeros(len(over_BN)), np.full(len(over_BN), pool.rate)
        never_B = _paths(worlds, squares_N, drop, high_B, "down").max(1) <= threshold
        for _ in range(_HALVINGS):
            middle_B = (low_B + high_B) / 2
            seen_B = _paths(worlds, squares_N, drop, middle_B, "down").max(1) > threshold
            low_B, high_B = np.where(seen_B, low_B, middle_B), np.where(seen_B, middle_B, high_B)
        needed.append(np.where(never_B, np.inf, high_B))
    detectable = float(np.sort(np.concatenate(needed))[math.ceil(wanted * _POWER_STREAMS) - 1])
    return Power(
        len(delays) / _POWER_STREAMS,
        float(np.mean(delays)) if delays else None,
        detectable if math.isfinite(detectable) else None,
        wanted,
    )


def rate_with_interval(
    pool: Pool, accepted_N: np.ndarray, drafted_N: np.ndarray, confidence: float = 0.95
) -> tuple[float, Interval]:
    """Accepted per drafted over some requests of a stream, with a normal interval of the linearised ratio.

    The spread is the requests' own, the pool's where they are fewer than FEWEST_REQUESTS.
    """
    rate, error = _ratio(pool, np.asarray(accepted_N, dtype=np.float64), np.asarray(drafted_N, dtype=np.float64))
    half = float(stats.norm.ppf((1 + confidence) / 2)) * error
    return rate, (max(0.0, rate - half), min(1.0, rate + half))


def change_with_interval(
    pool: Pool, accepted_N: np.ndarray, drafted_N: np.ndarray, confidence: float = 0.95
) -> tuple[float, Interval]:
    """Accepted per drafted of these requests less the pool's, with an interval that has the error of both in it.

    Chosen by the data (the requests behind an alarm's start), they look a little worse than they are.
    """
    rate, error = _ratio(pool, np.asarray(accepted_N, dtype=np.float64), np.asarray(drafted_N, dtype=np.float64))
    before, before_error = _ratio(pool, pool.accepted_P, pool.drafted_P)
    half = float(stats.norm.ppf((1 + confidence) / 2)) * math.hypot(error, before_error)
    return rate - before, (rate - before - half, rate - before + half)


def _ratio(pool: Pool, accepted_N: np.ndarray, drafted_N: np.ndarray) -> tuple[float, float]:
    """(sum(accepted) / sum(drafted), its standard error)."""
    total, count = drafted_N.sum(), len(drafted_N)
    rate = float(accepted_N.sum() / total)
    if count < FEWEST_REQUESTS:
        return rate, float(np.sqrt((pool.spread(drafted_N) ** 2).sum()) / total)
    return rate, float(np.sqrt(((accepted_N - rate * drafted_N) ** 2).sum() * count / (count - 1)) / total)


def neighbour_correlation(pool: Pool, accepted_N: np.ndarray, drafted_N: np.ndarray) -> float | None:
    """Correlation of a request's residual with the next one's, in requests without a change between; None under 3.

    Well above 2 / sqrt(N), the requests are not independent and false alarms come more often than stated.
    """
    if len(accepted_N) < 3:
        return None
    rate = np.sum(accepted_N) / np.sum(drafted_N)
    z_N = (np.asarray(accepted_N) - rate * np.asarray(drafted_N)) / pool.spread(drafted_N)
    return float((z_N[1:] * z_N[:-1]).sum() / max(1e-12, (z_N**2).sum()))
