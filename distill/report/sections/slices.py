"""Sections on where the draft gains and loses: slices, disagreements."""

import re

from distill.report.section import Content, Part, Piece, say, section
from distill.report.table import Cell, Column, Table
from distill.report.view import View
from speculative.explain.disagreements import Disagreement
from speculative.explain.slices import SliceRow, SliceTable
from speculative.measure.measured import UNDISTILLED

SHOWN_DISAGREEMENTS = 12  # the page folds the rest
ORDERED_DIMENSIONS = ("prompt length", "position", "target entropy", "first tokens")
CONTROL_SIGNS: dict[int, int | str] = {code: 0x2400 + code for code in range(32)}


def prompts_of(count: int) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{count:,} prompt{'' if count == 1 else 's'}"


def visible(text: str) -> str:
    """Text of a model on one line, with white space and control characters as symbols."""
    signs = text.translate(CONTROL_SIGNS | {ord("\n"): "↵", ord("\t"): "⇥", 0x7F: "␡"})
    return re.sub("^ +| +$", lambda edge: "␣" * len(edge[0]), signs) or "∅"


@section("slices", "Where it gains and loses", order=60, nav="Slices")
def slices(view: View) -> Content:
    """alpha by dimension of the held-out text."""
    if not view.result.slices:
        return "There are no slices."
    groups = view.result.slices
    levels = [group.corrected_confidence for group in groups if group.corrected_confidence]
    corrected = levels and any(row.gain is not None for group in groups for row in group.rows)
    intro, intervals = say("slices", corrected, max(levels, default=0.0), untrained(view))
    return [intro, Piece("fine", intervals), *(slice_table(view, group) for group in groups if group.rows)]


def slice_table(view: View, group: SliceTable) -> Table:
    """One dimension; dimensions without a natural order are sorted by lost tokens, worst first."""
    rows, main = list(group.rows), view.draft.way
    if group.dimension not in ORDERED_DIMENSIONS:
        rows.sort(key=lambda row: -(row.lost_share or 0.0))
    others = [name for name in view.ways if name != main and any(name in row.alpha for row in rows)]
    worst = max(rows, key=lambda row: row.lost_share or 0.0) if len(rows) > 1 else None
    gains = [Column("gain", "+.3f")] if any(row.gain is not None for row in rows) else []
    table = Table(
        [
            group.dimension,
            Column(f"alpha {main}", ".3f"),
            *gains,
            Column("share of losses", ".0%"),
            *(Column(f"alpha {name}", ".3f") for name in others),
            Column("tokens", ","),
        ],
        title=f"By {group.dimension}" + (f" ({group.unit})" if group.unit else ""),
    )
    new = [row.name for row in untrained(view)] if group.dimension == "domain" else []
    for row in rows:
        alpha, before = row.alpha.get(main), row.alpha.get(UNDISTILLED)
        loss = "forgotten" if row.name in new else "worse"
        note = prompts_of(row.prompts) + (", not trained on" if row.name in new else "")
        table.add(
            Cell(row.name, note=note, mark="loses most" if row is worst else ""),
            Cell(alpha, row.alpha_ci.get(main), bar=alpha, tick=before, strong=True),
            *([Cell(row.gain, row.gain_ci, mark=loss if row.certain == "loss" else "")] if gains else []),
            Cell(row.lost_share, bar=row.lost_share),
            *(Cell(row.alpha.get(name), row.alpha_ci.get(name)) for name in others),
            row.tokens,
        )
    return table


def untrained(view: View) -> list[SliceRow]:
    """Rows of the held-out domains that were not trained on; none if nothing was trained."""
    trained_on = view.result.trained_on
    rows = next((group.rows for group in view.result.slices if group.dimension == "domain"), [])
    return [] if trained_on is None else [row for row in rows if row.name not in trained_on]


@section("disagreements", "Most expensive disagreements", order=95, nav="Disagreements")
def disagreements(view: View) -> Content:
    """The most expensive disagreements between draft and target."""
    every = view.result.disagreements
    if not every:
        return "No disagreements were recorded."
    timed = any(row.tokens_per_second_lost is not None for row in every)
    parts: list[Part] = [*say("disagreements"), disagreement_table(every[:SHOWN_DISAGREEMENTS], timed)]
    more = every[SHOWN_DISAGREEMENTS:]
    return [*parts, *([Piece("folded", (f"{len(more)} more", disagreement_table(more, timed)))] if more else [])]


def disagreement_table(rows: list[Disagreement], timed: bool) -> Table:
    """One row per disagreement. timed: add the tokens per second that it costs."""
    lost = [Column("tokens/s lost", ".1f")] if timed else []
    table = Table(
        [
            "after",
            "target's token",
            "draft's choice",
            Column("times", ","),
            Column("share of losses", ".1%"),
            Column("tau if they agreed", ".3f"),
            *lost,
        ]
    )
    for row in rows:
        said = (Cell(visible(text), code=True) for text in (row.context, row.target_said, row.draft_wanted))
        rate = [row.tokens_per_second_lost] if timed else []
        counted = Cell(row.count, note=f"in {prompts_of(row.prompts)}")
        table.add(*said, counted, Cell(row.lost_share, bar=row.lost_share), row.tau_if_agreed, *rate)
    return table
