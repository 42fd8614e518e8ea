"""How many tokens to draft at which number of concurrent requests, from what a verdict measured under load. Pure."""

import math

from distill.run.verdict_record import Drafting, Verdict
from speculative.measure.load import MOST_LOAD

# First and last number of concurrent requests, and gamma there; 0: plain decoding.
LoadRange = tuple[int, int, int]


def gamma_by_load(verdict: Verdict | None, drafting: Drafting | None = None) -> list[LoadRange]:
    """Ranges from 1 to 4096 without gaps; empty where judge.load was not measured, or drafting otherwise than is asked.

    A measured load's gamma holds up to the geometric middle of the next one; 0 where the draft was measured to lose, and
    from `plain_wins_from` on.
    """
    if verdict is None or not verdict.load or drafting not in (None, verdict.drafting):
        return []
    wins = verdict.plain_wins_from
    rows = [row for row in verdict.load if wins is None or row.concurrency < wins]
    starts: list[tuple[int, int]] = []
    for number, row in enumerate(rows):
        start = 1 if number == 0 else math.ceil(math.sqrt(rows[number - 1].concurrency * row.concurrency))
        starts.append((start, row.gamma if row.speed_up > 1.0 else 0))
    starts += [(wins, 0)] if wins is not None else []
    if starts[0][0] > 1:
        # Nothing below was measured, and the curve through what was says that the draft wins there.
        starts.insert(0, (1, verdict.load[0].gamma))
    distinct = [one for number, one in enumerate(starts) if number == 0 or one[1] != starts[number - 1][1]]
    ends = [start - 1 for start, _ in distinct[1:]] + [MOST_LOAD]
    return [(start, end, gamma) for (start, gamma), end in zip(distinct, ends, strict=True)]


def load_words(ranges: list[LoadRange]) -> str:
    """`1: gamma 5; 2 to 11: 3; from 12: plain decoding`."""
    parts = []
    for first, last, gamma in ranges:
        where = f"from {first}" if last == MOST_LOAD else f"{first} to {last}" if last > first else f"{first}"
        parts.append(f"{where}: {f'gamma {gamma}' if gamma else 'plain decoding'}")
    return "; ".join(parts)


def run_by_load(verdict: Verdict | None) -> str:
    """What to run at each measured load, and what it gives there; "" where that is not known."""
    names = {"best": "the draft by itself", "target": "the target alone"}
    parts = []
    for row in verdict.load if verdict else ():
        speeds = {"best": row.speed_up} | {one.name: one.speed_up for one in row.rivals}
        if row.run is not None:
            speed = f" {speeds[row.run]:.2f}x" if row.run in speeds else ""
            parts.append(f"{row.concurrency}: {names.get(row.run, row.run)}{speed}")
    return ", ".join(parts)
