"""The report of a run: one HTML file without a network, its Markdown and JSON twins, the panels in wandb."""

from __future__ import annotations

import copy
import html
import html.parser
import io
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from result_example import GAMMA, bare, example_result, greedy, no_baseline, not_timed, typed
from rich.console import Console
from wandb_records import records_of

from data.files import write_json
from distill.config.layout import RESULT
from distill.report import markdown as report_text
from distill.report import tables as report_tables
from distill.report import wandb_panels as report_panels
from distill.report.figures import figures_of
from distill.report.page import given_times, render_page, report_command, summary_of
from distill.report.screen import last_screen
from distill.report.tables import OUTCOMES, GivenTimes, Table, measured_times
from distill.run.result import Calibration, load_result
from speculative.errors import UserError
from speculative.measure.cost import predicted_speed_up

HOSTILE = "</script><script>alert(1)</script><img src=\"https://x.test/a\" onerror='x()'>\"'&` | \u202e\u0000\ud800{{ 7 * 7 }}"
VARIANTS = {
    "full": lambda result: result,
    "not timed": not_timed,
    "no baseline": no_baseline,
    "greedy": greedy,
    "bare": bare,
}
VOID = {"meta", "link", "input", "br", "img"}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return example_result()


@pytest.fixture(scope="module")
def page(result: dict[str, Any]) -> str:
    return render_page(typed(result))


@pytest.fixture(scope="module")
def figures(result: dict[str, Any]) -> dict[str, str]:
    return figures_of(typed(result), measured_times(typed(result)))


