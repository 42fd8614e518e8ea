"""The report of a run: one HTML file without a network, its numbers as JSON, the panels in wandb."""

from __future__ import annotations

import base64
import copy
import html.parser
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused
from result_example import bare, example_result, greedy, no_baseline, not_timed, typed
from wandb_records import records_of

from data.files import write_json
from distill.config.layout import RESULT
from distill.report import wandb_panels as report_panels
from distill.report.figures import figures_of
from distill.report.page import given_times, render_page, report_command, summary_of
from distill.report.view import OUTCOMES, GivenTimes, View, measured_times
from distill.run.result import load_result
from speculative.errors import UserError
from speculative.measure.measured import DRAFT

HOSTILE = "</script><script>alert(1)</script><img src=\"https://x.test/a\" onerror='x()'>\"'&` | \u202e\u0000\ud800{{ 7 * 7 }}"
VARIANTS = {
    "full": lambda result: result,
    "not timed": not_timed,
    "no baseline": no_baseline,
    "greedy": greedy,
    "bare": bare,
}
SECTIONS = [
    "numbers",
    "steps",
    "survival",
    "speed",
    "load",
    "latency",
    "slices",
    "repetition",
    "forgetting",
    "tokens",
    "disagreements",
    "run",
    "serve",
    "words",
]
FIGURES = {"steps_alpha", "steps_tau", "survival", "tau", "speed", "given"}
MISSING = {
    "bare": {"steps", "speed", "slices", "tokens", "disagreements"},
    "not timed": {"tokens"},
    "no baseline": {"steps"},
}
VOID = {"meta", "link", "input", "br", "img"}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return example_result()


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
                found.append(f"{tag} {name}={value}") if not (value or "").startswith(
                    ("#", "data:,", "data:image/svg+xml;base64,")
                ) else None
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
    assert next(tag for tag, _ in read.tags if tag in ("h1", "h2")) == "h1"
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len(set(ids)), [name for name, times in Counter(ids).items() if times > 1]
    texts = " ".join(text for _, text in read.texts)
    assert made["verdict"]["headline"] in texts
    assert OUTCOMES[made["verdict"]["outcome"]] in texts
    assert not re.search(r"\b(None|nan|Undefined)\b", re.sub(r"<(script|style).*?</\1>", "", source, flags=re.S))
    assert len(source.encode()) < 2_000_000
    sections = re.findall(r'<section id="(\w+)".*?</section>', source, flags=re.S)
    assert sections == SECTIONS if variant == "full" else set(sections) <= set(SECTIONS)
    missing = {
        name for name in sections if re.search(rf'<section id="{name}">\s*<h2>[^<]*</h2>\s*<p class="missing">', source)
    }
    assert missing == MISSING.get(variant, set()), "what is not there is told in a line"


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
        "text", "prompt", "context", "target_said", "draft_wanted", "label", "headline", "facts", "note", "command", "config", "why", "domain",
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
    assert not [tag for tag, attributes in read.tags if any(name.startswith("on") for name in attributes)]
    assert all("data-figure" in attributes for tag, attributes in read.tags if tag == "img")
    assert outside_references(source) == []
    assert "49" not in [text for _, text in read.texts], "nothing in it is a template"
    island = next(text for tag, text in read.texts if tag == "script" and text.startswith("[["))
    assert json.loads(island)[0][0]["text"] == HOSTILE, "the script gets it as it is"


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("variant", ["full", "greedy", "no baseline"])
def test_the_token_view_is_the_results(variant: str, result: dict[str, Any]) -> None:
    responses = VARIANTS[variant](result)["token_view"]["responses"]
    read = Reader(render_page(typed(VARIANTS[variant](result))))
    spans = [attributes for tag, attributes in read.tags if tag == "span" and "data-block" in attributes]
    assert [(s["data-by"], s["data-id"], s["data-block"]) for s in spans] == [
        (t["by"], str(t["id"]), str(t["block"])) for response in responses for t in response["tokens"]
    ]
    assert [s["tabindex"] for s in spans].count("0") == len(responses), "one tab stop a response"
    island = next(json.loads(text) for tag, text in read.texts if tag == "script" and text.startswith("[["))
    assert island == [
        [{key: token[key] for key in island[0][0]} for token in response["tokens"]] for response in responses
    ]


def drawn(tree: dict[str, Any], given: GivenTimes | None = None) -> dict[str, str]:
    """{name: SVG} of a result's figures."""
    held = typed(tree)
    found = figures_of(View(held, given or measured_times(held)))
    return {name: picture_of(address) for name, address in found.items()}


def picture_of(address: str) -> str:
    prefix = "data:image/svg+xml;base64,"
    assert address.startswith(prefix)
    return base64.b64decode(address.removeprefix(prefix)).decode()


def test_figures_are_pictures_of_their_own(result: dict[str, Any]) -> None:
    shown = drawn(result)
    assert set(shown) == FIGURES
    for svg in shown.values():
        assert "<text" in svg, "text stays text"
        assert not re.search(r"fill: ?(#ffffff|#000000)", svg.split("</defs>")[-1]), "the paper shows through"
    assert set(drawn(bare(result), GivenTimes(1.0, 0.1))) == {"survival"}
    page = Reader(render_page(typed(result)))
    pictures = {str(one["data-figure"]): picture_of(str(one["src"])) for tag, one in page.tags if tag == "img"}
    assert pictures == shown, "the same result makes the same bytes"


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("\x00\ud800\u202e", "\ufffd\ufffd\ufffd"),
        ("_hidden", "\u200b_hidden"),
        ("$x^2$ <b>&", "$x^2$ &lt;b&gt;&amp;"),
        ("名前", "名前"),
        ("a" * 500, "a" * 23 + "…"),
    ],
)
def test_any_label_can_be_drawn(label: str, shown: str, result: dict[str, Any]) -> None:
    curve = result["curves"]["rules"][0]["ways"][DRAFT]
    made = bare(result) | {"curves": {"gammas": [], "rules": [{"rule": "sample", "ways": {label: curve}}]}}
    svg = drawn(made, GivenTimes(1.0, 0.1))["survival"]
    assert shown in re.findall(r"<text[^>]*>([^<]*)", svg)


