"""The one table: what its columns write, on a terminal, in Markdown and as plain text."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from distill.report.table import NOTHING, Cell, Column, Table, code_span, escaped
from speculative.measure.intervals import interval


def example() -> Table:
    table = Table(
        [
            "draft",
            Column("alpha", ".3f"),
            Column("speed-up", ".2f", "x"),
            Column("repeated", ".0%"),
            Column("gain", "+.2f"),
        ],
        title="Drafts",
        caption="[95 % interval]",
    )
    table.add("the draft", Cell(0.6421, (0.61, 0.67)), Cell(1.567, note="timed", mark="run this"), 0.123, -0.5)
    table.add("a|b [red]", None, 1.0, None, Cell(0.25, (0.1, 0.4)), strong=True)
    return table


def test_a_column_writes_its_values() -> None:
    assert example().texts() == [
        ["the draft", "0.642 [0.610, 0.670]", "1.57x timed run this", "12 %", "-0.50"],
        ["a|b [red]", NOTHING, "1.00x", NOTHING, "+0.25 [+0.10, +0.40]"],
    ]
    assert interval(None) == ""
    with pytest.raises(ValueError, match="1 values for 5 columns"):
        example().add("alone")


def test_a_terminal_shows_each_figure_above_its_interval() -> None:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(example())
    lines = console.export_text().splitlines()
    assert lines[0].strip() == "Drafts"
    (row,) = [place for place, line in enumerate(lines) if "the draft" in line]
    assert lines[row].split() == ["the", "draft", "0.642", "1.57x", "12", "%", "-0.50"]
    assert lines[row + 1].split() == ["[0.610,", "0.670]", "timed"]
    assert any("a|b [red]" in line for line in lines), "text of a name is no markup of rich's"


def test_nothing_in_a_markdown_table_is_markup() -> None:
    table = Table(["a", Column("n", ",")], [[Cell("<b>\n| *x*", mark="_m_"), 1234], [Cell("a|`b", code=True), None]])
    lines = table.markdown().splitlines()
    assert lines == [
        "| a | n |",
        "|---|---:|",
        "| &lt;b&gt; \\| \\*x\\* **\\_m\\_** | 1,234 |",
        f"| ``a\\|`b`` | {NOTHING} |",
    ]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in example().markdown().splitlines()[2:-2]} == {6}
    assert code_span("a`b``c") == "```a`b``c```"
    assert escaped("[a](b)") == "\\[a](b)"


def test_a_narrow_terminal_breaks_no_word() -> None:
    table = Table(
        ["", "rule", Column("target step, ms", ".2f"), "verify call, ms, by gamma", "break-even alpha"],
        title="measured",
    )
    table.add("target alone", "", 4.2, "1:6.8 2:5.9 4:6.3", "")
    table.add("/data/models/runs/support", "greedy-draft", 6.59, "1:10.1 2:8.6 4:11.1", "1:never 2:0.86 4:0.81")
    for width in (60, 80, 120):
        console = Console(width=width, file=io.StringIO(), record=True)
        console.print(table)
        lines = [line.rstrip() for line in console.export_text().splitlines()]
        assert max(map(len, lines)) <= width
        text = " ".join(lines)
        for word in (
            "data",
            "models",
            "support",
            "draft",
            "target",
            "gamma",
            "alpha",
            "1:10.1",
            "1:never",
            "4:0.81",
        ):
            assert re.search(rf"(?<![\w.:]){word}(?![\w.:])", text), (width, word)
    assert "/data/models/runs/support greedy-draft" in text, "where there is room nothing is broken"
