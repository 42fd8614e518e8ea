"""The tables and single lines of a report, for the page and for its Markdown twin. Pure: a result in, text out.

The page draws a cell's `bar`, Markdown leaves it out. Numbers are shown as they are in the
result; what is null there is shown as an en dash.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distill.run.result import Contestant, Curve, ResponseSeen, Result, RuleCurves, SliceRow
from distill.run.verdict_record import WAYS, Outcome, Verdict
from speculative.measure.cost import predicted_speed_up

NOTHING = "\N{EN DASH}"
OUTCOMES: dict[Outcome, str] = {
    "pays_off": "Pays off",
    "best_together": "Best together with lookup",
    "rival_better": "Something free is better",
    "no_speed": "No speed-up",
    "no_measurable_gain": "No measurable gain",
    "loss": "Loss",
    "not_timed": "Not timed",
}
TOO_FEW_TIMED = "too few prompts timed for an interval"
SHOWN_DISAGREEMENTS = 12  # the page folds the rest
SHOWN_GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32)
ORDERED_DIMENSIONS = ("prompt length", "position", "target entropy", "first tokens")
CONTROL_SIGNS: dict[int, int | str] = {code: 0x2400 + code for code in range(32)}
WRITERS = {"draft": "draft, accepted", "target": "target, corrected", "bonus": "target, bonus"}


@dataclass(frozen=True)
class Cell:
    """One entry of a table. `note` is the small second line; `mark` a word that warns; `bar` and `tick` lie in 0..1."""

    text: str
    note: str = ""
    mark: str = ""
    bar: float | None = None
    tick: float | None = None
    strong: bool = False
    code: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under columns; the first `texts` columns are words, the rest numbers."""

    columns: tuple[str, ...]
    rows: list[list[Cell]]
    title: str = ""
    texts: int = 1


@dataclass(frozen=True)
class GivenTimes:
    """Times in seconds of a target step and a draft call at which a speed-up is computed.

    verify_extra: how much each drafted token lengthens the target's call.

    source: "given", "measured" or "example".
    """

    target_seconds: float
    draft_seconds: float
    verify_extra: float = 0.0
    source: str = "given"

    @property
    def cost_ratio(self) -> float:
        return self.draft_seconds / self.target_seconds

    def speed_up(self, gamma: int, tau: float, parallel: bool = False) -> float:
        """tau / (gamma c + v) with v = 1 + gamma * verify_extra; parallel: a block is one draft call."""
        c = self.cost_ratio / (max(gamma, 1) if parallel else 1)
        return predicted_speed_up(tau, gamma, c, 1 + gamma * self.verify_extra)

    def speed_ups(self, curve: Curve, parallel: bool = False) -> dict[int, float]:
        """{gamma: speed-up} along a curve."""
        return {gamma: self.speed_up(gamma, tau, parallel) for gamma, tau in zip(curve.gammas, curve.tau, strict=True)}


