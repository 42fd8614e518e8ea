"""A table with typed columns that renders to a terminal (rich), to the page (templates) and to Markdown.

Cells hold values; the column formats them, so that a figure is written the same way everywhere.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from speculative.measure.intervals import interval

NOTHING = "\N{EN DASH}"
NARROWEST = 8  # narrowest width in characters to which a heading is wrapped on a terminal
WIDEST_NOTE = 16  # width to which a note is wrapped


@dataclass(frozen=True)
class Column:
    """A heading, and the format of the values under it. form: a Python format (`.3f`, `+.3f`, `,`, `.0%`); empty for left-aligned text.
    unit: text after each number: `x`, ` ms`.
    """

    name: str
    form: str = ""
    unit: str = ""

    @property
    def words(self) -> bool:
        return not self.form

    def text(self, value: Any) -> str:
        """A value as text; None is an en dash, a string is unchanged."""
        if value is None:
            return NOTHING
        if isinstance(value, str):
            return value
        return format(value, self.form).replace("%", " %") + self.unit


@dataclass(frozen=True)
class Cell:
    """One entry. ci: the value's interval. note: small second line, after the interval. mark: a highlighted word. bar and tick: lengths in
    0..1 drawn on the page. code: text of a model, unchanged.
    """

    value: Any
    ci: Sequence[float] | None = None
    note: str = ""
    mark: str = ""
    bar: float | None = None
    tick: float | None = None
    strong: bool = False
    code: bool = False


@dataclass
class Table:
    """Rows of cells under columns. A string stands for a text column, and a plain value for its cell."""

    columns: Sequence[Column | str]
    rows: Iterable[Sequence[Any]] = ()
    title: str = ""
    caption: str = ""
    heads: list[Column] = field(init=False)
    cells: list[list[Cell]] = field(init=False)

    def __post_init__(self) -> None:
        self.heads = [Column(one) if isinstance(one, str) else one for one in self.columns]
        self.cells = []
        for row in self.rows:
            self.add(*row)

    def add(self, *values: Any, strong: bool = False) -> None:
        """One more row, with a value or a `Cell` for each column; strong: the whole row is bold."""
        if len(values) != len(self.heads):
            raise ValueError(f"{len(values)} values for {len(self.heads)} columns")
        row = [one if isinstance(one, Cell) else Cell(one) for one in values]
        self.cells.append([replace(cell, strong=True) for cell in row] if strong else row)

    def text(self, place: int, cell: Cell) -> str:
        """The value of a cell, formatted by its column."""
        return self.heads[place].text(cell.value)

    def note(self, place: int, cell: Cell) -> str:
        """The second line of a cell: its interval, then its note."""
        return " ".join(part for part in (interval(cell.ci, self.heads[place].form), cell.note) if part)

    def texts(self) -> list[list[str]]:
        """Every row as plain text: value, second line, mark."""
        return [
            [
                " ".join(part for part in (self.text(place, cell), self.note(place, cell), cell.mark) if part)
                for place, cell in enumerate(row)
            ]
            for row in self.cells
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Close together, so that the table of ways fits into 80 characters.
        shown = RichTable(
            title=self.title or None, caption=self.caption or None, box=box.SIMPLE_HEAD, padding=0, show_edge=False
        )
        rows = [[self._lines(place, cell) for place, cell in enumerate(row)] for row in self.cells]
        for place, width in enumerate(self._widths(rows, options.max_width)):
            head = self.heads[place]
            shown.add_column(
                Text("\n".join(_broken(head.name.replace(" / ", "/ "), width))),
                justify="left" if head.words else "right",
                no_wrap=not head.words,
                overflow="fold",
            )
            for row in rows if head.words else ():
                row[place] = [part for line in row[place] for part in _broken(line, width)]
        for cells, row in zip(self.cells, rows, strict=True):
            entries = zip(cells, row, strict=True)
            shown.add_row(*(Text("\n".join(lines), style="bold" if cell.strong else "") for cell, lines in entries))
        yield shown

    def _lines(self, place: int, cell: Cell) -> list[str]:
        notes = (interval(cell.ci, self.heads[place].form), *textwrap.wrap(cell.note, WIDEST_NOTE), cell.mark)
        return [self.text(place, cell), *(line for line in notes if line)]

    def _widths(self, rows: Sequence[Sequence[Sequence[str]]], most: int) -> list[int]:
        """Characters of each column: as its values need; where the screen is narrower, words take more lines, the widest first."""
        each = [[line for row in rows for line in row[place]] for place in range(len(self.heads))]
        widths = [max(NARROWEST, *map(len, lines)) if lines else NARROWEST for lines in each]
        parts = [
            [head.name, *lines] if head.words else [head.name] for head, lines in zip(self.heads, each, strict=True)
        ]
        least = [max(len(part.strip()) for text in texts for part in _parts(text)) for texts in parts]
        words = [place for place, head in enumerate(self.heads) if head.words]
        while sum(map(max, widths, least)) + len(widths) - 1 > most:
            place = max(words, key=lambda place: widths[place] - least[place], default=-1)
            if place < 0 or widths[place] <= least[place]:
                break
            widths[place] -= 1
        return widths

    def markdown(self, titled: bool = True) -> str:
        """A Markdown table, with its title if `titled`; all text is escaped."""
        lines = [
            "| " + " | ".join(escaped(column.name) for column in self.heads) + " |",
            "|" + "|".join("---" if column.words else "---:" for column in self.heads) + "|",
            *(
                "| " + " | ".join(self._markdown_entry(place, cell) for place, cell in enumerate(row)) + " |"
                for row in self.cells
            ),
        ]
        around = [f"**{escaped(self.title)}**", ""] if self.title and titled else []
        return "\n".join([*around, *lines, *(["", escaped(self.caption)] if self.caption else [])])

    def _markdown_entry(self, place: int, cell: Cell) -> str:
        value = self.text(place, cell)
        text = code_span(value) if cell.code else escaped(value)
        parts = (f"**{text}**" if cell.strong and text else text, escaped(self.note(place, cell)))
        mark = f"**{escaped(cell.mark)}**" if cell.mark else ""
        return " ".join(part for part in (*parts, mark) if part)


def _parts(text: str) -> list[str]:
    """A text in the parts that stay whole when it is broken: at blanks, behind slashes and hyphens."""
    return re.findall(r"[^\s/-]+[/-]?\s*|[/-]+\s*", text) or [""]


def _broken(text: str, width: int) -> list[str]:
    """The text in lines of at most this width, or wider where a part is."""
    lines = [""]
    for part in _parts(text):
        if lines[-1] and len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]


def escaped(text: str) -> str:
    """Text on one line, escaped for Markdown."""
    flat = " ".join(text.split())
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_|#~$]|\[(?=[^\]]*\]\())", r"\\\1", flat)


def code_span(text: str) -> str:
    """Text as code inside a table: the fence is longer than any run of backticks in it, and bars are escaped."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}".replace("|", "\\|")
