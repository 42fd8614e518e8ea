"""Compares served acceptance of a draft version, request by request and slice by slice, with its own earlier requests: the run's
held-out prompts are no baseline, because users ask for other things, in an order and more than once (`understudy readback` asks whether an
engine accepts what the run predicts). The false alarm rate covers all slices of one call (Bonferroni). An alarm does not say why.
"""

import math
from collections.abc import Sequence

import numpy as np

from data.responses.acceptance_log import AcceptanceRecord
from distill.commands.drift.baseline import ALL, by_label
from distill.live.alarm.scan import HORIZON, Crossing, pool_of, watch
from distill.live.traffic.reader import TrafficLog, acceptance_of
from speculative.errors import UserError
from speculative.explain.rate_change import rate_change
from speculative.measure.intervals import Interval, interval
from speculative.measure.record import Record

BURN_IN, FEWEST = 150, 30  # requests of a slice that its baseline begins with, and the fewest allowed
_MOST_TOLD = 3  # slices without an alarm that the sentence lists; if there are more, only the one that fell most


class Reason(Record):
    """A reason for a refresh: whether it holds, and a sentence."""

    holds: bool
    sentence: str


class SliceAlarm(Record):
    """Requests of one label, counted from 1. change: accepted/drafted since the open alarm began minus that of all requests before it;
    without one, of all requests after the first ones minus theirs. correlation: of neighbours among the first. time: logged time at which
    the alarm began.
    """

    name: str
    requests: int
    correlation: float
    rate: float
    baseline: float
    change: float
    ci: Interval
    alarms: list[Crossing]
    time: str | None

    @property
    def ringing(self) -> Crossing | None:
        """The open alarm, if any."""
        return next((alarm for alarm in self.alarms if alarm.until is None), None)

    @property
    def sentence(self) -> str:
        """The result of this slice in words."""
        where = "" if self.name == ALL else f"{self.name}: "
        change = f"({self.change:+.3f} {interval(self.ci, '+.3f')})"
        alarm = self.ringing
        if alarm is None:
            words = f"{where}accepted/drafted {self.rate:.3f} against {self.baseline:.3f} {change}"
            past = [f"; it fell at request {one.since:,} and recovered at {one.until:,}" for one in self.alarms]
            return words + "".join(past[-1:])
        when = f" ({self.time})" if self.time else ""
        return (
            f"{where}accepted/drafted fell from {self.baseline:.3f} to {self.rate:.3f} {change} since request {alarm.since:,} of "
            f"{self.requests:,}{when}, detected at request {alarm.at:,}"
        )


class Alarm(Reason):
    """`holds`: the alarm rings. false_alarms: probability of any false alarm in HORIZON requests. waiting: requests so far of slices that
    have fewer than ``burn_in`` and one more.
    """

    version: str
    false_alarms: float
    burn_in: int
    slices: list[SliceAlarm]
    waiting: dict[str, int]
    notes: list[str]


def alarm(
    log: TrafficLog, version: str, false_alarms: float = 0.01, drop: float = 0.03, burn_in: int = BURN_IN
) -> Alarm:
    """Test whether served acceptance of a version has fallen below that of its earlier requests.

    drop: a smaller measured fall in accepted/drafted does not ring. burn_in: requests of a slice that its baseline begins with.
    Raises UserError: an option out of its range, or no request of that version with counts.
    """
    if not 0 < false_alarms <= 0.5:
        raise UserError(f"--false-alarms {false_alarms}: give a probability between 0 and 0.5, e.g. 0.01")
    if not 0 < drop < 1:
        raise UserError(f"--drop {drop}: give a fall in accepted/drafted between 0 and 1, e.g. 0.03")
    if burn_in < FEWEST:
        raise UserError(f"--burn-in {burn_in}: give at least {FEWEST} requests, e.g. {BURN_IN}")
    served = acceptance_of(log, version)
    by_name, more = by_label(served.records, burn_in)
    waiting = {name: len(records) for name, records in by_name.items() if len(records) <= burn_in}
    level, gamma = false_alarms / len(by_name), served.gamma() or 1.0
    told = [
        slice_alarm(name, records, burn_in, gamma, level, drop, seed)
        for seed, (name, records) in enumerate(by_name.items())
        if name not in waiting
    ]
    ringing = [part for part in told if part.ringing]
    shown = ringing or (told if len(told) <= _MOST_TOLD else [min(told, key=lambda part: part.change)])
    words = [part.sentence for part in shown]
    if waiting:
        words.append(f"{len(waiting)} without a baseline of {burn_in} requests yet (at most {max(waiting.values()):,})")
    sentence = (
        f"alarm: {'' if ringing else 'none, '}{'; '.join(words)} (false alarm rate {100 * false_alarms:g} % in {HORIZON:,} requests; "
        f"{len(served.records):,} requests in {len(by_name)} slices)"
    )
    return Alarm(
        holds=bool(ringing),
        sentence=sentence,
        version=version,
        false_alarms=false_alarms,
        burn_in=burn_in,
        slices=told,
        waiting=waiting,
        notes=[*served.warnings, *more],
    )


def slice_alarm(
    name: str, records: Sequence[AcceptanceRecord], burn_in: int, gamma: float, level: float, drop: float, seed: int = 0
) -> SliceAlarm:
    """Test the requests of a slice after its first ``burn_in``; ``level`` is the probability of a false alarm."""
    counts_2M = np.array([[record.accepted, record.drafted] for record in records]).T
    pool = pool_of(counts_2M[0, :burn_in], counts_2M[1, :burn_in], gamma)
    found = watch(pool, counts_2M[0], counts_2M[1], level, drop, seed)
    since = next((alarm.since for alarm in found if alarm.until is None), None)
    first_2P, behind_2N = np.split(counts_2M, [since - 1 if since else burn_in], axis=1)
    change = rate_change(behind_2N, [0] * behind_2N.shape[1], first_2P, np.ones((1, first_2P.shape[1]), dtype=bool))
    low, high = (change.change + math.sqrt(pool.inflation) * (edge - change.change) for edge in change.ci)
    return SliceAlarm(
        name=name,
        requests=len(records),
        correlation=pool.correlation,
        rate=change.rate,
        baseline=change.baseline,
        change=change.change,
        ci=(low, high),
        alarms=found,
        time=records[since - 1].time if since else None,
    )
