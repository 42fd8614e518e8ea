"""Curves: acceptance over steps, survival by position, speed-up over gamma."""

from distill.report.section import Content, Part, Piece, figures, say, section
from distill.report.table import Cell, Column, Table
from distill.report.view import View
from speculative.measure.cost import gamma_to_run


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
    """tau and predicted speed-up over gamma, and under each rule."""
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
    return parts


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
        best, speed_up = gamma_to_run(fast) if fast else (None, None)
        table.add(
            Cell(curves.rule, note=curves.note or "", strong=curves.rule == view.verdict.rule),
            Cell(curve.alpha, curve.alpha_ci),
            dict(zip(curve.gammas, curve.tau, strict=True)).get(gamma),
            "none" if best == 0 else best,
            speed_up,
        )
    return table
