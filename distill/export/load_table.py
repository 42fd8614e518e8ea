"""gamma for each number of concurrent requests, from a verdict's timings under load. Pure."""

import math

from distill.run.verdict_record import WAYS, Drafting, Verdict
from speculative.measure.load import MOST_LOAD
from speculative.measure.measured import DRAFT, TARGET

# First and last number of concurrent requests, and gamma there; 0 means plain decoding.
LoadRange = tuple[int, int, int]


def drafts_by(verdict: Verdict | None) -> dict[Drafting, str]:
    """Return the draft's row name for each way of drafting; the way that was judged is `DRAFT`."""
    own = next((one.drafting for one in verdict.drafts if one.way == DRAFT), None) if verdict else None
    return {how: DRAFT if how == own or verdict is None else name for how, name in WAYS.items()}


def gamma_by_load(verdict: Verdict | None, way: str = DRAFT) -> list[LoadRange]:
    """Return ranges from 1 to 4096 without gaps; empty if only one request at a time was timed.

    A measured load's gamma holds up to the geometric mean with the next load. gamma is 0 where the verdict runs the target alone or
    the draft was measured as slower, and from `plain_wins_from` on if that lies between two loads or above all.
    """
    if verdict is None or max(verdict.concurrencies, default=1) == 1:
        return []
    wins = verdict.plain_wins_from or MOST_LOAD + 1
    starts: list[tuple[int, int]] = []
    last = 0
    for load in verdict.concurrencies:
        row = verdict.row(way, load)
        if row is None or row.speed_up is None:
            continue
        pays = verdict.to_run(load) != TARGET and row.speed_up > 1.0
        between = wins if not pays and last < wins <= load else math.ceil(math.sqrt(last * load))
        starts.append((max(1, between) if last else 1, (row.gamma or 0) if pays else 0))
        last = load
    starts += [(wins, 0)] if last < wins <= MOST_LOAD else []
    if not starts:
        return []
    distinct = [one for number, one in enumerate(starts) if number == 0 or one[1] != starts[number - 1][1]]
    ends = [start - 1 for start, _ in distinct[1:]] + [MOST_LOAD]
    return [(start, end, gamma) for (start, gamma), end in zip(distinct, ends, strict=True)]


def load_words(ranges: list[LoadRange]) -> str:
    """Return the ranges as text, such as `1: gamma 5; 2 to 11: gamma 3; from 12: plain decoding`."""
    parts = []
    for first, last, gamma in ranges:
        where = f"from {first}" if last == MOST_LOAD else f"{first} to {last}" if last > first else f"{first}"
        parts.append(f"{where}: {f'gamma {gamma}' if gamma else 'plain decoding'}")
    return "; ".join(parts)
