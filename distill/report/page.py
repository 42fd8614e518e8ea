"""`understudy report RUN`: result.json as one HTML file that needs no network, with a Markdown and a small JSON twin.

The page is distill/report/templates/report.html.j2 with its style and script inlined. Text of models and prompts is hostile: it is escaped by
jinja2, and a content security policy lets no script run but ours and nothing be fetched.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from data.files import write_bytes, writing
from distill.config.layout import REPORT, RESULT
from distill.report import markdown as report_text
from distill.report import tables as report_tables
from distill.report.durations import parse_seconds
from distill.report.figures import figures_of, series_of
from distill.report.money import Prices, price_rows
from distill.report.serving_tables import serving_sections
from distill.report.tables import OUTCOMES, GivenTimes, judged, measured_times
from distill.report.text_tables import text_sections
from distill.run.result import RESULT_FORMAT, Result, load_result
from distill.run.served_record import load_served
from distill.run.verdict_record import Record
from speculative.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"
OPEN_RESPONSES = 2  # the others are folded
HEADLINES = (
    "step", "alpha", "alpha_ci", "tau", "tau_ci", "tau_by", "accepted_per_drafted", "speed_up", "speed_up_ci", "tokens_per_second",
)  # fmt: skip
FACTS = (
    "outcome", "pays_off", "sentence", "rule", "gamma", "prompts", "tokens", "best_gamma", "predicted_speed_up",
)  # fmt: skip
GAINS = ("alpha", "tau", "speed_up")
SHOWN_OF_TOKEN = {"text", "id", "by", "block", "target_prob", "draft_prob", "target_top", "draft_top"}


@dataclass(frozen=True)
class ReportFiles:
    """What a report wrote, and of what."""

    html: Path
    markdown: Path
    summary: Path
    result: Result


def report_command(
    source: Path, to: Path | None = None, given: GivenTimes | None = None, prices: Prices | None = None
) -> ReportFiles:
    """Writes the report of a run: FILE.html, and FILE.md and FILE.json beside it.

    Args:
        source: a run's folder with `result.json`, or such a file.
        to: the HTML file; default `report.html` beside the result.
        given: step times of other hardware for the second speed-up curve; default those measured.
        prices: of an hour: what tokens and responses cost then.

    Raises:
        UserError: no result there, or one that cannot be read; `to` is no .html file or cannot be written.
    """
    path = source / RESULT if source.is_dir() or not source.suffix else source
    result = load_result(path).model_copy(update={"served": load_served(path.parent)})
    html = to or path.parent / REPORT
    if html.suffix not in (".html", ".htm"):
        raise UserError(f"--to {html}: must end in .html; report.md and report.json are written beside it")
    files = ReportFiles(html, html.with_suffix(".md"), html.with_suffix(".json"), result)
    if path.resolve() in {file.resolve() for file in (files.html, files.markdown, files.summary)}:
        raise UserError(f"--to {html}: {files.summary.name} would overwrite the result itself; take another name")
    chosen = given or measured_times(result)
    page, text = render_page(result, chosen, prices), report_text.markdown(result, chosen, prices)
    with writing(html):
        html.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(files.html, page.encode("utf-8", "replace"))
        write_bytes(files.markdown, text.encode("utf-8", "replace"))
        write_bytes(files.summary, (json.dumps(summary_of(result, files, prices), indent=2) + "\n").encode())
    return files


def given_times(t_target: str = "", t_draft: str = "") -> GivenTimes | None:
    """The times of `--t-target 25ms --t-draft 3ms`, None when neither is given.

    Raises:
        UserError: only one of them, or no duration.
    """
    if not t_target and not t_draft:
        return None
    if not t_target or not t_draft:
        raise UserError("--t-target and --t-draft go together, e.g. --t-target 25ms --t-draft 3ms")
    return GivenTimes(parse_seconds(t_target, "--t-target"), parse_seconds(t_draft, "--t-draft"))


def summary_of(result: Result, files: ReportFiles | None = None, prices: Prices | None = None) -> dict[str, Any]:
    """The JSON twin for CI: the verdict, the headline numbers of every contestant, warnings, checks."""
    verdict, effects, against_served = result.verdict, result.verdict.effects, result.verdict.against_served
    return {
        "format": RESULT_FORMAT,
        "kind": result.kind,
        "name": result.name,
        "made": result.made,
        **_plain(verdict, FACTS),
        "judged": judged(result).name,
        "contestants": {row.name: _plain(row, HEADLINES) for row in result.contestants},
        "gain": _plain(effects, GAINS) if effects else None,
        "certain": effects.certain if effects else None,
        "against_served": _plain(against_served, (*GAINS, "certain")) if against_served else None,
        "warnings": verdict.warnings,
        "checks": result.checks,
        "commit": result.provenance.get("commit"),
        "files": {"html": files.html.name, "markdown": files.markdown.name} if files else {},
        **({"money": [asdict(row) for row in price_rows(result, prices)]} if prices else {}),
    }


def _plain(record: Record, keys: Sequence[str]) -> dict[str, Any]:
    values = record.model_dump(mode="json", include=set(keys))
    return {key: values[key] for key in keys}


def render_page(result: Result, given: GivenTimes | None = None, prices: Prices | None = None) -> str:
    """The HTML page of a result."""
    given = given or measured_times(result)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        name: getattr(report_tables, name)
        for name in ("number", "signed", "times", "percent", "interval", "visible", "token_text")
    }
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("report.html.j2").render(
        result=result,
        verdict=result.verdict,
        main=judged(result),
        baseline=report_tables.find(result.contestants, "baseline"),
        outcome=OUTCOMES[result.verdict.outcome],
        missing=report_text.missing_lines(result),
        figures={name: Markup(svg) for name, svg in figures_of(result, given).items()},
        given=given,
        given_words=report_text.times_words(given, result.verdict),
        curve_data=_curve_data(result),
        token_data=_token_data(result),
        tables=report_tables,
        text=report_text,
        text_sections=text_sections(result),
        serving_sections=serving_sections(result, prices),
        open_responses=OPEN_RESPONSES,
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_digest=digest,
    )


def _curve_data(result: Result) -> dict[str, Any]:
    """tau over gamma of every rule, for the script that recomputes speed-up at other times."""
    labels, colours = report_tables.labels_of(result), series_of(result)
    main, in_order = report_tables.main_curves(result), report_tables.in_order
    return {
        "chosen": main.rule if main else None,
        "columns": [name for name, _ in in_order(result, main)] if main else [],
        "rules": [
            {
                "rule": curves.rule,
                "series": [
                    {
                        "name": name,
                        "label": labels[name],
                        "colour": colours[name],
                        "gammas": curve.gammas,
                        "tau": curve.tau,
                        "parallel": report_tables.in_one_pass(result, name),
                    }
                    for name, curve in in_order(result, curves)
                ],
            }
            for curves in (result.curves.rules if result.curves else [])
        ],
    }


def _token_data(result: Result) -> list[list[dict[str, Any]]]:
    """Every token of the view, for the script that shows both models' most probable tokens."""
    responses = result.token_view.responses if result.token_view else []
    return [[token.model_dump(include=SHOWN_OF_TOKEN) for token in response.tokens] for response in responses]