@pytest.fixture
def drawn_once(figures: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages all have the example's figures, which take a second to draw: for tests of a page's words."""
    monkeypatch.setattr("distill.report.page.figures_of", lambda *_: figures)


class Reader(html.parser.HTMLParser):
    """Tags with their attributes, text by enclosing tag, and whether every tag is closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, text: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", text))


def with_text(value: Any, text: str, keys: tuple[str, ...]) -> Any:
    """The value with every string under those keys replaced."""
    if isinstance(value, dict):
        return {
            key: text if key in keys and isinstance(one, str) else with_text(one, text, keys)
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [text if isinstance(one, str) else with_text(one, text, keys) for one in value]
    return value


def outside_references(source: str) -> list[str]:
    """Everything in a page that would be fetched: attributes that load, and url() or @import in styles."""
    found = []
    for tag, attributes in Reader(source).tags:
        for name, value in attributes.items():
            if name in ("src", "srcset", "href", "xlink:href", "action", "poster", "data", "background", "ping"):
                found.append(f"{tag} {name}={value}") if not (value or "").startswith(("#", "data:,")) else None
    urls = re.findall(r"url\(\s*['\"]?([^)'\"]*)", source)
    return found + [url for url in urls if not url.startswith("#")] + re.findall(r"@import[^;]*", source)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_result_makes_a_whole_page_without_a_network(variant: str, result: dict[str, Any]) -> None:
    made = VARIANTS[variant](result)
    source = render_page(typed(made))
    read = Reader(source)
    assert read.open == [], "every tag is closed"
    assert outside_references(source) == []
    assert "http" not in re.sub(r"http-equiv", "", source.split("<script>")[0]), "not even a name space"
    assert dict(read.tags[0][1]) == {"lang": "en"}
    headings = [tag for tag, _ in read.tags if tag in ("h1", "h2", "h3")]
    assert headings[0] == "h1"
    assert headings.count("h1") == 1
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len(set(ids)), [name for name, times in Counter(ids).items() if times > 1]
    texts = " ".join(text for _, text in read.texts)
    assert made["verdict"]["sentence"] in texts
    assert OUTCOMES[made["verdict"]["outcome"]] in texts
    assert not re.search(r"\b(None|nan|Undefined)\b", re.sub(r"<(script|style).*?</\1>", "", source, flags=re.S))
    assert len(source.encode()) < 2_000_000
    for name in report_text.missing_lines(typed(made)).values():
        assert name.replace("'", "&#39;") in source


def test_the_reader_of_outside_references_sees_them() -> None:
    for bad in (
        "<img src=x.png>",
        "<a href='https://x.test'>",
        "<style>a{b:url(x)}</style>",
        "<style>@import 'x';</style>",
    ):
        assert outside_references(bad), bad
    assert outside_references("<a href='#steps'></a><i style='fill:url(#a)'></i>") == []


def test_hostile_text_of_models_stays_text(result: dict[str, Any], tmp_path: Path) -> None:
    keys = (
        "text", "prompt", "context", "target_said", "draft_wanted", "label", "sentence", "note", "command", "config", "why", "domain",
        "words", "key", "unit", "dimension", "engine",
    )  # fmt: skip
    bad = with_text(result, HOSTILE, keys)
    bad["verdict"]["warnings"] = [HOSTILE]
    for one in bad["curves"]["rules"]:
        one["note"] = HOSTILE
    (tmp_path / RESULT).write_text(json.dumps(bad))
    files = report_command(tmp_path)
    source = files.html.read_text(encoding="utf-8")
    read = Reader(source)
    assert read.open == []
    scripts = [attributes for tag, attributes in read.tags if tag == "script"]
    assert len(scripts) == 3, "two data islands and ours"
    assert not [
        tag for tag, attributes in read.tags if tag == "img" or any(name.startswith("on") for name in attributes)
    ]
    assert outside_references(source) == []
    assert "49" not in [text for _, text in read.texts], "nothing in it is a template"
    island = next(text for tag, text in read.texts if tag == "script" and text.startswith("[["))
    assert json.loads(island)[0][0]["text"] == HOSTILE, "the script gets it as it is"
    twin = files.markdown.read_text(encoding="utf-8")
    plain = re.sub(r"(`+).*?\1", "", re.sub(r"^```.*?^```", "", twin, flags=re.S | re.M))
    assert "<script" not in plain
    assert "<img" not in plain


@pytest.mark.usefixtures("drawn_once")
@pytest.mark.parametrize("variant", ["full", "greedy", "no baseline"])
def test_the_token_view_is_the_results(variant: str, result: dict[str, Any]) -> None:
    made = VARIANTS[variant](result)
    read = Reader(render_page(typed(made)))
    spans = [attributes for tag, attributes in read.tags if tag == "span" and "data-block" in attributes]
    tokens = [token for response in made["token_view"]["responses"] for token in response["tokens"]]
    assert [(s["data-by"], s["data-id"], s["data-block"]) for s in spans] == [
        (t["by"], str(t["id"]), str(t["block"])) for t in tokens
    ]
    assert [s["tabindex"] for s in spans].count("0") == len(made["token_view"]["responses"]), "one tab stop a response"
    island = next(json.loads(text) for tag, text in read.texts if tag == "script" and text.startswith("[["))
    assert island == [
        [{key: token[key] for key in island[0][0]} for token in response["tokens"]]
        for response in made["token_view"]["responses"]
    ]


def test_the_example_agrees_with_itself(result: dict[str, Any]) -> None:
    live, best = result["live_prompts"], result["contestants"][-1]
    sums = {key: sum(row[key] for row in live) for key in ("tokens", "blocks", "drafted", "accepted")}
    assert best["tau"] == pytest.approx(sums["tokens"] / sums["blocks"])
    assert best["accepted_per_drafted"] == pytest.approx(sums["accepted"] / sums["drafted"])
    assert sum(best["survival"]) == pytest.approx(best["tau"] - 1), "each survivor is a token"
    view = typed(result).token_view
    assert view is not None
    for response, row in zip(view.responses, live, strict=False):
        facts = report_tables.response_facts(response)
        assert (facts["draft"], facts["target"] + facts["bonus"]) == (row["accepted"], row["blocks"])
    assert sum(row["lost_share"] for row in result["slices"][0]["rows"]) == pytest.approx(1)


def test_tables_hold_the_results_numbers(result: dict[str, Any]) -> None:
    table = report_tables.headline_table(typed(result))
    best, baseline = result["contestants"][-1], result["contestants"][0]
    assert table.columns == (
        "", "distilled (step 120)", "undistilled (step 0)", "last served", "gain, same text", "against the served draft",
    )  # fmt: skip
    rows = {row[0].text: row[1:] for row in table.rows}
    assert [cell.text for cell in rows["tau"][:2]] == [f"{best['tau']:.2f}", f"{baseline['tau']:.2f}"]
    assert rows["tau"][2].note == "by replay"
    assert rows["alpha"][0].note == f"[{best['alpha_ci'][0]:.3f}, {best['alpha_ci'][1]:.3f}]"
    assert rows["alpha"][3].text == f"{result['verdict']['effects']['alpha']['gain']:+.3f}"
    assert (rows["alpha"][4].text, rows["alpha"][4].note) == ("+0.040", "[+0.010, +0.070]")
    assert rows["speed-up"][2].text == rows["speed-up"][4].text == report_tables.NOTHING
    assert "speed-up" not in {row[0].text for row in report_tables.headline_table(typed(not_timed(result))).rows}


def test_slices_are_sorted_and_marked(result: dict[str, Any]) -> None:
    tables = {table.columns[0]: table for table in report_tables.slice_tables(typed(result))}
    shares = [float(row[3].text.split()[0]) for row in tables["token class"].rows]
    assert shares == sorted(shares, reverse=True)
    assert [row[0].text for row in tables["position"].rows] == ["1-16", "17-64", "65 and more"], (
        "has an order of its own"
    )
    assert [row[0].mark for row in tables["position"].rows] == ["", "loses most", ""]
    marked = [(row[0].text, row[2].mark) for row in tables["token class"].rows if row[2].mark]
    assert marked == [("digits", "worse")]
    row = tables["domain"].rows[0]
    assert row[1].bar == pytest.approx(float(row[1].text), abs=1e-3)
    assert row[1].tick is not None
    assert "gain" not in {
        column for table in report_tables.slice_tables(typed(no_baseline(result))) for column in table.columns
    }


@pytest.mark.usefixtures("drawn_once")
def test_only_a_certain_loss_is_marked(result: dict[str, Any]) -> None:
    def marks(made: dict[str, Any]) -> list[str]:
        rows = [row for table in report_tables.slice_tables(typed(made)) for row in table.rows]
        forgotten = report_tables.forgetting_table(typed(made))
        assert forgotten is not None
        return [cell.mark for row in rows + forgotten.rows for cell in row if cell.mark in ("worse", "forgotten")]

    made = copy.deepcopy(result)
    domains, classes = made["slices"][0]["rows"], made["slices"][2]["rows"]
    assert made["forgetting"][0]["domain"] == domains[0]["name"]
    domains[0]["certain"] = "loss"
    assert marks(made) == ["worse", "worse", "forgotten"]
    assert "hold together at 95 %" in report_text.slices_line(typed(made))
    assert "each at up to 99.2 %" in report_text.slices_line(typed(made)), "six classes"
    for row in (*domains, *classes):
        row["certain"] = "none"
    assert marks(made) == [], "an interval below 0 alone is not enough"
    made["forgetting"][1]["change"]["certain"] = "loss"
    assert marks(made) == ["forgotten"]
    old = copy.deepcopy(result)
    for table in old["slices"]:
        del table["corrected_confidence"]
        for row in table["rows"]:
            del row["certain"]
    assert marks(old) == []
    for made in (result, old, no_baseline(result)):
        line = report_text.slices_line(typed(made))
        assert line in render_page(typed(made))
        assert line in report_text.markdown(typed(made), measured_times(typed(made)))
    assert "nothing is marked" in report_text.slices_line(typed(old))


@pytest.mark.usefixtures("drawn_once")
def test_the_best_gamma_is_among_the_timed_ones(result: dict[str, Any], figures: dict[str, str]) -> None:
    def best_of(made: dict[str, Any]) -> list[str]:
        table = report_tables.rules_table(typed(made))
        assert table is not None
        return [cell.text for cell in table.rows[0][3:]]

    verdict = result["verdict"]
    expected = [str(verdict["best_gamma"]), f"{verdict['predicted_speed_up']:.2f}x"]
    assert best_of(result) == expected
    beyond = copy.deepcopy(result)
    curve = beyond["curves"]["rules"][0]["contestants"]["best"]
    curve["speed_up"][17:] = [9.0] * 16
    assert best_of(beyond) == expected, "an older result holds extrapolated ones"
    assert figures_of(typed(beyond), measured_times(typed(beyond))) == figures
    curve["speed_up"] = [None] * 33
    assert best_of(beyond) == [report_tables.NOTHING] * 2
    assert "9.00x" not in render_page(typed(beyond))


@pytest.mark.usefixtures("drawn_once")
def test_live_and_replay_are_of_one_run_and_always_told(result: dict[str, Any]) -> None:
    def line(made: dict[str, Any]) -> str:
        (found,) = [
            one for one in report_text.check_lines(typed(made)) if one.startswith("Live decoding against replay")
        ]
        return found

    assert line(result) in render_page(typed(result))
    assert line(not_timed(result)) in render_page(typed(not_timed(result)))
    best, (passing,) = result["verdict"]["best"], result["verdict"]["checkpoints"]
    assert line(result).endswith(
        f"tau {best['tau']:.2f} beside replay {best['live_tokens'] / best['replay_check']['predicted_blocks']:.2f}, z -0.2."
    )
    old = copy.deepcopy(result)
    del old["verdict"]["best"]["replay_check"]
    assert f"{passing['tau']:.2f}" != f"{best['tau']:.2f}"
    assert f"tau {passing['tau']:.2f} beside replay" in line(old), "of the run that was replayed, not of the last one"
    assert "z +0.6" in line(old)
    assert "nothing was decoded live" in line(not_timed(result))
    old["verdict"]["checkpoints"] = []
    assert "holds no replay of the live run" in line(old)
    for made in (no_baseline(result), greedy(result), bare(result)):
        assert line(made) == line(result)


@pytest.mark.usefixtures("drawn_once")
@pytest.mark.parametrize(
    ("verdict", "step", "said"),
    [
        ({}, 120, ""),
        ({"outcome": "no_speed", "pays_off": False}, 120, "not certainly faster than the target alone"),
        ({"best_gamma": 0}, 120, "no gamma is predicted to pay"),
        ({"outcome": "loss", "pays_off": True}, 120, "worse than the undistilled one"),
        ({"outcome": "no_measurable_gain", "pays_off": True}, 120, "not certainly better than the undistilled one"),
        ({"outcome": "no_measurable_gain", "pays_off": False}, 0, "is the undistilled one; the target with"),
        ({"outcome": "not_timed", "pays_off": None}, 120, "Not timed"),
    ],
)
def test_commands_for_a_draft_without_gain_carry_a_warning(
    verdict: dict[str, Any], step: int, said: str, result: dict[str, Any]
) -> None:
    made = copy.deepcopy(result)
    made["verdict"] |= verdict
    made["contestants"][-1]["step"] = step
    warning = report_text.serve_warning(typed(made))
    assert said in warning
    assert bool(said) == bool(warning)
    page, twin = render_page(typed(made)), report_text.markdown(typed(made), measured_times(typed(made)))
    served = page[page.index('<section id="serve">') :], twin[twin.index("## Serve it") :]
    for text in served:
        assert text.count("Warning") == bool(said)
        assert (html.escape(warning, quote=True).replace("&#x27;", "&#39;") or "takes this pair") in text.split(
            "vllm serve"
        )[0]


@pytest.mark.usefixtures("drawn_once")
def test_what_checkpoints_were_judged_on_is_told(result: dict[str, Any]) -> None:
    for made, said in ((result, "on text of its own"), (not_timed(result), "tau by replay")):
        line = report_text.steps_line(typed(made))
        assert said in line
        assert line in render_page(typed(made))
        assert line in report_text.markdown(typed(made), measured_times(typed(made)))


@pytest.mark.usefixtures("drawn_once")
def test_the_served_draft_is_compared_with_everywhere(result: dict[str, Any]) -> None:
    twin = report_text.markdown(typed(result), measured_times(typed(result)))
    for text in (render_page(typed(result)), twin.replace("\\", "")):
        assert "against the served draft" in text
        assert "Against the served draft, paired by prompt: alpha +0.040 [+0.010, +0.070]" in text
    told = summary_of(typed(result))["against_served"]
    assert told["alpha"] == result["verdict"]["against_served"]["alpha"]
    assert told["certain"] == "gain"
    without = copy.deepcopy(result)
    without["verdict"]["against_served"] = None
    assert "gainst the served draft" not in render_page(typed(without))
    assert summary_of(typed(without))["against_served"] is None


@pytest.mark.usefixtures("drawn_once")
def test_a_speed_up_of_too_few_prompts_has_no_interval(result: dict[str, Any]) -> None:
    made = copy.deepcopy(result)
    for row in made["contestants"]:
        row["speed_up_ci"] = None
    made["verdict"]["speed_up_ci"] = dict.fromkeys(made["verdict"]["speed_up_ci"])
    rows = {row[0].text: row[1:] for row in report_tables.headline_table(typed(made)).rows}
    assert [cell.note for cell in rows["speed-up"]][:3] == [report_tables.TOO_FEW_TIMED] * 2 + [""]
    assert rows["speed-up"][0].text == f"{result['contestants'][-1]['speed_up']:.2f}x"
    for text in (render_page(typed(made)), report_text.markdown(typed(made), measured_times(typed(made)))):
        assert "too few prompts timed for an interval" in text
    assert "too few prompts" not in render_page(typed(result))
    assert summary_of(typed(made))["contestants"]["best"]["speed_up_ci"] is None


@pytest.mark.usefixtures("drawn_once")
def test_how_many_prompts_were_timed_is_told(result: dict[str, Any]) -> None:
    assert ("prompts timed", "7") in report_text.run_facts(typed(result))
    old = {key: value for key, value in result.items() if key != "timed_prompts"}
    assert "prompts timed" not in dict(report_text.run_facts(typed(old)))
    assert "prompts timed" not in render_page(typed(old))


@pytest.mark.usefixtures("drawn_once")
def test_the_calibration_line_is_the_words_of_the_result(result: dict[str, Any]) -> None:
    assert (
        report_text.calibration_line(Calibration(bins=[], words="it is sure. Stop below 0.3."))
        == "It is sure. Stop below 0.3."
    )
    assert report_text.calibration_line(typed(result).calibration) in render_page(typed(result))


def test_given_times_are_the_formula(result: dict[str, Any]) -> None:
    given = GivenTimes(0.025, 0.003, 0.02)
    table = report_tables.given_table(typed(result), given)
    assert table is not None
    curve = result["curves"]["rules"][0]["contestants"]["best"]
    for row in table.rows:
        gamma = int(row[0].text)
        value = curve["tau"][gamma] / (gamma * 0.003 / 0.025 + 1 + gamma * 0.02)
        assert row[-1].text == f"{value:.2f}x"
        assert value == pytest.approx(
            predicted_speed_up(curve["tau"][gamma], gamma, given.cost_ratio, 1 + 0.02 * gamma)
        )
    assert [row[-1].strong for row in table.rows].count(True) == 1
    measured = measured_times(typed(result))
    assert (measured.source, measured.cost_ratio) == ("measured", pytest.approx(result["costs"]["cost_ratio"]))
    assert curve["speed_up"][17:] == [None] * 16
    assert measured.speed_up(GAMMA, curve["tau"][GAMMA]) == pytest.approx(curve["speed_up"][GAMMA])
    assert measured_times(typed(not_timed(result))).source == "example"


def test_a_best_that_drafts_in_one_pass_says_so_and_pays_one_call_a_block(result, drawn_once) -> None:
    made = copy.deepcopy(result)
    verdict = made["verdict"]
    verdict |= {"drafting": "parallel", "costs": {**made["costs"], "break_even_alpha": 0.3}}
    for row in made["curves"]["rules"]:
        best = row["contestants"]["best"]
        row["contestants"]["token by token"] = copy.deepcopy(best)
        best |= {key: best[key][:9] for key in ("gammas", "tau", "tau_ci", "speed_up")}
    verdict["rivals"] = [
        {
            "name": "token by token", "gamma": 3, "tau": 2.5, "tokens_per_second": 140.0, "speed_up": 1.21, "speed_up_ci": [1.1, 1.3],
            "draft_over_it": 1.1, "draft_over_it_ci": [1.0, 1.2], "ngrams": None, "then_gamma": None, "tuned_on": "", "timed_prompts": 7,
        }
    ]  # fmt: skip
    held, given = typed(made), GivenTimes(0.025, 0.003, 0.02)
    table = report_tables.given_table(held, given)
    assert table is not None
    for row in table.rows:
        gamma = int(row[0].text)
        taus = {name: curve["tau"][gamma] for name, curve in made["curves"]["rules"][0]["contestants"].items()}
        assert row[-1].text == f"{taus['best'] / ((0.12 if gamma else 0) + 1 + gamma * 0.02):.2f}x"
        assert row[1].text == f"{taus['baseline'] / (gamma * 0.12 + 1 + gamma * 0.02):.2f}x"
    page, text = render_page(held), report_text.markdown(held, measured_times(held))
    console = Console(width=160, record=True, file=io.StringIO())
    last_screen(console, Path("runs/tiny"), held.verdict, [], None)
    screen = console.export_text()
    for shown in (page, text, screen):
        assert "one pass a block" in shown
        assert "token by token" in shown
        assert f"c = {made['costs']['cost_ratio']:.2f}" in shown
        assert " of a block" in shown
    assert '"parallel": true' in page
    assert set(figures_of(held, given)) >= {"tau", "speed", "given"}
    assert "drafting one pass" not in render_page(typed(result))
    lines = SimpleNamespace(plot=SimpleNamespace(line_series=lambda **series: series))
    drawn = report_panels._charts(lines, held, given)["report/speed-up at given times"]
    fast = {key: dict(zip(*of, strict=True)) for key, *of in zip(drawn["keys"], drawn["xs"], drawn["ys"], strict=True)}
    tau = made["curves"]["rules"][0]["contestants"]["best"]["tau"][4]
    assert (fast["distilled"][4], fast["token by token"][4]) == pytest.approx((tau / 1.2, tau / 1.56))
    assert report_panels.headline_table(held).columns[1] == "distilled (step 120), one pass a block"


def test_times_on_the_command_line() -> None:
    assert given_times() is None
    given = given_times("25ms", "0.003s")
    assert given is not None
    assert (given.target_seconds, given.draft_seconds) == (pytest.approx(0.025), pytest.approx(0.003))
    with pytest.raises(UserError, match="--t-target and --t-draft go together"):
        given_times("25ms", "")
    with pytest.raises(UserError, match="--t-draft"):
        given_times("25ms", "fast")


def test_figures_are_ready_for_a_page(result: dict[str, Any]) -> None:
    drawn = figures_of(typed(result), measured_times(typed(result)))
    assert set(drawn) == {"steps_alpha", "steps_tau", "survival", "tau", "speed", "given", "calibration"}
    ids: list[str] = []
    for name, svg in drawn.items():
        own = re.findall(r'\bid="([^"]*)"', svg)
        assert all(one.startswith(f"{name}-") for one in own)
        assert set(re.findall(r"(?:url\(|href=\")#([^)\"]*)", svg)) <= set(own), "nothing points outside"
        assert "<text" in svg, "text stays text"
        assert "#0a00" not in svg, "no stand-in colour is left"
        assert "var(--" in svg
        ids += own
    assert len(ids) == len(set(ids))
    assert figures_of(typed(result), measured_times(typed(result))) == drawn, "the same result makes the same bytes"
    assert set(figures_of(typed(bare(result)), GivenTimes(1.0, 0.1))) == {"survival"}


@pytest.mark.parametrize(
    ("label", "drawn"),
    [
        ("\x00\ud800\u202e", "\ufffd\ufffd\ufffd"),
        ("_hidden", "\u200b_hidden"),
        ("$x^2$ <b>&", "$x^2$ &lt;b&gt;&amp;"),
        ("", "best"),
        ("名前", "名前"),
        ("a" * 500, "a" * 23 + "…"),
    ],
)
def test_any_label_can_be_drawn(label: str, drawn: str, result: dict[str, Any]) -> None:
    contestants = [row | {"label": label} for row in result["contestants"]]
    svg = figures_of(typed(bare({**result, "contestants": contestants})), GivenTimes(1.0, 0.1))["survival"]
    assert re.findall(r"<text[^>]*>([^<]*)", svg)[-1] == drawn


def test_markdown_follows_the_page(result: dict[str, Any], page: str) -> None:
    twin = report_text.markdown(typed(result), measured_times(typed(result)))
    titles = re.findall(r"^## (.*)$", twin, flags=re.M)
    assert titles == [
        "Acceptance over steps", "Survival by position", "Speed-up over gamma", "Under load", "How long a reader waits",
        "Slices", "Which one helps where",
        "How much of the text repeats", "Forgetting", "Held-out responses",
        "Most expensive disagreements", "Calibration of the draft", "What was run", "Checks of the instrument", "Serve it",
    ]  # fmt: skip
    for table in re.findall(r"(?:^\|.*\n)+", twin, flags=re.M):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table
    sections = re.findall(r'<section id="(\w+)"', page)
    assert sections == [
        "numbers", "steps", "survival", "speed", "load", "latency", "slices", "where", "repetition", "forgetting", "tokens", "disagreements",
        "calibration", "run", "serve", "words",
    ]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_markdown_of_every_kind(variant: str, result: dict[str, Any]) -> None:
    twin = report_text.markdown(typed(VARIANTS[variant](result)), GivenTimes(0.025, 0.003))
    assert not re.search(r"\b(None|nan)\b", twin)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("", "∅"), (" a b ", "␣a b␣"), ("\n", "↵"), ("\t\x00", "⇥␀"), ("   ", "␣␣␣")],
)
def test_white_space_is_visible(text: str, shown: str) -> None:
    assert report_tables.visible(text) == shown


