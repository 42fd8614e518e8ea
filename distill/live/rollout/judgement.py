"""Decides from the requests of two engines: go on, go back, or wait. It reads no files.

Each reason to go back (lower acceptance, below the gate's interval, slower, more errors) has a quarter of the false alarm rate in each of
the two phases, and every test is valid at any time. The sampling unit is a conversation. While comparing, both engines get conversations
of the same time, split by a hash. While watching, the new engine is compared with the old one before the move, so changes of traffic or
load count too.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy import special

from distill.engines.protocol.engine import reporting_flags
from distill.live.anytime import (
    FEWEST_REQUESTS,
    Sums,
    anytime_interval,
    difference_of,
    estimate_of,
    evidence_of_more,
    requests_to_see,
    sums_of,
)
from distill.live.traffic.reader import accepts
from distill.live.traffic.record import TrafficRecord
from speculative.measure.intervals import Interval

FALSE_ALARMS = 0.05  # probability that an equally good version is called worse, in each of the two phases
WAYS_BACK = 4
LEVEL = 2 * FALSE_ALARMS / WAYS_BACK  # of a two-sided interval with one side that goes back
SILENT_CONVERSATIONS = 50  # without a drafted token: the engine has no draft or does not report counts
# in log seconds: expected differences, and the residual of one extra request
LATENCY_SCALE, LATENCY_DOUBT = 0.2, 1.0
WATCHED_SLOWER = 1.0  # twice as slow, because after the move one engine has the load of two
WHOLE = ("stop", "length", "tool_calls")  # finishes of complete responses
SEEN = 0.05  # the difference for which the required number of requests is reported


@dataclass(frozen=True)
class Served:
    """What an engine served in one phase. left: requests cancelled before the first byte. They count nowhere else, because a client can
    cancel any number of requests. errors: conversations with an error. gamma: drafted tokens per block. acceptance: sums of accepted /
    drafted, latency: sums of log seconds per token, both by conversation.
    """

    requests: int = 0
    conversations: int = 0
    errors: int = 0
    gamma: float | None = None
    acceptance: Sums = field(default_factory=Sums)
    latency: Sums = field(default_factory=Sums)
    left: int = 0


@dataclass(frozen=True)
class Decision:
    """A decision with its reason. interval: of the difference in accepted / drafted, new - old. to_see: requests of both engines needed to
    see a difference of `SEEN`; None with too few requests.
    """

    action: Literal["wait", "on", "back"]
    reason: str
    interval: Interval
    to_see: int | None


@dataclass(frozen=True)
class GateGain:
    """The gate's interval of the gain in tau on new traffic, at this gamma."""

    gamma: int
    tau_low: float
    tau_high: float


@dataclass(frozen=True)
class Criteria:
    """The criteria for the new draft; see `RolloutOptions`. gate: the gate's interval, None if unknown."""

    share: float
    margin: float
    slower: float
    requests: int
    watch: int
    gate: GateGain | None = None


