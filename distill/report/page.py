"""`understudy report RUN`: result.json as one HTML file that needs no network, with a small JSON file for CI. The page is
templates/report.html.j2 with the registered sections, style and script inlined. Text of models and prompts is untrusted: jinja2 escapes
it, and a content security policy allows only the page's own script and no network requests.
"""

import base64
import hashlib
import importlib
import json
import pkgutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from data.files import write_bytes, writing
from distill.config.layout import REPORT, RESULT
from distill.report import sections
from distill.report.durations import parse_seconds
from distill.report.figures import figures_of
from distill.report.money import Prices, price_rows
from distill.report.section import SECTIONS, Made, Section
from distill.report.sections.tokens import token_text
from distill.report.view import OUTCOMES, GivenTimes, View, measured_times
from distill.run.lock import held_for
from distill.run.readback_record import load_readback
from distill.run.result import RESULT_FORMAT, Result, RuleCurves, load_result
from distill.run.verdict_record import load_engine_costs
from speculative.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"
FACTS = (
    "run",
    "outcome",
    "pays",
    "headline",
    "facts",
    "rule",
    "gamma",
    "prompts",
    "tokens",
    "measured",
    "gain",
    "against_served",
    "warnings",
)


@dataclass(frozen=True)
class ReportFiles:
    """The files that a report wrote, and their result."""

    html: Path
    summary: Path
    result: Result


def report_command(
    source: Path, to: Path | None = None, given: GivenTimes | None = None, prices: Prices | None = None
) -> ReportFiles:
    """Write the report of a run: FILE.html, and FILE.json in the same folder. source: a run's folder with `result.json`, or such a file.
    to: the HTML file; default `report.html` next to the result. given: step times of other hardware for the second speed-up curve; default
    the measured ones. prices: of an hour, to show the cost of tokens and responses. Raises UserError: no result, or one that cannot be
    read; `to` is not an .html file, cannot be written, or belongs to a run that is in use.
    """
    path = source / RESULT if source.is_dir() or not source.suffix else source
    result, costs = load_result(path), load_engine_costs(path.parent)
    timed = result.verdict.model_copy(update={"engine": costs}) if costs else result.verdict
    result = result.model_copy(update={"readback": load_readback(path.parent), "verdict": timed})
    html = to or path.parent / REPORT
    if html.suffix not in (".html", ".htm"):
        raise UserError(f"--to {html}: must end in .html; report.json is written next to it")
    files = ReportFiles(html, html.with_suffix(".json"), result)
    if path.resolve() in {files.html.resolve(), files.summary.resolve()}:
        raise UserError(f"--to {html}: {files.summary.name} would overwrite the result itself; give another name")
    page = render_page(result, given, prices)
    with writing(html), held_for(html):
        html.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(files.html, page.encode("utf-8", "replace"))
        write_bytes(files.summary, (json.dumps(summary_of(result, files, prices), indent=2) + "\n").encode())
    return files


def given_times(t_target: str = "", t_draft: str = "") -> GivenTimes | None:
    """The times of `--t-target 25ms --t-draft 3ms`, None when neither is given. Raises UserError: only one is given, or it is not a
    duration.
    """
    if not t_target and not t_draft:
        return None
    if not t_target or not t_draft:
        raise UserError("give --t-target and --t-draft together, e.g. --t-target 25ms --t-draft 3ms")
    return GivenTimes(parse_seconds(t_target, "--t-target"), parse_seconds(t_draft, "--t-draft"))


def summary_of(result: Result, files: ReportFiles | None = None, prices: Prices | None = None) -> dict[str, Any]:
    """The small file for CI: the verdict, every measured row, warnings, checks."""
    verdict = result.verdict.model_dump(mode="json", include=set(FACTS))
    return {
        "format": RESULT_FORMAT,
        "kind": result.kind,
        "name": result.name,
        "made": result.made,
        **{key: verdict[key] for key in FACTS},
        "checks": result.verdict.self_checks,
        "commit": result.provenance.get("commit"),
        "files": {"html": files.html.name} if files else {},
        **({"money": [asdict(row) for row in price_rows(result.verdict, prices)]} if prices else {}),
    }


def made_sections(view: View) -> list[tuple[Section, Made]]:
    """Every registered section that applies to this result, from top to bottom, with its parts or the reason why it is empty."""
    for module in pkgutil.iter_modules(sections.__path__):
        importlib.import_module(f"{sections.__name__}.{module.name}")
    made = [(one, one.make(view)) for one in sorted(SECTIONS.values(), key=lambda one: one.order)]
    return [(one, parts) for one, parts in made if parts is not None]


def render_page(result: Result, given: GivenTimes | None = None, prices: Prices | None = None) -> str:
    view = View(result, given or measured_times(result), prices)
    view = replace(view, figures=figures_of(view))
    loader, strict = jinja2.FileSystemLoader(TEMPLATES), jinja2.StrictUndefined
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["token_text"] = token_text
    script, style = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.js", "report.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    shown, verdict = made_sections(view), result.verdict
    return environment.get_template("report.html.j2").render(
        result=result,
        verdict=verdict,
        outcome=OUTCOMES[verdict.outcome],
        sections=shown,
        links=[one for one, _ in shown if one.nav],
        curve_data=_curve_data(view),
        style=Markup(style),
        script=Markup(script),
        script_digest=digest,
    )


def _curve_data(view: View) -> dict[str, object]:
    """tau over gamma of every rule, for the script that predicts speed-up at other times."""

    def series(curves: RuleCurves) -> list[dict[str, object]]:
        return [
            {"name": name, "gammas": curve.gammas, "tau": curve.tau, "parallel": view.in_one_pass(name)}
            for name, curve in view.in_order(curves)
        ]

    rules = view.result.curves.rules if view.result.curves else []
    return {
        "chosen": view.curves.rule if view.curves else None,
        "columns": [name for name, _ in view.in_order(view.curves)] if view.curves else [],
        "rules": [{"rule": curves.rule, "series": series(curves)} for curves in rules],
    }