def test_times_on_the_command_line() -> None:
    assert given_times() is None
    given = given_times("25ms", "0.003s")
    assert given is not None
    assert (given.target_seconds, given.draft_seconds) == (pytest.approx(0.025), pytest.approx(0.003))
    with pytest.raises(UserError, match="give --t-target and --t-draft together"):
        given_times("25ms", "")


@pytest.mark.usefixtures("without_pictures")
def test_the_page_and_its_numbers_are_written(result: dict[str, Any], tmp_path: Path) -> None:
    write_json(tmp_path / RESULT, result)
    files = report_command(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json", RESULT]
    summary = json.loads(files.summary.read_text(encoding="utf-8"))
    assert summary == summary_of(typed(result), files)
    assert (summary["outcome"], summary["pays"], summary["run"]["1"]) == ("pays_off", True, DRAFT)
    assert summary["measured"] == result["verdict"]["measured"]
    assert summary["gain"]["alpha"] == result["verdict"]["gain"]["alpha"]
    assert summary["against_served"]["certain"] == "gain"
    assert files.summary.stat().st_size < 10_000
    again = report_command(tmp_path / RESULT, tmp_path / "new" / "page.html", GivenTimes(0.025, 0.003))
    assert sorted(path.name for path in again.html.parent.iterdir()) == ["page.html", "page.json"]
    assert "target step 25 ms, draft call 3 ms" in again.html.read_text(encoding="utf-8")


def test_a_report_of_nothing_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"result.json: not there: finish the run .*understudy evaluate DRAFT --config"):
        report_command(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda r: r.pop("verdict"), "key verdict is missing"),
        (lambda r: r["verdict"].pop("outcome"), r"key verdict\.outcome is missing"),
        (lambda r: r["verdict"]["measured"][1].pop("way"), r"key verdict\.measured\[1\]\.way is missing"),
        (lambda r: r["token_view"]["responses"][2].pop("blocks"), r"key token_view\.responses\[2\]\.blocks is missing"),
        (lambda r: r["token_view"]["responses"][0]["tokens"][1].pop("by"), r"tokens\[1\]\.by is missing"),
        (lambda r: r["slices"][0]["rows"][0].pop("alpha"), r"key slices\[0\]\.rows\[0\]\.alpha is missing"),
        (
            lambda r: r["curves"]["rules"][0]["ways"][DRAFT].pop("tau"),
            rf"key curves\.rules\[0\]\.ways\.{DRAFT}\.tau is missing",
        ),
        (lambda r: r["verdict"]["measured"][0].update(tau="high"), r"key \S+\.tau has an invalid value \(.*number"),
        (
            lambda r: r.update(format=3),
            r"by version 0\.2\.0 of understudy \(format 3\); version 0\.2\.0 reads format 2: create it again",
        ),
        (lambda r: r.pop("format"), r"written by version 0\.1 of understudy \(format 1\)"),
    ],
)
def test_an_incomplete_result_is_one_line(spoil: Any, said: str, result: dict[str, Any], tmp_path: Path) -> None:
    made = copy.deepcopy(result)
    spoil(made)
    write_json(tmp_path / RESULT, made)
    assert re.search(said, refused(report_command, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [RESULT]


@pytest.mark.parametrize("text", ['{"format": 1', "", '{"format": 1, "x": NaN}', "[]", "\x00"])
def test_a_damaged_result_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / RESULT).write_text(text)
    told = refused(load_result, tmp_path / RESULT)
    assert re.search(r"result\.json: (cannot be read|the file has an invalid value)", told)


@pytest.mark.usefixtures("without_pictures")
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


@pytest.mark.usefixtures("without_pictures")
def test_wandb_gets_the_page_and_the_table_offline(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="understudy", name="report", dir=str(tmp_path)) as run:
        tracker = SimpleNamespace(name="wandb", tracker=run)
        report_panels.log_result(SimpleNamespace(trackers=[tracker], is_main_process=True), typed(result))
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    wandb.teardown()  # its process has written everything and ended
    records = records_of(file)
    logged = {item.key or item.nested_key[0] for r in records if r.HasField("history") for item in r.history.item}
    assert {report_panels.PAGE, *report_panels.TABLES} <= logged
    page = next(file.parent.rglob("*.html")).read_text(encoding="utf-8")
    assert page == render_page(typed(result)), "nothing of wandb's servers is put into it"
    summary = {item.key or item.nested_key[0] for r in records if r.HasField("summary") for item in r.summary.update}
    assert {"report/outcome", "report/headline"} <= summary


@pytest.mark.parametrize("others", [[], [SimpleNamespace(name="tensorboard", tracker=None)]])
def test_a_run_without_wandb_gets_nothing(result: dict[str, Any], others: list[Any]) -> None:
    report_panels.log_result(SimpleNamespace(trackers=others, is_main_process=True), typed(result))