def test_a_newline_in_a_token_is_shown_and_made() -> None:
    assert report_tables.token_text("a\n\tb\x1b") == "a↵\n⇥\tb␛"
    assert report_tables.token_text("") == "∅"


def test_code_in_markdown_cannot_end_its_fence() -> None:
    assert report_text.code_span("a`b``c") == "```a`b``c```"
    assert report_text.code_span("`") == "`` ` ``"
    assert report_text.code_span("a|b") == "`a\\|b`"
    assert report_text.code_block("x\n```\ny").startswith("````")
    table = report_text.markdown_table(Table(("a",), [[report_tables.Cell("<b>\n| *x*", mark="_m_")]]))
    assert table.splitlines()[-1] == "| &lt;b&gt; \\| \\*x\\* **\\_m\\_** |"


def test_all_three_files_are_written(result: dict[str, Any], tmp_path: Path) -> None:
    write_json(tmp_path / RESULT, result)
    files = report_command(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json", "report.md", RESULT]
    summary = json.loads(files.summary.read_text(encoding="utf-8"))
    assert summary == summary_of(typed(result), files)
    assert (summary["outcome"], summary["pays_off"]) == ("pays_off", True)
    assert summary["contestants"]["best"]["tau"] == result["contestants"][-1]["tau"]
    assert summary["gain"]["alpha"] == result["verdict"]["effects"]["alpha"]
    assert files.summary.stat().st_size < 10_000
    again = report_command(tmp_path / RESULT, tmp_path / "new" / "page.html", GivenTimes(0.025, 0.003))
    assert sorted(path.name for path in again.html.parent.iterdir()) == ["page.html", "page.json", "page.md"]
    assert "target 25 ms a step, draft 3 ms" in again.html.read_text(encoding="utf-8")


def test_a_report_of_nothing_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"result.json: not there; finish the run .*understudy evaluate DRAFT --config"
    ) as error:
        report_command(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda r: r.pop("verdict"), "key verdict is missing"),
        (lambda r: r["verdict"].pop("sentence"), r"key verdict\.sentence is missing"),
        (lambda r: r["contestants"][1].pop("alpha"), r"key contestants\[1\]\.alpha is missing"),
        (lambda r: r["token_view"]["responses"][2].pop("blocks"), r"key token_view\.responses\[2\]\.blocks is missing"),
        (lambda r: r["token_view"]["responses"][0]["tokens"][1].pop("by"), r"tokens\[1\]\.by is missing"),
        (lambda r: r["calibration"].pop("words"), r"key calibration\.words is missing"),
        (lambda r: r["slices"][0]["rows"][0].pop("alpha"), r"key slices\[0\]\.rows\[0\]\.alpha is missing"),
        (
            lambda r: r["curves"]["rules"][0]["contestants"]["best"].pop("tau"),
            r"key curves\.rules\[0\]\.contestants\.best\.tau is missing",
        ),
        (lambda r: r["contestants"][0].update(tau="high"), r"key \S+\.tau holds something else \(.*number"),
        (lambda r: r["verdict"].update(best=None), r"key verdict\.best holds something else"),
        (lambda r: r["live_prompts"][3].update(drafted=-1), r"key live_prompts\[3\]\.drafted holds something else"),
        (lambda r: r.update(format=2), r"key format holds something else \(Input should be 1\); make it again"),
        (lambda r: r.pop("format"), "key format is missing"),
        (lambda r: r.update(contestants=[]), "key contestants is missing"),
    ],
)  # fmt: skip
def test_an_incomplete_result_is_one_line(spoil: Any, said: str, result: dict[str, Any], tmp_path: Path) -> None:
    made = copy.deepcopy(result)
    spoil(made)
    write_json(tmp_path / RESULT, made)
    with pytest.raises(UserError, match=said) as error:
        report_command(tmp_path)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [RESULT]