def number(value: float | None, digits: int = 3) -> str:
    """Fixed digits, an en dash for null."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def signed(value: float | None, digits: int = 3) -> str:
    """As `number`, with its sign."""
    return NOTHING if value is None else f"{value:+.{digits}f}"


def times(value: float | None) -> str:
    """`1.12x`."""
    return NOTHING if value is None else f"{value:.2f}x"


def percent(value: float | None, digits: int = 0) -> str:
    """`12 %` of a share."""
    return NOTHING if value is None else f"{100 * value:.{digits}f} %"


def interval(ends: Sequence[float] | None, digits: int = 3, sign: bool = False) -> str:
    """`[low, high]`, nothing for null."""
    return "" if ends is None else f"[{', '.join(f'{end:{chr(43) if sign else str()}.{digits}f}' for end in ends)}]"


def count(number_of: int, noun: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{number_of:,} {noun}{'' if number_of == 1 else 's'}"


def visible(text: str) -> str:
    """Text of a model in one line: white space and control characters as signs."""
    signs = text.translate(CONTROL_SIGNS | {ord("\n"): "↵", ord("\t"): "⇥", 0x7F: "␡"})
    return re.sub("^ +| +$", lambda edge: "␣" * len(edge[0]), signs) or "∅"


def token_text(text: str) -> str:
    """A token in running text: a newline is shown and made, other control characters become signs."""
    return text.translate(CONTROL_SIGNS | {ord("\n"): "↵\n", ord("\t"): "⇥\t"}) or "∅"


def find(rows: Iterable[Contestant], name: str) -> Contestant | None:
    """The row of that name, or None."""
    return next((row for row in rows if row.name == name), None)


def judged(result: Result) -> Contestant:
    """The contestant that the report is about: the best, or the only one."""
    return find(result.contestants, "best") or result.contestants[-1]


def main_curves(result: Result) -> RuleCurves | None:
    """Curves of the rule that was judged; of the first rule where that one has none."""
    rules = result.curves.rules if result.curves else []
    return next((curves for curves in rules if curves.rule == result.verdict.rule), rules[0] if rules else None)


def measured_times(result: Result) -> GivenTimes:
    """The times that were measured, v as a slope; without any, an example."""
    costs = result.costs
    if not costs:
        return GivenTimes(0.025, 0.003, 0.02, "example")
    measured = costs.verify_ratio
    gamma = min(measured, key=lambda known: abs(known - result.verdict.gamma), default=0)
    extra = max(0.0, (measured[gamma] - 1) / gamma) if gamma else 0.0
    return GivenTimes(costs.target_step_seconds, costs.draft_step_seconds, extra, "measured")


def way_of(verdict: Verdict) -> str:
    """How the best drafts, in words; empty where it can only draft token by token."""
    both = verdict.drafting == "parallel" or any(rival.name in WAYS.values() for rival in verdict.rivals)
    return WAYS[verdict.drafting] if both else ""


def cost_words(verdict: Verdict, ratio: float, digits: int = 2) -> str:
    """`c = 0.25`, of a block where the best drafts it in one pass."""
    return f"c = {ratio:.{digits}f}{' of a block' if verdict.drafting == 'parallel' else ''}"


def in_one_pass(result: Result, name: str) -> bool:
    """Whether a contestant, or the draft in question otherwise, drafts a block in one pass."""
    return name == WAYS["parallel"] or (name == judged(result).name and result.verdict.drafting == "parallel")


def timed_speed_ups(result: Result, curve: Curve) -> dict[int, float]:
    """{gamma: predicted speed-up} of a curve at the gammas up to the largest one that was timed."""
    last = max(result.costs.verify_ratio, default=None) if result.costs else None
    return {
        gamma: value
        for gamma, value in zip(curve.gammas, curve.speed_up or [], strict=False)
        if value is not None and (last is None or gamma <= last)
    }


def labels_of(result: Result) -> dict[str, str]:
    """{name: what a reader is told}, in the order of the result."""
    return {row.name: row.label or row.name for row in result.contestants}


def in_order(result: Result, curves: RuleCurves) -> list[tuple[str, Curve]]:
    """(name, curve) of the contestants that have one, in the order of the result."""
    return [(row.name, curves.contestants[row.name]) for row in result.contestants if row.name in curves.contestants]


def headline_table(result: Result) -> Table:
    """The judged draft, then every other contestant: alpha, tau, accepted / drafted, speed-up, tokens per second."""
    verdict, main = result.verdict, judged(result)
    rows = [main, *(row for row in result.contestants if row is not main)]
    # Best minus baseline and best minus served, each paired on the frozen text.
    known = {"gain, same text": verdict.effects, "against the served draft": verdict.against_served}
    compared = {name: effects for name, effects in known.items() if effects}
    heads = [f"{row.label or row.name}" + (f" (step {row.step})" if row.step is not None else "") for row in rows]
    heads[0] += f", {way}" if (way := way_of(verdict)) else ""

    def line(name: str, key: str, digits: int, how: Any = number) -> list[Cell]:
        cells = [Cell(name)]
        for row in rows:
            note = interval(getattr(row, f"{key}_ci", None), digits)
            if key == "speed_up" and row.speed_up is not None and not note:
                note = TOO_FEW_TIMED
            if key == "tau" and row.tau_by == "replay":
                note = f"{note} by replay".strip()
            cells.append(Cell(how(getattr(row, key)), note, strong=row is main))
        for effects in compared.values():
            gain = getattr(effects, key, None)
            cells.append(
                Cell(signed(gain.gain, digits), interval(gain.ci, digits, sign=True)) if gain else Cell(NOTHING)
            )
        return cells

    table = [
        line("alpha", "alpha", 3),
        line("tau", "tau", 2, lambda value: number(value, 2)),
        line(f"accepted / drafted at gamma {verdict.gamma}", "accepted_per_drafted", 3),
        line("speed-up", "speed_up", 2, times),
        line("tokens/s", "tokens_per_second", 0, lambda value: number(value, 0)),
    ]
    shown = [cells for cells in table if any(cell.text != NOTHING for cell in cells[1:])]
    return Table(("", *heads, *compared), shown)


def contest_table(result: Result) -> Table | None:
    """What could be run, fastest first: the target alone, every draft, what needs no training; None where nothing was timed."""
    verdict, labels = result.verdict, labels_of(result)
    if verdict.target_tokens_per_second is None:
        return None
    drafts = {"baseline": verdict.baseline, "served": verdict.served, "best": verdict.best}
    alone = verdict.target_tokens_per_second
    found = [_contest_row("the target alone", "", verdict.run == "target", None, 1.0, alone, (1.0, None))]
    for name, draft in drafts.items():
        if draft is not None and name in (verdict.speed_up or {}):
            fast = ((verdict.speed_up or {})[name], (verdict.speed_up_ci or {}).get(name) or TOO_FEW_TIMED)
            chosen, rate = verdict.run == name, draft.tokens_per_second
            found.append(
                _contest_row(
                    labels.get(name, name),
                    way_of(verdict) if name == "best" else "",
                    chosen,
                    draft.speed_gamma,
                    draft.speed_tau,
                    rate,
                    fast,
                )
            )
    for rival in verdict.rivals:
        sizes = f"n-grams of {rival.ngrams[1]} to {rival.ngrams[0]}" if rival.ngrams else ""
        sizes += f", then a draft of {rival.then_gamma}" if rival.then_gamma else ""
        sizes += f" ({rival.behind})" if rival.behind not in (None, "best") else ""
        if rival.alpha_change:
            sizes = f"alpha {rival.alpha_change.gain:+.3f} {interval(rival.alpha_change.ci)}"
        fast, chosen = (rival.speed_up, rival.speed_up_ci or TOO_FEW_TIMED), verdict.run == rival.name
        row = _contest_row(rival.name, sizes, chosen, rival.gamma, rival.tau, rival.tokens_per_second, fast)
        row[1][-1] = Cell(times(rival.draft_over_it), interval(rival.draft_over_it_ci, 2))
        found.append(row)
    found.sort(key=lambda row: -row[0])
    columns = ("run", "gamma", "tau", "tokens/s", "speed-up", "the draft over it")
    return Table(columns, [cells for _, cells in found], "What could be run")


def _contest_row(
    name: str,
    note: str,
    chosen: bool,
    gamma: int | None,
    tau: float | None,
    rate: float | None,
    fast: tuple[float, Any],
) -> tuple[float, list[Cell]]:
    """(speed-up, cells); fast: speed-up and its interval, or why there is none."""
    speed_up, ends = fast
    return speed_up, [
        Cell(name, note, "run this" if chosen else "", strong=chosen),
        Cell(NOTHING if gamma is None else str(gamma)),
        Cell(number(tau, 2)),
        Cell(number(rate, 0)),
        Cell(times(speed_up), ends if isinstance(ends, str) else interval(ends, 2)),
        Cell(NOTHING),
    ]


def rules_table(result: Result) -> Table | None:
    """Each engine rule: what the judged draft reaches under it, at this gamma and at the best one."""
    name, gamma = judged(result).name, result.verdict.gamma
    rows = []
    for curves in result.curves.rules if result.curves else []:
        curve = curves.contestants.get(name)
        if curve is None:
            continue
        taus = dict(zip(curve.gammas, curve.tau, strict=True))
        fast = timed_speed_ups(result, curve)
        best = max(fast, key=fast.__getitem__, default=None)
        rows.append(
            [
                Cell(curves.rule, curves.note or "", strong=curves.rule == result.verdict.rule),
                Cell(number(curve.alpha), interval(curve.alpha_ci)),
                Cell(number(taus.get(gamma), 2)),
                Cell(NOTHING if best is None else "none" if best == 0 else str(best)),
                Cell(times(None if best is None else fast[best])),
            ]
        )
    return Table(("rule", "alpha", f"tau at gamma {gamma}", "best gamma", "speed-up there"), rows) if rows else None


def given_table(result: Result, given: GivenTimes) -> Table | None:
    """Speed-up over gamma at other step times, one column a contestant, the best of each in bold."""
    curves = main_curves(result)
    if curves is None:
        return None
    labels = labels_of(result)
    columns = {name: given.speed_ups(curve, in_one_pass(result, name)) for name, curve in in_order(result, curves)}
    gammas = [gamma for gamma in SHOWN_GAMMAS if all(gamma in column for column in columns.values())]
    best = {name: max(gammas, key=column.__getitem__, default=0) for name, column in columns.items()}
    rows = [
        [
            Cell(str(gamma)),
            *(Cell(times(column[gamma]), strong=best[name] == gamma) for name, column in columns.items()),
        ]
        for gamma in gammas
    ]
    return Table(("gamma", *(labels[name] for name in columns)), rows, texts=0)


def slice_tables(result: Result) -> list[Table]:
    """One table a dimension; what has no order of its own is sorted by lost tokens, worst first."""
    labels, main = labels_of(result), judged(result).name
    tables = []
    for group in result.slices:
        rows = list(group.rows)
        if not rows:
            continue
        if group.dimension not in ORDERED_DIMENSIONS:
            rows.sort(key=lambda row: -(row.lost_share or 0.0))
        names = [name for name in labels if any(name in row.alpha for row in rows)]
        worst = max(rows, key=lambda row: row.lost_share or 0.0) if len(rows) > 1 else None
        has_gain = any(row.gain is not None for row in rows)
        names.sort(key=lambda name: name != main)
        alphas = [f"alpha {labels[name]}" for name in names]
        columns = (
            group.dimension,
            alphas[0],
            *(["gain"] if has_gain else []),
            "share of losses",
            *alphas[1:],
            "tokens",
        )
        unit = f" ({group.unit})" if group.unit else ""
        cells = [_slice_cells(row, names, row is worst, has_gain) for row in rows]
        tables.append(Table(columns, cells, f"By {group.dimension}{unit}"))
    return tables


def _slice_cells(row: SliceRow, names: Sequence[str], worst: bool, has_gain: bool) -> list[Cell]:
    """`names` begins with the judged draft, whose bar carries the baseline as a tick."""
    falls = row.certain == "loss"
    alphas = [Cell(number(row.alpha.get(name)), interval(row.alpha_ci.get(name))) for name in names]
    alphas[0] = replace(alphas[0], bar=row.alpha.get(names[0]), tick=row.alpha.get("baseline"), strong=True)
    gain = Cell(signed(row.gain), interval(row.gain_ci, sign=True), "worse" if falls else "")
    return [
        Cell(str(row.name), count(row.prompts, "prompt"), "loses most" if worst else ""),
        alphas[0],
        *([gain] if has_gain else []),
        Cell(percent(row.lost_share), bar=row.lost_share),
        *alphas[1:],
        Cell(f"{row.tokens:,}"),
    ]


def targets_table(result: Result) -> Table | None:
    """The draft on every target that it learned from."""
    verdict = result.verdict
    if not verdict.targets:
        return None
    rows = [
        [
            Cell(one.target), Cell(number(one.weight, 2)), Cell(number(one.alpha)), Cell(number(one.tau, 2)), Cell(number(one.baseline_tau, 2)),
            Cell(signed(one.alpha_gain.gain), interval(one.alpha_gain.ci, sign=True)),
        ]
        for one in verdict.targets
    ]  # fmt: skip
    columns = ("other target", "weight", "alpha", "tau", "tau undistilled", "gain in alpha")
    return Table(columns, rows, "The same draft on the other targets")


def forgetting_table(result: Result) -> Table | None:
    """Every domain, trained on or not: alpha of each contestant and the change from baseline to best."""
    rows, labels = result.forgetting, labels_of(result)
    names = [name for name in labels if any(name in row.alpha for row in rows)]
    domains = {row.name: row for group in result.slices if group.dimension == "domain" for row in group.rows}
    cells = []
    for row in rows:
        change, same = row.change, domains.get(row.domain)
        certain = (change and change.certain) or (same and same.certain)
        falls = certain == "loss"
        cells.append(
            [
                Cell(str(row.domain), "" if row.trained_on else "not trained on"),
                Cell(f"{row.tokens:,}"),
                *(Cell(number(row.alpha.get(name)), interval(row.alpha_ci.get(name))) for name in names),
                Cell(
                    signed(change.gain if change else None),
                    interval(change.ci if change else None, sign=True),
                    "forgotten" if falls else "",
                ),
            ]
        )
    return Table(("domain", "tokens", *(f"alpha {labels[name]}" for name in names), "change"), cells) if rows else None


def disagreement_table(result: Result, start: int = 0, stop: int | None = None) -> Table | None:
    """Where the draft loses most: what the target said and what the draft wanted; rows from `start` to `stop`."""
    every = result.disagreements
    rows = every[start:stop]
    timed = any(row.tokens_per_second_lost is not None for row in every)
    cells = [
        [
            Cell(visible(row.context), code=True),
            Cell(visible(row.target_said), code=True),
            Cell(visible(row.draft_wanted), code=True),
            Cell(f"{row.count}", f"in {count(row.prompts, 'prompt')}"),
            Cell(percent(row.lost_share, 1), bar=row.lost_share),
            Cell(number(row.tau_if_agreed, 3)),
            *([Cell(number(row.tokens_per_second_lost, 1))] if timed else []),
        ]
        for row in rows
    ]
    columns = (
        "after",
        "target said",
        "draft wanted",
        "times",
        "share of losses",
        "tau if they agreed",
        *(["tokens/s lost"] if timed else []),
    )
    return Table(columns, cells, texts=3) if rows else None


def response_facts(response: ResponseSeen) -> dict[str, int]:
    """How many tokens of a response each writer wrote."""
    return {by: sum(token.by == by for token in response.tokens) for by in WRITERS}
