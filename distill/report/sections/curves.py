"""Curves: acceptance over steps, survival by position, speed-up over gamma."""

from distill.report.section import Content, Part, Piece, figures, section
from distill.report.table import Cell, Column, Table
from distill.report.view import View

SHOWN_GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32)


@section("steps", "Acceptance over steps", order=20, nav="Steps")
def steps(view: View) -> Content:
    """alpha and tau of every judged checkpoint."""
    rows = view.verdict.checkpoints
    if len(rows) < 2:
        return "Only one checkpoint was judged, so there is no curve over steps."
    judged_on = "Every checkpoint was judged on the same frozen held-out text, with tau by replay."
    if any(step.live_check for step in rows):
        judged_on += (
            " Crosses: tau of the prompts that each checkpoint decoded live, other prompts and other text each time. Each was "
            "compared with replay of that text."
        )
    if any(step.fresh_check for step in rows):
        judged_on += " Crosses: alpha of prompts that the target's server answered again, other prompts each time."
    shown = figures(view, ("steps_alpha", "alpha, acceptance rate"), ("steps_tau", "tau, tokens per target call"))
    return [f"{judged_on} The dashed line is the draft before training. The bands are 95 % intervals.", shown]


@section("survival", "Survival by position", order=30, nav="Survival")
def survival(view: View) -> Content:
    """How often the first j drafted tokens are all accepted."""
    if not view.survival:
        return "Survival by position is not known: nothing was decoded live and no rule could be replayed."
    line = (
        "How often the first j drafted tokens of a block are all accepted. Every drafted token costs time, so use a small gamma if the "
        "curve falls fast. The judged draft was counted live if it was decoded; the others are by replay."
    )
    return [line, figures(view, ("survival", "share of blocks whose first j drafted tokens are accepted"))]


@section("speed", "Speed-up over gamma", order=40, nav="Speed")
def speed(view: View) -> Content:
    """tau and predicted speed-up over gamma, under each rule, and at other step times."""
    if view.curves is None:
        return "There are no curves over gamma: no rule could be replayed on this held-out text."
    parts: list[Part] = [
        speed_line(view),
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
    times = Piece("times", (times_line(view), view.times, times_table(view)))
    return [*parts, Piece("heading", "At other step times"), times]


def speed_line(view: View) -> str:
    """The timed speed-up, and the costs that the curve is predicted from."""
    verdict, costs, row = view.verdict, view.verdict.costs, view.verdict.row(view.draft.way)
    if costs is None:
        return "Nothing was timed on this machine. The table below is for the step times above it."
    timed = f"Timed: {row.speed_up:.2f}x at gamma {row.gamma}. " if row is not None and row.speed_up is not None else ""
    ends = verdict.best_gamma_range
    if ends is None:
        best = "no gamma is predicted to pay off"
    else:
        gammas = f"{ends[0]} to {ends[1]} are" if ends[0] < ends[1] else f"{ends[0]} is"
        best = f"gamma {gammas} predicted to be best, within 3 %"
    return f"{timed}The curve is predicted from c = {costs.cost_ratio:.2f}{of_block(view)} at batch {costs.batch_size}: {best}."


def of_block(view: View) -> str:
    """The unit of the cost ratio if the judged draft drafts a block in one pass, else nothing."""
    return " per block" if view.draft.drafting == "parallel" else ""


def times_line(view: View) -> str:
    """The step times that the speed-up is predicted for, and their source."""
    times, example = view.times, "an example: nothing was measured here"
    return (
        f"target step {1e3 * times.target_seconds:.4g} ms, draft call {1e3 * times.draft_seconds:.4g} ms (c = "
        f"{times.cost_ratio:.3f}{of_block(view)}); each drafted token adds {100 * times.verify_extra:.1f} % to the target's "
        f"call ({'measured here' if times.measured else example})"
    )


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
