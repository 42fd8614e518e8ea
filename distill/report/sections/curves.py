"""Curves: acceptance over steps, survival by position, speed-up over gamma."""

from distill.report.section import Content, Part, Piece, figures, say, section
from distill.report.table import Cell, Column, Table
from distill.report.view import View

SHOWN_GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32)


@section("steps", "Acceptance over steps", order=20, nav="Steps")
def steps(view: View) -> Content:
    """alpha and tau of every judged checkpoint."""
    rows = view.verdict.checkpoints
    if len(rows) < 2:
        return "Only one checkpoint was judged, so there is no curve over steps."
    shown = figures(view, ("steps_alpha", "alpha, acceptance rate"), ("steps_tau", "tau, tokens per target call"))
    return [*say("steps", rows), shown]


@section("survival", "Survival by position", order=30, nav="Survival")
def survival(view: View) -> Content:
    """How often the first j drafted tokens are all accepted."""
    if not view.survival:
        return "Survival by position is not known: nothing was decoded live and no rule could be replayed."
    return [*say("survival"), figures(view, ("survival", "share of blocks whose first j drafted tokens are accepted"))]


@section("speed", "Speed-up over gamma", order=40, nav="Speed")
def speed(view: View) -> Content:
    """tau and predicted speed-up over gamma, under each rule, and at other step times."""
    if view.curves is None:
        return "There are no curves over gamma: no rule could be replayed on this held-out text."
    parts: list[Part] = [
        *say("speed", view),
        figures(
            view,
            ("tau", "tau by replay of the held-out text"),
            (
                "speed",
                "speed-up predicted for this machine: tau / (gamma c + v), with the host's time and the prompt's",
            ),
        ),
    ]
    rules = rules_table(view)
    parts += [Piece("heading", "Under each engine's rule"), rules] if rules.cells else []
    refused = view.result.curves.refused if view.result.curves else {}
    parts += [Piece("fine", f"Rule {rule} is left out: {why}.") for rule, why in refused.items()]
    times = Piece("times", (say("times", view)[0], view.times, times_table(view)))
    return [*parts, Piece("heading", "At other step times"), times]


def rules_table(view: View) -> Table:
    """Acceptance and predicted speed-up of the judged draft under each engine rule."""
    gamma, rules = view.verdict.gamma, view.result.curves.rules if view.result.curves else []
    at_gamma, best_there = Column(f"tau at gamma {gamma}", ".2f"), Column("predicted there", ".2f", "x")
    table = Table(["rule", Column("alpha", ".3f"), at_gamma, Column("best gamma", "d"), best_there])
    for curves in rules:
        curve = curves.ways.get(view.draft.way)
        if curve is None:
            continue
        fast = view.timed_speed_ups(curve)
        best = max(fast, key=fast.__getitem__, default=None)
        table.add(
            Cell(curves.rule, note=curves.note or "", strong=curves.rule == view.verdict.rule),
            Cell(curve.alpha, curve.alpha_ci),
            dict(zip(curve.gammas, curve.tau, strict=True)).get(gamma),
            "none" if best == 0 else best,
            None if best is None else fast[best],
        )
    return table


def times_table(view: View) -> Table:
    """Predicted speed-up over gamma at other step times, one column per way, the best of each in bold."""
    assert view.curves is not None
    curves = view.in_order(view.curves)
    columns = [view.times.speed_ups(curve, view.in_one_pass(name)) for name, curve in curves]
    gammas = [gamma for gamma in SHOWN_GAMMAS if all(gamma in column for column in columns)]
    best = [max(gammas, key=column.__getitem__, default=0) for column in columns]
    table = Table([Column("gamma", "d"), *(Column(name, ".2f", "x") for name, _ in curves)])
    for gamma in gammas:
        table.add(gamma, *(Cell(column[gamma], strong=top == gamma) for column, top in zip(columns, best, strict=True)))
    return table
