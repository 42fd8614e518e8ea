"""Has the served acceptance of a draft version fallen, slice by slice, below that of its own earlier requests?

The run's held-out prompts are no baseline, because users ask for other things, in an order and more than once (`understudy readback`
asks whether an engine accepts what the run predicts). The false alarm rate covers all slices of one call (Bonferroni). An alarm does
not say why.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from distill.live.anytime import FEWEST_REQUESTS, HORIZON, STEP, Change, certain_change, change_at
from distill.live.traffic.reader import TrafficLog, moment_of, served_by
from distill.live.traffic.record import TrafficRecord
from speculative.measure.intervals import Interval, interval
from speculative.measure.record import Record

FALSE_ALARMS = 0.01  # probability in HORIZON requests, of all slices
DROP = 0.03  # a smaller measured fall in accepted/drafted does not ring
BURN_IN = 150  # requests of a slice that its baseline begins with
MOST_SLICES, OTHERS = 20, "others"
_MOST_SHOWN = 3  # slices without an alarm that the sentence lists; if there are more, only the one that fell most


class Reason(Record):
    """A reason for a refresh: whether it holds, and a sentence."""

    holds: bool
    sentence: str


class SliceAlarm(Record):
    """Requests of one slice, counted from 1. since: the first request of a fall that lasts; null without one. change: accepted/drafted
    since then minus that of all requests before it; without a fall, of all requests after the first ones minus theirs. over: [first,
    last] request of earlier falls. time: at which the fall began.
    """

    name: str
    requests: int
    rate: float
    baseline: float
    change: float
    ci: Interval
    since: int | None
    over: list[tuple[int, int]]
    time: str | None

    @property
    def sentence(self) -> str:
        """The result of this slice in words."""
        change = f"({self.change:+.3f} {interval(self.ci, '+.3f')})"
        if self.since is None:
            words = f"{self.name}: accepted/drafted {self.rate:.3f} against {self.baseline:.3f} {change}"
            return words + "".join(f"; it fell at request {first:,} until {last:,}" for first, last in self.over[-1:])
        return (
            f"{self.name}: accepted/drafted fell from {self.baseline:.3f} to {self.rate:.3f} {change} since request {self.since:,} of "
            f"{self.requests:,} ({self.time})"
        )


class Alarm(Reason):
    """`holds`: the alarm rings. waiting: requests so far of slices that have too few."""

    version: str
    slices: list[SliceAlarm]
    waiting: dict[str, int]
    notes: list[str]


def alarm(log: TrafficLog, version: str, false_alarms: float = FALSE_ALARMS, burn_in: int = BURN_IN) -> Alarm:
    """Test whether served acceptance of a version has fallen below that of its earlier requests.

    false_alarms: probability of one in HORIZON requests. burn_in: requests of a slice that its baseline begins with. Raises UserError: no
    request of that version with counts.
    """
    records, notes = served_by(log, version)
    by_slice, more = _by_slice(records, burn_in)
    waiting = {name: len(some) for name, some in by_slice.items() if len(some) < burn_in + FEWEST_REQUESTS}
    level = false_alarms / len(by_slice)
    slices = [slice_alarm(name, some, burn_in, level) for name, some in by_slice.items() if name not in waiting]
    ringing = [part for part in slices if part.since is not None]
    shown = ringing or (slices if len(slices) <= _MOST_SHOWN else [min(slices, key=lambda part: part.change)])
    words = [part.sentence for part in shown]
    if waiting:
        words.append(f"{len(waiting)} without a baseline of {burn_in} requests yet (at most {max(waiting.values()):,})")
    sentence = (
        f"alarm: {'' if ringing else 'none, '}{'; '.join(words)} (false alarm rate {100 * false_alarms:g} % in {HORIZON:,} requests; "
        f"{len(records):,} requests in {len(by_slice)} slices)"
    )
    return Alarm(
        holds=bool(ringing), sentence=sentence, version=version, slices=slices, waiting=waiting, notes=[*notes, *more]
    )


def _by_slice(records: Sequence[TrafficRecord], burn_in: int) -> tuple[dict[str, list[TrafficRecord]], list[str]]:
    """(the records of each slice in their order, notes for the reader). Beyond MOST_SLICES, those that are not among the first to have a
    baseline are combined, so that a slice leaves the combined ones once at most as the log grows, and never joins them after that.
    """
    counts, settled = Counter[str](), list[str]()
    for record in records:
        counts[record.slice] += 1
        settled += [record.slice] if counts[record.slice] == burn_in else []
    alone = set(counts) if len(counts) < MOST_SLICES else set(settled[: MOST_SLICES - 1])
    by_slice: dict[str, list[TrafficRecord]] = {}
    for record in records:
        by_slice.setdefault(record.slice if record.slice in alone else OTHERS, []).append(record)
    rare = len(counts) - len(alone)
    return by_slice, [f"{rare} rare slices are combined as `{OTHERS}`"] if rare else []


def slice_alarm(name: str, records: Sequence[TrafficRecord], burn_in: int, level: float) -> SliceAlarm:
    """Test the requests of a slice after its first ``burn_in``; ``level`` is the probability of a false alarm."""
    accepted_N = np.array([record.accepted for record in records], dtype=np.float64)
    drafted_N = np.array([record.drafted for record in records], dtype=np.float64)
    fall, over = find_fall(accepted_N, drafted_N, burn_in, level)
    change = fall or change_at(accepted_N, drafted_N, np.array([burn_in]), 2 * level)[0]
    return SliceAlarm(
        name=name,
        requests=len(records),
        rate=change.rate,
        baseline=change.before,
        change=change.rate - change.before,
        ci=change.interval,
        since=fall.since if fall else None,
        over=over,
        time=moment_of(records[fall.since - 1].time) if fall else None,
    )


def find_fall(
    accepted_N: np.ndarray, drafted_N: np.ndarray, burn_in: int, level: float, least: float = DROP
) -> tuple[Change | None, list[tuple[int, int]]]:
    """(the fall that lasts until the last request, [first, last] of those that are over), requests counted from 1. The requests of a fall
    that is over do not join the baseline of the next.
    """
    left_N, over = np.arange(len(drafted_N)), list[tuple[int, int]]()
    while (fall := certain_change(accepted_N[left_N], drafted_N[left_N], -1, level, burn_in, least)) is not None:
        behind_N = left_N[fall.since - 1 :]
        rise = certain_change(accepted_N[behind_N], drafted_N[behind_N], 1, level, STEP)
        if rise is None:
            return replace(fall, since=int(behind_N[0]) + 1), over
        over.append((int(behind_N[0]) + 1, int(behind_N[rise.since - 2]) + 1))
        left_N = np.delete(left_N, slice(fall.since - 1, fall.since + rise.since - 2))
    return None, over
