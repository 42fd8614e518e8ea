"""Sections of a report on the target's text and on how it is served: which contestant helps where, how much repeats.

The page and its Markdown twin show the same ones. Pure: a result in, text out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distill.report.tables import Cell, Table, count, interval, labels_of, percent, times
from distill.run.result import Result, WhereRow

ALONE = "target"


@dataclass(frozen=True)
class Section:
    """A titled part of the report: lines, then tables."""

    id: str
    title: str
    lines: list[str]
    tables: list[Table]


def text_sections(result: Result) -> list[Section]:
    """Those that this result has something for."""
    return [section for section in (_where(result), _repetition(result)) if section]


def _where(result: Result) -> Section | None:
    if not result.where:
        return None
    labels = labels_of(result) | {ALONE: "the target alone"}
    dimensions = dict.fromkeys(row.dimension for row in result.where)
    tables = [_where_table([row for row in result.where if row.dimension == name], labels) for name in dimensions]
    lines = [
        "Speed-up over the target alone, by part of the text. Bold is the fastest there; “certain” where it beats all the "
        "others for certain, over the rows of its table together."
    ]
    return Section("where", "Which one helps where", lines, tables)


def _where_table(rows: Sequence[WhereRow], labels: dict[str, str]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.speed_up))
    cells = [
        [
            Cell(row.name, count(row.prompts, "prompt"), "nothing helps" if row.best == ALONE else ""),
            *(
                Cell(
                    times(row.speed_up.get(name)),
                    interval(row.speed_up_ci.get(name), 2),
                    "certain" if name == row.best and row.certain else "",
                    strong=name == row.best,
                )
                for name in names
            ),
            Cell(percent(row.repeated), bar=row.repeated),
            Cell(f"{row.tokens:,}"),
        ]
        for row in rows
    ]
    title = {"domain": "By domain", "repetition": "By how repetitive the response is"}
    dimension = rows[0].dimension
    columns = (dimension, *(labels.get(name, name) for name in names), "repeated", "tokens")
    return Table(columns, cells, title.get(dimension, f"By {dimension}"))


def _repetition(result: Result) -> Section | None:
    found = result.verdict.repetition
    if found is None:
        return None
    parts = {"all": found, **(found.by_domain if len(found.by_domain) > 1 else {})}
    rows = [
        [
            Cell(name),
            Cell(percent(part.repeated, 1), bar=part.repeated),
            Cell(percent(part.looping, 1), bar=part.looping),
            Cell(f"{result.verdict.tokens if part.tokens is None else part.tokens:,}"),
        ]
        for name, part in parts.items()
    ]
    lines = [
        "Of the target's own text: tokens inside 8 in a row that stood earlier in prompt or response (repeated), and tokens "
        "of a stretch that goes round and round (looping). What repeats, prompt lookup finds without a draft."
    ]
    return Section(
        "repetition", "How much of the text repeats", lines, [Table(("text", "repeated", "looping", "tokens"), rows)]
    )
