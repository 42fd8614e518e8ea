"""The one table of gammas by number of concurrent requests, and the gamma of every command, from a verdict's timings. Pure."""

import math
from typing import NamedTuple

from distill.engines.protocol.engine import engine_in
from distill.engines.protocol.facts import LoadRange
from distill.run.verdict_record import WAYS, Drafting, Verdict
from speculative.measure.load import MOST_LOAD
from speculative.measure.measured import DRAFT, TARGET

GAMMA_WITHOUT_VERDICT = 4


def drafts_by(verdict: Verdict | None) -> dict[Drafting, str]:
    """Return the draft's row name for each way of drafting; the way that was judged is `DRAFT`."""
    own = next((one.drafting for one in verdict.drafts if one.way == DRAFT), None) if verdict else None
    return {how: DRAFT if how == own or verdict is None else name for how, name in WAYS.items()}


class GammaPlan(NamedTuple):
    """The gamma of every command (at one request, or the fewest that pay), its source in words, whether the draft pays (None: not
    measured), and ranges of loads from 1 to 4096, none with more than `gamma`; empty if only one request at a time was timed.
    """

    gamma: int
    source: str
    gain: bool | None
    by_load: tuple[LoadRange, ...] = ()


def gamma_plan(verdict: Verdict | None, way: str = DRAFT, engine: str = "") -> GammaPlan:
    """Return the gammas to serve a way of drafting with; the judged draft's if the way was not timed.

    engine: name of the engine to serve with. If engine_costs.json is about it, its step times decide (`EngineCosts.rows`).

    A measured load's gamma is 0 where the verdict runs the target alone or the draft was slower. Engines cut every load's gamma to the
    command's, so a larger one at a higher load (a near-tie: the best gamma falls with the load) is cut here too.
    """
    if verdict is None:
        return GammaPlan(GAMMA_WITHOUT_VERDICT, "the default; not measured", None)
    if engine and verdict.engine is not None and engine_in(verdict.engine.engine).name == engine:
        runs = {load: row.gamma or 0 for load, row in verdict.engine_runs.items()}
        most = next((gamma for gamma in runs.values() if gamma), 0)
        wins = verdict.engine.plain_wins_from(verdict.replay, verdict.response_tokens) or MOST_LOAD + 1
        ranges = _ranges({load: min(gamma, most) for load, gamma in runs.items()}, wins)
        return GammaPlan(most or max(1, verdict.gamma), verdict.engine.label, most > 0, ranges)
    timed = [
        [
            row
            for load in verdict.concurrencies
            if (row := verdict.row(name, load)) is not None and row.speed_up is not None
        ]
        for name in (way, DRAFT)
    ]
    rows, judged = timed[0] or timed[1], max(1, verdict.gamma)
    if not rows:
        return GammaPlan(judged, "the verdict's; speed was not measured", None)
    drafting = [row for row in rows if row.gamma and verdict.run.get(str(row.concurrency)) != TARGET]
    paying = [row for row in drafting if (row.speed_up or 0.0) > 1.0]
    first = (paying or rows)[0]
    gammas = {row.concurrency: min(row.gamma or 0, first.gamma or 0) if row in paying else 0 for row in rows}
    ranges = _ranges(gammas, verdict.plain_wins_from or MOST_LOAD + 1) if max(gammas) > 1 else ()
    if not first.gamma:
        return GammaPlan(judged, "the verdict's; no gamma was faster than the target alone", False, ranges)
    at = "one request" if first.concurrency == 1 else f"{first.concurrency} requests"
    return GammaPlan(first.gamma, f"the fastest measured at {at} at a time", verdict.pays, ranges)


def _ranges(gammas: dict[int, int], wins: int) -> tuple[LoadRange, ...]:
    """Return ranges from the gamma at each measured load; 0 means plain decoding, which `wins` from a load on.

    A gamma holds up to the geometric mean with the next load; it is 0 from `wins` on if that lies between two loads or above all.
    """
    starts: list[tuple[int, int]] = []
    last = 0
    for load, gamma in gammas.items():
        between = wins if not gamma and last < wins <= load else math.ceil(math.sqrt(last * load))
        starts.append((max(1, between) if last else 1, gamma))
        last = load
    starts += [(wins, 0)] if last < wins <= MOST_LOAD else []
    distinct = [one for number, one in enumerate(starts) if number == 0 or one[1] != starts[number - 1][1]]
    ends = [start - 1 for start, _ in distinct[1:]] + [MOST_LOAD]
    return tuple((start, end, gamma) for (start, gamma), end in zip(distinct, ends, strict=True))
