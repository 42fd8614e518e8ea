"""The sections of a report: what they show is what the result holds; money and marks by hand."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from result_example import bare, example_result, not_timed, typed
from rich.console import Console
from typer.testing import CliRunner

from data.files import write_json
from distill.cli import app
from distill.config.layout import RESULT
from distill.report.money import Prices, parse_prices, price_rows
from distill.report.page import filled_sections
from distill.report.screen import last_screen
from distill.report.section import Piece, say
from distill.report.sections.curves import rules_table
from distill.report.sections.money import money_lines
from distill.report.sections.run import run_facts
from distill.report.sections.slices import visible
from distill.report.sections.text import token_text
from distill.report.table import NOTHING, Table
from distill.report.view import View
from speculative.measure.cost import gamma_to_run
from speculative.measure.measured import DRAFT, LOOKUP, LOOKUP_DRAFT, TARGET, Measured


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return example_result()


def view_of(tree: dict[str, Any], prices: Prices | None = None) -> View:
    return View(typed(tree), prices)


def of_verdict(tree: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**tree, "verdict": {**tree["verdict"], **changes}}


def sections_of(tree: dict[str, Any], **view: Any) -> dict[str, Any]:
    return {section.id: parts for section, parts in filled_sections(view_of(tree, **view))}


def tables_of(tree: dict[str, Any], name: str, **view: Any) -> dict[str, Table]:
    """{title: table} of a section."""
    return {part.title: part for part in sections_of(tree, **view)[name] if isinstance(part, Table)}


def words_of(parts: Any) -> str:
    return " ".join(
        part if isinstance(part, str) else str(part.values) for part in parts if isinstance(part, str | Piece)
    )


def test_a_way_has_one_figure_wherever_it_is_shown(result: dict[str, Any]) -> None:
    """The timed row of the verdict, on the page, on the screen and by load."""
    timed, judged = tables_of(result, "numbers").values()
    rows = {row[0]: row for row in timed.texts()}
    assert rows["draft run this"][1:] == ["3", "0.675 [0.664, 0.687]", "2.56 by replay", "174", "1.36x [1.31, 1.42]"]
    assert rows["lookup+draft n-grams of 1 to 3, then 3 by the draft"][-1] == "1.30x [1.25, 1.35]"
    assert [row[0].strong for row in timed.cells] == [False, False, True, False, False]
    assert [row[0] for row in judged.texts()] == ["undistilled draft", "served draft", "draft"]
    assert judged.texts()[1][2:] == ["2.31 by replay", NOTHING]
    (by_load,) = tables_of(result, "load").values()
    console = Console(width=80, record=True, file=io.StringIO())
    last_screen(console, Path("runs/tiny"), typed(result).verdict, [], None)
    screen = console.export_text()
    for text in (by_load.texts()[0][3], screen, result["verdict"]["headline"]):
        assert "1.36x" in text
        assert text is screen or "[1.31, 1.42]" in text
    assert "Against the served draft, paired by prompt: alpha +0.040 [+0.010, +0.070]" in words_of(
        sections_of(result)["numbers"]
    )
    assert Measured(LOOKUP, "sample", ngrams=(2, 2)).sizes == "n-grams of 2"
    few = copy.deepcopy(result)
    for row in few["verdict"]["measured"]:
        row.pop("speed_up_ci", None)
    assert "too few prompts" in next(iter(tables_of(few, "numbers").values())).texts()[-1][-1]


def test_slices_are_sorted_and_a_certain_loss_alone_is_marked(result: dict[str, Any]) -> None:
    tables = tables_of(result, "slices")
    shares = [float(row[3].split()[0]) for row in tables["By token class"].texts()]
    assert shares == sorted(shares, reverse=True)
    ends = [(row[0].value, row[0].mark) for row in tables["By position (tokens)"].cells]
    assert ends == [("1-16", ""), ("17-64", "loses most"), ("65 and more", "")], "has an order of its own"
    row = tables["By domain"].cells[0]
    assert (row[1].bar, row[1].tick is None) == (row[1].value, False)

    def marks(made: dict[str, Any]) -> list[str]:
        cells = [cell for table in tables_of(made, "slices").values() for row in table.cells for cell in row]
        return [cell.mark for cell in cells if cell.mark in ("worse", "forgotten")]

    made = copy.deepcopy(result)
    domains, classes = made["slices"][0]["rows"], made["slices"][2]["rows"]
    domains[0]["certain"] = domains[-1]["certain"] = "loss"
    assert sorted(marks(made)) == ["forgotten", "worse", "worse"], "the last one was not trained on"
    assert "each at up to 99.2 %" in words_of(sections_of(made)["slices"]), "six classes"
    for row in (*domains, *classes):
        row["certain"] = "none"
    assert marks(made) == [], "an interval below 0 alone is not enough"


def test_the_best_gamma_is_among_the_timed_ones(result: dict[str, Any]) -> None:
    beyond = copy.deepcopy(result)
    curve = beyond["curves"]["rules"][0]["ways"][DRAFT]
    gamma, speed_up = gamma_to_run(dict(enumerate(curve["predicted_speed_up"][:17])))
    expected = [str(gamma), f"{speed_up:.2f}x"]
    assert rules_table(view_of(result)).texts()[0][3:] == expected
    curve["predicted_speed_up"][17:] = [9.0] * 16
    assert rules_table(view_of(beyond)).texts()[0][3:] == expected, "no extrapolated one"
    curve["predicted_speed_up"] = [None] * 33
    assert rules_table(view_of(beyond)).texts()[0][3:] == [NOTHING] * 2
    (said,) = say("speed", view_of(result))
    assert said.startswith("Timed: 1.36x at gamma 3. The curve is predicted from c = 0.26 at batch 1: gamma 2 to 4 are")


def test_live_and_replay_are_of_one_run_and_always_reported(result: dict[str, Any]) -> None:
    best = result["verdict"]
    tau, replayed = (
        best["live_tokens"] / best["replay_check"][blocks] for blocks in ("live_blocks", "predicted_blocks")
    )
    first, last = say("agreement", typed(result).verdict)
    assert last.endswith(f"tau {tau:.2f}, replay {replayed:.2f}, z -0.2.")
    assert first == "Each of 1 checkpoints decoded up to 4 prompts live, |z| at most 0.6; none disagreed with replay."
    old = copy.deepcopy(result)
    del old["verdict"]["replay_check"]
    assert say("agreement", typed(old).verdict)[-1].endswith("none disagreed with replay.")
    old["verdict"]["checkpoints"][-1]["live_check"]["replay"]["agrees"] = False
    assert say("agreement", typed(old).verdict)[-1].endswith("; 1 disagreed with replay.")
    assert "nothing was decoded live" in say("agreement", typed(not_timed(result)).verdict)[-1]
    fresh = {"prompts": 20, "tokens": 600, "alpha": 0.71, "stored_alpha": 0.72, "z": -0.4, "agrees": True}
    old["verdict"]["checkpoints"][-1]["fresh_check"] = fresh
    told = (
        "At 1 checkpoints the target's server answered up to 20 prompts again, |z| of alpha at most 0.4; none disagreed"
    )
    assert told in say("agreement", typed(old).verdict)[0]


@pytest.mark.parametrize(
    ("verdict", "step", "said"),
    [
        ({}, 120, ""),
        ({"outcome": "no_speed", "pays": False}, 120, "not certainly faster than the target alone"),
        ({"outcome": "loss", "pays": True}, 120, "worse than the undistilled one"),
        ({"outcome": "no_measurable_gain", "pays": True}, 120, "not certainly better than the undistilled one"),
        ({"outcome": "no_measurable_gain", "pays": False}, 0, "is the undistilled one; the target with"),
        ({"outcome": "not_timed", "pays": None}, 120, "Not timed"),
    ],
)
def test_commands_for_a_draft_without_gain_carry_a_warning(
    verdict: dict[str, Any], step: int, said: str, result: dict[str, Any]
) -> None:
    made = copy.deepcopy(of_verdict(result, **verdict))
    made["verdict"]["drafts"][-1]["step"] = step
    view = view_of(made)
    warning = " ".join(say("before_serving", view.verdict, view.draft.step))
    assert said in warning
    assert bool(said) == bool(warning)
    assert [part.kind for part in sections_of(made)["serve"]] == (["warning", "serve"] if said else ["serve"])


def test_what_was_run_is_reported(result: dict[str, Any]) -> None:
    assert ("prompts timed", "7") in run_facts(view_of(result))
    steps = sections_of(result)["steps"], sections_of(not_timed(result))["steps"]
    assert ["decoded live" in made[0] for made in steps] == [True, False]
    assert all("tau by replay" in made[0] for made in steps)


@pytest.mark.parametrize(
    ("text", "shown"), [("", "∅"), (" a b ", "␣a b␣"), ("\n", "↵"), ("\t\x00", "⇥␀"), ("   ", "␣␣␣")]
)
def test_white_space_is_visible(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert token_text("a\n\tb\x1b") == "a↵\n⇥\tb␛"


def test_load_shows_each_row_and_where_plain_wins(result: dict[str, Any]) -> None:
    (table,) = tables_of(result, "load").values()
    assert [column.name for column in table.heads] == [
        "concurrent requests",
        "target alone, tokens/s",
        "undistilled draft",
        "draft",
        LOOKUP,
        LOOKUP_DRAFT,
        "run",
    ]
    assert [(row[0], row[1], row[3], row[-1]) for row in table.texts()] == [
        ("1", "128", "1.36x [1.31, 1.42] gamma 3", "draft"),
        ("4", "410", "1.25x [1.20, 1.30] gamma 3", LOOKUP_DRAFT),
        ("16", "900", "0.92x [0.87, 0.98] gamma 3", "target alone"),
    ]
    assert [[cell.strong for cell in row[1:6]] for row in table.cells] == [
        [False, False, True, False, False],
        [False, False, False, False, True],
        [True, False, False, False, False],
    ]
    assert table.texts()[2][2] == table.texts()[2][5] == NOTHING, "not timed there"
    words = words_of(sections_of(result)["load"])
    assert "From 12 concurrent requests on, plain decoding is faster than the draft by itself." in words
    assert "A target call with 42 tokens takes twice its fixed time" in words
    for wins, said in (
        (None, "at every load up to 4096"),
        (1, "by itself at every load."),
        (40, "(predicted: at most 16 were measured)"),
    ):
        assert said in words_of(sections_of(of_verdict(result, plain_wins_from=wins))["load"])


def test_latency_shows_what_was_observed(result: dict[str, Any]) -> None:
    tables = tables_of(result, "latency")
    assert tables["p50 / p90 / p99"].texts() == [
        ["target alone", "1", "20 / 25.5 / 30", ""],
        ["target alone", "4", "20 / 25.5 / 120", ""],
        ["target alone", "16", "20 / 25.5 / 480", ""],
    ]
    assert tables["stages of a block, ms and share"].texts() == [
        ["target alone", load, "1 (25%)", "3 (75%)"] for load in ("1", "4", "16")
    ]
    assert "latency" not in sections_of(of_verdict(result, measured=result["verdict"]["measured"][:3]))


def priced(tree: dict[str, Any]) -> dict[str, Any]:
    """A run of 1 hour; 100 tokens/s alone, 150 with the draft, at load 8 500 and 400; 50 tokens a response."""
    rates = {(TARGET, 1): 100.0, (DRAFT, 1): 150.0, (TARGET, 8): 500.0, (DRAFT, 8): 400.0}
    rows = [
        {"way": way, "rule": "sample", "concurrency": load, "tokens_per_second": rate, "speed_up": 1.0}
        for (way, load), rate in rates.items()
    ]
    seconds = {"train": 3000.0, "train/backward": 2000.0, "judge": 600.0}
    return of_verdict(tree, measured=rows, prompts=20, tokens=1000, seconds=seconds)


def test_money_by_hand(result: dict[str, Any]) -> None:
    own = typed(priced(result)).verdict
    alone, loaded = price_rows(own, Prices(3.6, 3.6))
    # 3.6 an hour is 0.001 a second: 100 tokens/s are 10 a million, 150 are 6.67; 50 tokens are 0.0005.
    assert (alone.million_alone, alone.million_with_draft) == pytest.approx((10.0, 20 / 3))
    assert (alone.response_alone, alone.response_with_draft) == pytest.approx((5e-4, 1e-3 / 3))
    assert alone.repaid_tokens == pytest.approx(3.6 / (10e-6 - 20e-6 / 3))  # an hour, parts of a stage counted once
    assert (loaded.concurrency, loaded.million_alone, loaded.million_with_draft) == pytest.approx((8, 2.0, 2.5))
    assert loaded.repaid_tokens is None, "a token costs more with the draft there"
    assert "It is repaid after 1,080,000 tokens" in money_lines(own, Prices(3.6, 3.6))[1]
    two = Prices(3.6, 7.2)
    assert price_rows(own, two)[0].million_with_draft == pytest.approx(40 / 3)
    assert "breaks even at 2.00x" in money_lines(own, two)[0]
    assert "never repaid at one request at a time" in money_lines(own, two)[1]
    assert sections_of(bare(result), prices=two)["money"] == [
        "Nothing was timed here, so the cost of a token is not known."
    ]


@pytest.mark.parametrize("text", ["abc", "0", "-1", "1,2,3", "1,", "inf", "nan", ","])
def test_a_price_that_is_none_is_refused(text: str) -> None:
    assert re.search(r"--price-per-hour .*2\.49,4\.98", refused(parse_prices, text))


@pytest.mark.usefixtures("without_pictures")
def test_prices_on_the_command_line(result: dict[str, Any], tmp_path: Path) -> None:
    assert [parse_prices(text) for text in ("", "2.49", "2.49,4.98")] == [None, Prices(2.49, 2.49), Prices(2.49, 4.98)]
    write_json(tmp_path / RESULT, priced(result))
    page = tmp_path / "page.html"
    shown = CliRunner().invoke(app, ["show", str(tmp_path), "--page", str(page), "--price-per-hour", "3.6"])
    assert shown.exit_code == 0
    assert "6.67" in page.read_text(encoding="utf-8")


def test_repetition_is_shown_whole_and_by_domain(result: dict[str, Any]) -> None:
    (table,) = tables_of(result, "repetition").values()
    assert table.texts()[:2] == [["all", "15.5 %", "0.8 %", "1,580"], ["python", "30.0 %", "2.0 %", "600"]]
    only = dict(result["verdict"]["repetition"], by_domain={"python": {"repeated": 0.3, "looping": 0.0, "tokens": 600}})
    (table,) = tables_of(of_verdict(result, repetition=only), "repetition").values()
    assert len(table.cells) == 1, "one domain is the whole"


def with_proofs(result: dict[str, Any]) -> dict[str, Any]:
    score, no_difference = {"score": 0.5, "ci": [0.4, 0.6]}, {"value": 0.0, "ci": [-0.01, 0.01]}
    return {
        **result,
        "losslessness": {"draft": "d", "rule": "sample", "gamma": 4, "passed": True, "sentence": "The same <text>."},
        "scores": [
            {
                "scorer": "exact-match",
                "rule": "sample",
                "gamma": 4,
                "prompts": 32,
                "samples": 1,
                "speculative": score,
                "alone": score,
                "difference": no_difference,
                "passed": False,
                "sentence": "The scores DIFFER.",
            }
        ],
    }


def test_proofs_are_shown(result: dict[str, Any]) -> None:
    tree = with_proofs(result)
    proofs = sections_of(tree)["proofs"]
    assert proofs[:2] == ["Passed (rule sample, gamma 4): The same <text>.", "exact-match: The scores DIFFER."]
    assert (proofs[2].cells[0][0].value, proofs[2].cells[0][0].mark) == ("exact-match", "differs")
    assert not {"proofs", "money", "readback", "targets"} & set(sections_of(result))
