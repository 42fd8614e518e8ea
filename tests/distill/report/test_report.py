"""The report of a run: one HTML file without a network."""

from __future__ import annotations

import base64
import copy
import html.parser
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from result_example import bare, example_result, greedy, no_baseline, not_timed, typed

from data.files import write_json
from distill.config.layout import RESULT
from distill.report.figures import figures_of
from distill.report.page import render_page, write_page
from distill.report.view import OUTCOMES, View
from distill.run.result import Result
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
    "tokens",
    "disagreements",
    "run",
    "serve",
    "words",
]
FIGURES = {"steps_alpha", "steps_tau", "survival", "tau", "speed"}
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
    loading = ("src", "srcset", "href", "xlink:href", "action", "poster", "data", "background", "ping")
    addresses = [
        f"{tag} {name}={value}"
        for tag, attributes in Reader(source).tags
        for name, value in attributes.items()
        if name in loading and not (value or "").startswith(("#", "data:,", "data:image/svg+xml;base64,"))
    ]
    urls = re.findall(r"url\(\s*['\"]?([^)'\"]*)", source)
    return addresses + [url for url in urls if not url.startswith("#")] + re.findall(r"@import[^;]*", source)


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
    names = (
        "text prompt context target_said draft_wanted label headline facts note command config why domain words key unit "
        "dimension engine"
    )
    keys = tuple(re.findall(r"\w+", names))
    bad = with_text(result, HOSTILE, keys)
    bad["verdict"]["warnings"] = [HOSTILE]
    for one in bad["curves"]["rules"]:
        one["note"] = HOSTILE
    (tmp_path / RESULT).write_text(json.dumps(bad))
    source = write_page(tmp_path).read_text(encoding="utf-8")
    read = Reader(source)
    assert read.open == []
    scripts = [attributes for tag, attributes in read.tags if tag == "script"]
    assert len(scripts) == 2, "a data island and ours"
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


def drawn(tree: dict[str, Any]) -> dict[str, str]:
    """{name: SVG} of a result's figures."""
    return {name: picture_of(address) for name, address in figures_of(View(typed(tree))).items()}


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
    assert set(drawn(bare(result))) == {"survival"}
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
    svg = drawn(made)["survival"]
    assert shown in re.findall(r"<text[^>]*>([^<]*)", svg)


@pytest.mark.usefixtures("without_pictures")
def test_the_page_is_written_beside_the_result_or_where_one_asks(result: dict[str, Any], tmp_path: Path) -> None:
    write_json(tmp_path / RESULT, result)
    assert write_page(tmp_path) == tmp_path / "report.html"
    assert write_page(tmp_path / RESULT, tmp_path / "new" / "page.html").is_file()
    with pytest.raises(UserError, match=r"--page .*must end in \.html"):
        write_page(tmp_path, tmp_path / "report.pdf")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_page(tmp_path, tmp_path / "file" / "report.html")
    assert Result.read(tmp_path / RESULT) == typed(result)


def test_a_report_of_nothing_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"result.json: not there: finish the run .*understudy evaluate --out result.json"
    ):
        write_page(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda r: r["verdict"]["measured"][1].pop("way"), r"key verdict\.measured\[1\]\.way is missing"),
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
    assert re.search(said, refused(write_page, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [RESULT]


@pytest.mark.parametrize("text", ['{"format": 1', "", '{"format": 1, "x": NaN}', "[]", "\x00"])
def test_a_damaged_result_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / RESULT).write_text(text)
    told = refused(Result.read, tmp_path / RESULT)
    assert re.search(r"result\.json: (cannot be read|the file has an invalid value)", told)
