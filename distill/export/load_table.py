"""The one table of gammas by number of concurrent requests, and the gamma of every command, from a verdict's timings. Pure."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from distill.run.verdict_record import WAYS, Drafting, Verdict
from speculative.measure.load import MOST_LOAD
from speculative.measure.measured import DRAFT, TARGET, Measured

# First and last number of concurrent requests, and gamma there; 0 means plain decoding.
LoadRange = tuple[int, int, int]
GAMMA_WITHOUT_VERDICT = 4


def drafts_by(verdict: Verdict | None) -> dict[Drafting, str]:
    """Return the draft's row name for each way of drafting; the way that was judged is `DRAFT`."""
    own = next((one.drafting for one in verdict.drafts if one.way == DRAFT), None) if verdict else None
    return {how: DRAFT if how == own or verdict is None else name for how, name in WAYS.items()}


class GammaPlan(NamedTuple):
    """The gammas to serve.

    gamma: of every command: that of one request at once, or of the fewest requests at which drafting pays or was timed. source: where
    it comes from, in words. gain: whether the draft pays (None: not measured). by_load: ranges from 1 to 4096 without gaps, none with
    more than `gamma`; empty if only one request at a time was timed, so `gamma` is all that is known.
    """

    gamma: int
    source: str
    gain: bool | None
    by_load: tuple[LoadRange, ...] = ()

    def at(self, load: int) -> int:
        """Return the gamma to expect at a load, at least 1."""
        return next((gamma for first, last, gamma in self.by_load if first <= load <= last and gamma), self.gamma)


def gamma_plan(verdict: Verdict | None, way: str = DRAFT) -> GammaPlan:
    """Return the gammas to serve a way of drafting with; the judged draft's if the way was not timed.

    vLLM cuts each range to the command's gamma, so a larger gamma at a higher load (a near-tie: the best gamma falls with the load)
    is cut here too.
    """
    if verdict is None:
        return GammaPlan(GAMMA_WITHOUT_VERDICT, "the default; not measured", None)
    rows = [
        row
        for name in (way, DRAFT)
        for load in verdict.concurrencies
        if (row := verdict.row(name, load)) is not None and row.way == name and row.speed_up is not None
    ]
    rows = [row for row in rows if row.way == rows[0].way]
    if not rows:
        return GammaPlan(max(1, verdict.gamma), "the verdict's; speed was not measured", None)
    ranges = _ranges(verdict, {row.concurrency: (row.gamma or 0) if _pays(verdict, row) else 0 for row in rows})
    first = next((row for row in rows if row.gamma and _pays(verdict, row)), rows[0])
    if not first.gamma:
        return GammaPlan(
            max(1, verdict.gamma), "the verdict's; no gamma was faster than the target alone", False, ranges
        )
    at = "one request at a time" if first.concurrency == 1 else f"{first.concurrency} requests at a time"
    cut = tuple((start, end, min(gamma, first.gamma)) for start, end, gamma in ranges)
    return GammaPlan(first.gamma, f"the fastest measured at {at}", verdict.pays, _merged(cut))


def _pays(verdict: Verdict, row: Measured) -> bool:
    return verdict.to_run(row.concurrency) != TARGET and (row.speed_up or 0.0) > 1.0


def _ranges(verdict: Verdict, gammas: dict[int, int]) -> tuple[LoadRange, ...]:
    """Return ranges from the gamma at each measured load; 0 means plain decoding.

    A measured load's gamma holds up to the geometric mean with the next load, and from `plain_wins_from` on it is 0 if that lies
    between two loads or above all.
    """
    if max(gammas) == 1:
        return ()
    wins = verdict.plain_wins_from or MOST_LOAD + 1
    starts: list[tuple[int, int]] = []
    last = 0
    for load, gamma in gammas.items():
        between = wins if not gamma and last < wins <= load else math.ceil(math.sqrt(last * load))
        starts.append((max(1, between) if last else 1, gamma))
        last = load
    starts += [(wins, 0)] if last < wins <= MOST_LOAD else []
    ends = [start - 1 for start, _ in starts[1:]] + [MOST_LOAD]
    return _merged(tuple((start, end, gamma) for (start, gamma), end in zip(starts, ends, strict=True)))


def _merged(ranges: tuple[LoadRange, ...]) -> tuple[LoadRange, ...]:
    """Return the ranges with neighbours of equal gamma joined."""
    groups = [list(group) for _, group in itertools.groupby(ranges, key=lambda one: one[2])]
    return tuple((group[0][0], group[-1][1], group[0][2]) for group in groups)


def load_words(ranges: Sequence[LoadRange]) -> str:
    """Return the ranges as text, such as `1: gamma 5; 2 to 11: gamma 3; from 12: plain decoding`."""
    parts = []
    for first, last, gamma in ranges:
        where = f"from {first}" if last == MOST_LOAD else f"{first} to {last}" if last > first else f"{first}"
        parts.append(f"{where}: {f'gamma {gamma}' if gamma else 'plain decoding'}")
    return "; ".join(parts)