@pytest.mark.parametrize("text", ['{"format": 1', "", '{"format": 1, "x": NaN}', "[]", "\x00"])
def test_a_damaged_result_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / RESULT).write_text(text)
    with pytest.raises(UserError, match=r"result\.json: (cannot be read|the file holds something else)") as error:
        load_result(tmp_path / RESULT)
    assert "\n" not in str(error.value)


def test_the_result_itself_is_never_overwritten(result: dict[str, Any], tmp_path: Path) -> None:
    write_json(tmp_path / RESULT, result)
    with pytest.raises(UserError, match="would overwrite the result"):
        report_command(tmp_path, tmp_path / "result.html")
    with pytest.raises(UserError, match=r"must end in \.html"):
        report_command(tmp_path, tmp_path / "report.pdf")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        report_command(tmp_path, tmp_path / "file" / "report.html")
    assert load_result(tmp_path / RESULT) == typed(result)


def test_wandb_gets_the_panels_offline(result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="understudy", name="report", dir=str(tmp_path)) as run:
        names = report_panels.log_result(run, typed(result))
    assert {
        "report/headline",
        "report/page",
        "report/tokens",
        "report/disagreements",
        "report/slices by domain",
    } <= set(names)
    files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 1
    wandb.teardown()  # its process has written everything and ended
    records = records_of(files[0])
    logged = {item.key or item.nested_key[0] for r in records if r.HasField("history") for item in r.history.item}
    assert {name for name in names if "over" not in name} - logged <= {
        name for name in names if f"{name}_table" in logged
    }
    page = next(files[0].parent.rglob("*.html")).read_text(encoding="utf-8")
    assert page == render_page(typed(result)), "nothing of wandb's servers is put into it"
    summary = {item.key or item.nested_key[0] for r in records if r.HasField("summary") for item in r.summary.update}
    assert {"report/outcome", "report/tau", "report/alpha"} <= summary


@pytest.mark.usefixtures("drawn_once")
@pytest.mark.parametrize("variant", VARIANTS)
def test_panels_of_every_kind(variant: str, result: dict[str, Any]) -> None:
    class Run:
        def __init__(self) -> None:
            self.logged: dict[str, Any] = {}
            self.summary: dict[str, Any] = {}

        def log(self, values: dict[str, Any]) -> None:
            self.logged |= values

    run = Run()
    names = report_panels.log_result(run, typed(VARIANTS[variant](result)))
    assert set(names) == set(run.logged)
    assert ("report/tokens" in names) == (variant not in ("not timed", "bare"))
    assert run.summary["report/outcome"] == VARIANTS[variant](result)["verdict"]["outcome"]


def test_a_run_without_wandb_gets_nothing(result: dict[str, Any]) -> None:
    class Accelerator:
        is_main_process = True
        trackers: tuple[Any, ...] = ()

    assert report_panels.log_result(Accelerator(), typed(result)) == []
