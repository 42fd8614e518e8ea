"""Sections on serving: load, latency and money, against numbers worked out by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from result_example import bare, example_result, not_timed, typed
from rich.console import Console
from typer.testing import CliRunner

from data.files import write_json
from distill.cli import app
from distill.config.layout import RESULT
from distill.export.load_table import run_by_load
from distill.report.markdown import markdown
from distill.report.money import Prices, money_lines, parse_prices, price_rows
from distill.report.page import render_page, summary_of
from distill.report.screen import last_screen, print_money
from distill.report.serving_tables import serving_sections
from distill.report.tables import measured_times
from speculative.errors import UserError


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return example_result()


def of_verdict(tree: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**tree, "verdict": {**tree["verdict"], **changes}}


def sections_of(tree: dict[str, Any], prices: Prices | None = None) -> dict[str, Any]:
    return {section.id: section for section in serving_sections(typed(tree), prices)}


def priced(tree: dict[str, Any]) -> dict[str, Any]:
    """A run of 1 hour; 100 tokens/s alone, 150 with the draft, at load 8 500 and 400; 50 tokens a response."""
    load = {
        "concurrency": 8, "gamma": 2, "speed_up": 0.8, "speed_up_ci": None, "predicted": 0.9, "plain_tokens_per_second": 500.0,
        "tokens_per_second": 400.0,
    }  # fmt: skip
    first = {**load, "concurrency": 1, "plain_tokens_per_second": 110.0, "tokens_per_second": 170.0}
    best = {**tree["verdict"]["best"], "tokens_per_second": 150.0}
    return of_verdict(
        tree, target_tokens_per_second=100.0, best=best, load=[first, load], prompts=20, tokens=1000,
        seconds={"train": 3000.0, "train/backward": 2000.0, "judge": 600.0},
    )  # fmt: skip


def test_load_shows_each_row_and_where_plain_wins(result: dict[str, Any]) -> None:
    section = sections_of(result)["load"]
    (table,) = section.tables
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["1", "5", "128", "198", "1.55x", "1.60x"], ["4", "3", "410", "545", "1.33x", "1.30x"], ["16", "1", "900", "828", "0.92x", "0.95x"],
    ]  # fmt: skip
    assert [row[4].mark for row in table.rows] == ["", "", "plain is faster"]
    assert [row[4].note for row in table.rows] == ["[1.40, 1.70]", "[1.20, 1.48]", ""]
    assert "From 12 concurrent requests on plain decoding is faster than the draft by itself." in section.lines
    assert any("twice as long for 42 tokens" in line for line in section.lines)


def test_load_says_what_to_run_where_rivals_were_timed(result: dict[str, Any]) -> None:
    rows = [dict(row) for row in result["verdict"]["load"]]
    for row, run in zip(rows, ("lookup + draft", "best", "target"), strict=True):
        row["rivals"] = [
            {"name": "prompt lookup", "gamma": 8, "ngrams": [3, 1], "tuned_on": "", "speed_up": 1.2, "speed_up_ci": [1.1, 1.3]},
            {"name": "lookup + draft", "gamma": 8, "ngrams": [4, 2], "then_gamma": 3, "tuned_on": "", "speed_up": 1.6, "speed_up_ci": None},
        ]  # fmt: skip
        row["run"] = run
    changed = of_verdict(result, load=rows)
    assert (
        run_by_load(typed(changed).verdict)
        == "1: lookup + draft 1.60x, 4: the draft by itself 1.33x, 16: the target alone"
    )
    assert run_by_load(typed(result).verdict) == ""
    console = Console(width=160, record=True, file=io.StringIO())
    last_screen(console, Path("runs/tiny"), typed(changed).verdict, [], None)
    assert "what to run by requests at once: 1: lookup + draft 1.60x, 4: the draft by itself" in console.export_text()
    section = sections_of(changed)["load"]
    (table,) = section.tables
    assert table.columns[-3:] == ("prompt lookup", "lookup + draft", "run")
    assert [[cell.text for cell in row[-3:]] for row in table.rows] == [
        ["1.20x", "1.60x", run] for run in ("lookup + draft", "the draft", "the target alone")
    ]
    assert [cell.strong for row in table.rows for cell in row[-3:-1]] == [False, True, False, False, False, False]
    assert table.rows[0][-3].note == "[1.10, 1.30] gamma 8"

    # A rival that one load had no room for is missing in that row alone.
    del rows[0]["rivals"][0], rows[2]["rivals"][1]
    (table,) = sections_of(of_verdict(result, load=rows))["load"].tables
    columns = [table.columns.index(name) for name in ("prompt lookup", "lookup + draft")]
    assert [[row[column].text for column in columns] for row in table.rows] == [
        ["\u2013", "1.60x"], ["1.20x", "1.60x"], ["1.20x", "\u2013"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wins", "said"),
    [
        (None, "faster than plain decoding at every load up to 4096"),
        (1, "Plain decoding is faster than the draft by itself at every load."),
        (
            40,
            "From 40 concurrent requests on plain decoding is faster than the draft by itself, by prediction beyond the 16 that were measured.",
        ),
    ],
)
def test_where_plain_wins_in_words(wins: int | None, said: str, result: dict[str, Any]) -> None:
    assert any(said in line for line in sections_of(of_verdict(result, plain_wins_from=wins))["load"].lines)


def test_latency_shows_what_was_observed(result: dict[str, Any]) -> None:
    tables = {table.title: table for table in sections_of(result)["latency"].tables}
    assert set(tables) == {"to the first token", "per token", "for a whole response"}
    assert [[cell.text for cell in row] for row in tables["to the first token"].rows] == [
        ["the target alone", "20", "25.5", "30"], ["distilled", "24", "29", "36"],
    ]  # fmt: skip
    assert [cell.text for cell in tables["for a whole response"].rows[0]] == ["the target alone", "500", "900", "1,234"]


@pytest.mark.parametrize("variant", [not_timed, bare])
def test_what_was_not_timed_has_no_section(variant: Any, result: dict[str, Any]) -> None:
    assert sections_of(variant(result)) == {}
    assert sections_of(variant(result), Prices(1.0, 1.0))["money"].tables == []


def test_money_by_hand(result: dict[str, Any]) -> None:
    alone, loaded = price_rows(typed(priced(result)), Prices(3.6, 3.6))
    # 3.6 an hour is 0.001 a second: 100 tokens/s are 10 a million, 150 are 6.67; 50 tokens are 0.0005.
    assert (alone.million_alone, alone.million_with_draft) == pytest.approx((10.0, 20 / 3))
    assert (alone.response_alone, alone.response_with_draft) == pytest.approx((5e-4, 1e-3 / 3))
    assert alone.repaid_tokens == pytest.approx(3.6 / (10e-6 - 20e-6 / 3))  # an hour, parts of a stage counted once
    assert (loaded.concurrency, loaded.million_alone, loaded.million_with_draft) == pytest.approx((8, 2.0, 2.5))
    assert loaded.repaid_tokens is None, "a token costs more with the draft there"


def test_two_devices_break_even_at_their_ratio(result: dict[str, Any]) -> None:
    prices = Prices(3.6, 7.2)
    alone, _ = price_rows(typed(priced(result)), prices)
    assert prices.break_even == 2.0
    assert alone.million_with_draft == pytest.approx(40 / 3)
    lines = money_lines(typed(priced(result)), prices)
    assert "breaks even at 2.00x" in lines[0]
    assert "never repaid at one request at a time" in lines[1]
    assert "repaid after 1,080,000 tokens" in money_lines(typed(priced(result)), Prices(3.6, 3.6))[1]


@pytest.mark.parametrize("text", ["abc", "0", "-1", "1,2,3", "1,", "inf", "nan", ","])
def test_a_price_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--price-per-hour .*2\.49,4\.98") as refused:
        parse_prices(text)
    assert "\n" not in str(refused.value)


def test_prices_on_the_command_line() -> None:
    assert parse_prices("") is None
    assert parse_prices("2.49") == Prices(2.49, 2.49)
    assert parse_prices("2.49,4.98") == Prices(2.49, 4.98)


def test_page_markdown_and_summary_have_the_same_money(result: dict[str, Any], tmp_path: Path) -> None:
    own, prices = typed(priced(result)), Prices(3.6, 3.6)
    page, twin = render_page(own, prices=prices), markdown(own, measured_times(own), prices)
    for section in serving_sections(own, prices):
        assert f'<section id="{section.id}">\n<h2>{section.title}</h2>' in page
        assert f"## {section.title}" in twin
    assert "6.67" in page
    assert "6.67" in twin
    assert "money" not in summary_of(own)
    assert summary_of(own, prices=prices)["money"][0]["million_alone"] == pytest.approx(10.0)
    printed = io.StringIO()
    print_money(Console(file=printed, width=120), own, prices)
    assert "6.67" in printed.getvalue()
    write_json(tmp_path / RESULT, priced(result))
    run = CliRunner().invoke(app, ["report", str(tmp_path), "--price-per-hour", "3.6"])
    assert run.exit_code == 0
    assert "6.67" in run.output
    assert json.loads((tmp_path / "report.json").read_text())["money"]
