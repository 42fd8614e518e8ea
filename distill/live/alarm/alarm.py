"""Compares served acceptance of a draft version, request by request and slice by slice, with the run that made it.

The false alarm rate covers all requests and slices of one call (Bonferroni over slices). It assumes that requests are independent draws,
like the held-out prompts. Real users come in order, repeat themselves and ask for other things. So an alarm says that acceptance on this
traffic is below the baseline, but not why.
"""

from pathlib import Path

import numpy as np

from distill.commands.drift.baseline import ALL, Baseline, Slice, baseline_of, gamma_of, slices_of
from distill.commands.options import DriftOptions
from distill.live.alarm.cusum import Crossing, chart_for, monitor, pool_of
from distill.live.traffic.reader import TrafficLog, acceptance_of
from speculative.errors import UserError
from speculative.explain.rate_change import rate_change
from speculative.measure.intervals import Interval, interval
from speculative.measure.record import Record

_MOST_TOLD = 3  # slices without an alarm that the sentence lists; if there are more, only the one that fell most


class Reason(Record):
    """A reason for a refresh: whether it holds, and a sentence."""

    holds: bool
    sentence: str


class SliceAlarm(Record):
    """Requests of one label, counted from 1. change: accepted/drafted minus the baseline's, since the open alarm began; without one, of
    all requests. time: logged time at which it began.
    """

    name: str
    compared_with: str
    requests: int
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
        words = (
            f"{where}accepted/drafted fell from {self.baseline:.3f} to {self.rate:.3f} {change} since request {alarm.since:,} of "
            f"{self.requests:,}{when}, detected at request {alarm.at:,}"
        )
        settings = "; it was low from the first request: check that the server's template, temperature, rule and gamma match the run's"
        return words + (settings if alarm.since == 1 else "")


class Alarm(Reason):
    """`holds`: the alarm rings. run: made the version; false_alarms: probability of any false alarm."""

    run: str
    version: str
    gamma: int
    rule: str
    false_alarms: float
    slices: list[SliceAlarm]
    notes: list[str]


def alarm(log: TrafficLog, version: str, run: Path, false_alarms: float = 0.01, drop: float = 0.05) -> Alarm:
    """Test whether served acceptance of a version has fallen below that of the run that made it.

    Args:
        drop: the fall in accepted/drafted to detect quickly.

    Raises:
        UserError: an option out of its range, no request of that version with counts, or no baseline in the run.
    """
    if not 0 < false_alarms <= 0.5:
        raise UserError(f"--false-alarms {false_alarms}: give a probability between 0 and 0.5, e.g. 0.01")
    if not 0 < drop < 1:
        raise UserError(f"--drop {drop}: give a fall in accepted/drafted between 0 and 1, e.g. 0.05")
    served = acceptance_of(log, version)
    gamma, notes = gamma_of(served, None)
    baseline = baseline_of(DriftOptions(run), gamma)
    slices, more = slices_of(served.records, baseline.prompts)
    level = false_alarms / len(slices)
    told = [slice_alarm(part, baseline, level, drop, seed) for seed, part in enumerate(slices)]
    ringing = [part for part in told if part.ringing]
    shown = ringing or (told if len(told) <= _MOST_TOLD else [min(told, key=lambda part: part.change)])
    sentence = (
        f"alarm: {'' if ringing else 'none, '}{'; '.join(part.sentence for part in shown)} (false alarm rate {100 * false_alarms:g} % over "
        f"{len(served.records):,} requests in {len(told)} slices)"
    )
    return Alarm(
        holds=bool(ringing), sentence=sentence, run=str(run), version=version, gamma=baseline.gamma, rule=baseline.rule, false_alarms=false_alarms,
        slices=told, notes=[*served.warnings, *notes, *more],
    )  # fmt: skip


def slice_alarm(part: Slice, baseline: Baseline, level: float, drop: float, seed: int = 0) -> SliceAlarm:
    """Test one slice with its own chart; ``level`` is the probability of any false alarm."""
    served_2N = np.array([[record.accepted, record.drafted] for record in part.records]).T
    prompts = [baseline.prompts[index] for index in part.prompts]
    judged_2P = np.array([[prompt.accepted, prompt.drafted] for prompt in prompts]).T
    pool = pool_of(judged_2P[0], judged_2P[1], baseline.gamma)
    found = monitor(pool, served_2N[0], served_2N[1], chart_for(pool, served_2N[1], level, drop, seed))
    since = next((alarm.since for alarm in found if alarm.until is None), 1)
    behind_2N = served_2N[:, since - 1 :]
    change = rate_change(behind_2N, [0] * behind_2N.shape[1], judged_2P, np.ones((1, len(part.prompts)), dtype=bool))
    return SliceAlarm(
        name=part.name, compared_with=part.of, requests=len(part.records), rate=change.rate, baseline=change.baseline,
        change=change.change, ci=change.ci, alarms=found, time=part.records[since - 1].time if since > 1 else None,
    )  # fmt: skip
