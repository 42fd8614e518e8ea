"""Sections of a report on the target's text and on how it is served: which contestant helps where, how much repeats.

The page and its Markdown twin show the same ones. Pure: a result in, text out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distill.report.tables import Cell, Table, count, interval, labels_of, number, percent, signed, times
from distill.run.result import Result, TemperatureRow, WhereRow
from speculative.measure.race import ALONE


@dataclass(frozen=True)
class Section:
    """A titled part of the report: lines, then tables."""

    id: str
    title: str
    lines: list[str]
    tables: list[Table]


def text_sections(result: Result) -> list[Section]:
    """Those that this result has something for."""
    made = (_where(result), _repetition(result), _temperatures(result), _proofs(result))
    return [section for section in made if section]


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


def _temperatures(result: Result) -> Section | None:
    rows = result.temperatures
    if not rows:
        return None
    serving = result.provenance.get("sampling") or {}
    timed = any(row.best_gamma is not None for row in rows)
    cells = [
        [
            Cell(f"{row.temperature:g}", row.rule, strong=row.temperature == serving.get("temperature")),
            Cell(number(row.alpha), interval(row.alpha_ci), bar=row.alpha),
            Cell(number(row.tau, 2), interval(row.tau_ci, 2)),
            *([Cell(_best(row), "predicted")] if timed else []),
            Cell(percent(row.looping, 1)),
        ]
        for row in rows
    ]
    gamma, prompts = rows[0].gamma, rows[0].prompts
    columns = ("temperature", "alpha", f"tau at gamma {gamma}", *(["best gamma"] if timed else []), "looping")
    lines = [
        f"The same draft when the target is served at other temperatures: {count(prompts, 'held-out prompt')} answered at "
        "each, alpha and tau by replay of the answers."
    ]
    return Section("temperatures", "At other temperatures", lines, [Table(columns, cells)])


def _best(row: TemperatureRow) -> str:
    return f"{row.best_gamma}: {times(row.predicted_speed_up)}" if row.best_gamma else "none pays"


def _proofs(result: Result) -> Section | None:
    """Losslessness and task scores, where `understudy evaluate` added them."""
    lines, tables = [], []
    if result.losslessness is not None:
        found = result.losslessness
        lines.append(
            f"{'Passed' if found.passed else 'FAILED'} (rule {found.rule}, gamma {found.gamma}): {found.sentence}"
        )
    if result.scores:
        rows = [
            [
                Cell(one.scorer, f"{count(one.prompts, 'prompt')} x {one.samples}", "" if one.passed else "differs"),
                Cell(number(one.speculative.score), interval(one.speculative.ci)),
                Cell(number(one.alone.score), interval(one.alone.ci)),
                Cell(signed(one.difference.value), interval(one.difference.ci, sign=True)),
            ]
            for one in result.scores
        ]
        tables.append(Table(("scorer", "with the draft", "target alone", "difference"), rows, "Task scores"))
        lines += [f"{one.scorer}: {one.sentence}" for one in result.scores]
    return Section("proofs", "Is the text still the target's?", lines, tables) if lines else None