class Tally:
    """Counts what an engine served, record by record: each request once, with a few sums per conversation.

    A conversation is one draw, because a hash assigns whole conversations and their requests resemble each other. Constrained responses do
    not count for acceptance, and incomplete ones do not count for latency.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._talks: dict[int, list[float]] = {}  # accepted, drafted, log seconds a token, requests of these, errors
        self._drafted = self._blocks = self._left = 0

    def add(self, record: TrafficRecord) -> None:
        """Add a record; the first record of an id counts."""
        if (request := hash(record.id)) in self._seen:
            return
        self._seen.add(request)
        if record.finish == "cancelled" and record.first_token_s is None:
            self._left += 1
            return
        sums = self._talks.setdefault(hash(record.conversation or record.id), [0.0] * 5)
        if accepts(record):
            accepted, drafted = record.accepted or 0, record.drafted or 0
            self._drafted += drafted if record.blocks else 0
            self._blocks += record.blocks or 0
            sums[0] += accepted
            sums[1] += drafted
        if record.finish in WHOLE and record.total_s and record.response_tokens:
            sums[2] += math.log(record.total_s / record.response_tokens)
            sums[3] += 1
        sums[4] += record.finish == "error"

    def served(self) -> Served:
        """Sums over all N conversations."""
        sums_NK = np.array(list(self._talks.values()), dtype=np.float64).reshape(-1, 5)
        requests, errors = len(self._seen) - self._left, int(np.count_nonzero(sums_NK[:, 4]))
        gamma = self._drafted / self._blocks if self._blocks else None
        acceptance, latency = (sums_of(sums_NK[:, one], sums_NK[:, one + 1]) for one in (0, 2))
        return Served(requests, len(sums_NK), errors, gamma, acceptance, latency, self._left)


def compare(new: Served, old: Served, criteria: Criteria) -> Decision:
    """Decide while both engines serve."""
    interval, to_see, words = _seen(new, old, criteria)
    (low, high), total = interval, new.requests + old.requests
    back = (
        _more_errors(evidence_of_more(new.errors, new.errors + old.errors, criteria.share), new, old)
        or _silent(new, old)
        or _below_gate(high, new, criteria, words)
        or _slower(new, old, criteria.slower)
    )
    if back:
        return Decision("back", back, interval, to_see)
    if low > -criteria.margin:
        what = "more is accepted" if criteria.margin == 0 else f"the loss is less than {criteria.margin:g}"
        return Decision("on", f"certainly {what}: {words}", interval, to_see)
    if high < 0:
        return Decision("back", f"certainly less is accepted: {words}", interval, to_see)
    if total >= criteria.requests:
        return Decision("back", f"undecided after {total:,} requests: {words}", interval, to_see)
    return Decision("wait", words, interval, to_see)


def watch(new: Served, old: Served, criteria: Criteria) -> Decision:
    """Decide while the new engine serves all traffic. old: what the old engine served during the comparison."""
    interval, to_see, words = _seen(new, old, criteria)
    # Clopper-Pearson: upper bound of the old engine's error rate.
    doubt = FALSE_ALARMS / WAYS_BACK / 2  # half of this reason's level for the bound, half for the evidence
    usual = float(special.betaincinv(old.errors + 1, max(1, old.conversations - old.errors), 1 - doubt))
    back = (
        _more_errors(evidence_of_more(new.errors, new.conversations, min(usual, 0.999)) / 2, new, old)
        or _silent(new, old)
        or _below_gate(interval[1], new, criteria, words)
        or _slower(new, old, WATCHED_SLOWER)
        or (f"certainly less is accepted than before: {words}" if interval[1] < -criteria.margin else "")
    )
    if back:
        return Decision("back", back, interval, to_see)
    return Decision("on" if new.requests >= criteria.watch else "wait", words, interval, to_see)


def _seen(new: Served, old: Served, criteria: Criteria) -> tuple[Interval, int | None, str]:
    """(interval of the difference in accepted / drafted, requests needed to see `SEEN`, both rates and the difference in words)."""
    usual = estimate_of(old.acceptance)
    difference, to_see = difference_of(estimate_of(new.acceptance), usual), None
    if (count := old.acceptance.requests) >= FEWEST_REQUESTS:
        to_see = requests_to_see(SEEN, math.sqrt(float(usual.variance) * count), criteria.share, LEVEL)
    low, high = anytime_interval(difference, LEVEL)
    low, high = max(-1.0, float(low)), min(1.0, float(high))
    words = f"accepted / drafted {_rate(new.acceptance)} of {new.requests:,} requests, "
    words += f"{_rate(old.acceptance)} of the old draft's {old.requests:,}"
    if math.isfinite(difference.variance):
        words += f"; difference {float(difference.value):+.3f} [{low:+.3f}, {high:+.3f}]"
    words += f"; clients cancelled {new.left:,} more before the first byte" if new.left else ""
    return (low, high), to_see, words


def _more_errors(evidence: float, new: Served, old: Served) -> str:
    if evidence < WAYS_BACK / FALSE_ALARMS:
        return ""
    return (
        f"more errors: {new.errors:,} of {new.conversations:,} conversations, against {old.errors:,} of {old.conversations:,} with the old "
        "engine"
    )


def _below_gate(most_gained: float, new: Served, criteria: Criteria, words: str) -> str:
    """Compare with the gate's gain over the old draft: traffic and counting change it less than acceptance itself."""
    gate = criteria.gate
    # tau = 1 + gamma x accepted / drafted; at another gamma the gain differs.
    if gate is None or new.gamma is None or round(new.gamma) != gate.gamma:
        return ""
    low, high = gate.tau_low / gate.gamma, gate.tau_high / gate.gamma
    if most_gained >= low:
        return ""
    return f"the gain in accepted / drafted is below the gate's interval [{low:+.3f}, {high:+.3f}]: {words}"


def _slower(new: Served, old: Served, slower: float) -> str:
    times = difference_of(estimate_of(new.latency, LATENCY_DOUBT), estimate_of(old.latency, LATENCY_DOUBT))
    low, high = anytime_interval(times, LEVEL, LATENCY_SCALE)
    if low <= math.log1p(slower):
        return ""
    ratio = f"{math.exp(times.value):.2f} [{math.exp(low):.2f}, {math.exp(high):.2f}]"
    return f"certainly slower: {ratio} times the old engine's seconds per token"


def _silent(new: Served, old: Served) -> str:
    for served, which in ((new, "new"), (old, "old")):
        if served.conversations - served.errors >= SILENT_CONVERSATIONS and not served.acceptance.requests:
            return (
                f"the {which} engine reports no drafted tokens in {served.requests:,} requests: it has no draft, or "
                f"does not report counts ({reporting_flags()})"
            )
    return ""


def _rate(sums: Sums) -> str:
    return f"{sums.numerator / sums.denominator:.3f}" if sums.denominator else "-"
