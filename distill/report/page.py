"""`understudy report RUN`: result.json as one HTML file that needs no network, with a Markdown and a small JSON twin.

The page is distill/templates/report.html.j2 with its style and script inlined. Text of models and prompts is hostile: it is escaped by
jinja2, and a content security policy lets no script run but ours and nothing be fetched.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from data.files import write_bytes
from distill.config.layout import REPORT, RESULT
from distill.report import markdown as report_text
from distill.report import tables as report_tables
from distill.report.durations import parse_seconds
from distill.report.figures import figures_of, series_of
from distill.report.tables import OUTCOMES, GivenTimes, judged, measured_times
from distill.run.folder import RESULT_FORMAT
from speculative.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"
OPEN_RESPONSES = 2  # the others are folded
# What each row must hold for a report to be made of it; everything else may be null or missing.
ROW_KEYS = {
    "contestants": ("name", "alpha", "tau"),
    "steps": ("step", "alpha", "tau"),
    "slices": ("dimension", "rows"),
    "disagreements": ("context", "target_said", "draft_wanted", "count", "prompts"),
    "forgetting": ("domain", "trained_on", "tokens", "alpha"),
    "serve": ("engine", "ok", "language", "command"),
}
SECTION_KEYS = {
    "verdict": ("rule", "gamma", "prompts", "tokens", "outcome", "sentence"),
    "curves": ("gammas", "rules"),
    "costs": ("target_step_seconds", "draft_step_seconds", "cost_ratio", "verify_ratio"),
    "calibration": ("bins", "words"),
    "token_view": ("contestant", "rule", "gamma", "responses"),
}
OPTIONAL_SECTIONS = (
    "made", "steps", "curves", "costs", "slices", "disagreements", "calibration", "forgetting", "live_prompts", "timed_prompts", "token_view",
    "checks",
    "serve", "config", "provenance", "files",
)  # fmt: skip
OPTIONAL_OF_CONTESTANT = (
    "label", "path", "step", "alpha_ci", "tau_ci", "tau_by", "accepted_per_drafted", "accepted_per_drafted_ci", "survival", "speed_up",
    "speed_up_ci", "tokens_per_second",
)  # fmt: skip
RESPONSE_KEYS = ("key", "domain", "prompt", "tokens", "blocks", "accepted", "drafted", "tokens_count")
TOKEN_KEYS = ("text", "id", "by", "block", "target_top", "draft_top")


@dataclass(frozen=True)
class ReportFiles:
    """What a report wrote."""

    html: Path
    markdown: Path
    summary: Path


def report_command(source: Path, to: Path | None = None, given: GivenTimes | None = None) -> ReportFiles:
    """Writes the report of a run: FILE.html, and FILE.md and FILE.json beside it.

    Args:
        source: a run's folder with `result.json`, or such a file.
        to: the HTML file; default `report.html` beside the result.
        given: step times of other hardware for the second speed-up curve; default those measured.

    Raises:
        UserError: no result there, or one that cannot be read; `to` is no .html file or cannot be written.
    """
    path = source / RESULT if source.is_dir() or not source.suffix else source
    result = load_result(path)
    html = to or path.parent / REPORT
    if html.suffix not in (".html", ".htm"):
        raise UserError(f"--to {html}: must end in .html; report.md and report.json are written beside it")
    files = ReportFiles(html, html.with_suffix(".md"), html.with_suffix(".json"))
    if path.resolve() in {file.resolve() for file in (files.html, files.markdown, files.summary)}:
        raise UserError(f"--to {html}: {files.summary.name} would overwrite the result itself; take another name")
    chosen = given or measured_times(result)
    try:
        page, text = render_page(result, chosen), report_text.markdown(result, chosen)
    except (jinja2.UndefinedError, KeyError) as error:
        raise UserError(f"{path}: not complete, a key is missing ({error}); make it again") from error
    try:
        html.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(files.html, page.encode("utf-8", "replace"))
        write_bytes(files.markdown, text.encode("utf-8", "replace"))
        write_bytes(files.summary, (json.dumps(summary_of(result, files), indent=2) + "\n").encode())
    except OSError as error:
        raise UserError(f"{html}: cannot be written ({error.strerror or error})") from error
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


def load_result(path: Path) -> dict[str, Any]:
    """A result.json with every key that a report cannot do without.

    Raises:
        UserError: missing, damaged, of another format, or a key is missing (it is named).
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: not there; finish the run (start its command again), or make one with "
            "`understudy evaluate DRAFT --config CONFIG --out result.json`"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise UserError(f"{path}: damaged ({' '.join(str(error).split())}); make it again") from error
    if not isinstance(result, dict) or "format" not in result:
        raise UserError(f"{path}: no result of a run (it has no key `format`); give a run's folder or its {RESULT}")
    if result["format"] != RESULT_FORMAT:
        raise UserError(
            f"{path}: format {result['format']!r}, this version reads {RESULT_FORMAT}; make it again with this version"
        )
    missing = next(_missing_keys(result), None)
    if missing:
        raise UserError(
            f"{path}: key {missing} is missing; make it again with `understudy evaluate` or by ending the run"
        )
    return completed(result)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def completed(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result with null for every optional section and every optional key of a contestant that is not there."""
    contestants = [{**dict.fromkeys(OPTIONAL_OF_CONTESTANT), **row} for row in result["contestants"]]
    return {**dict.fromkeys(OPTIONAL_SECTIONS), **result, "contestants": contestants}


def _missing_keys(result: Mapping[str, Any]) -> Any:
    """Dotted names of what must be there and is not."""

    def of(value: Any, keys: tuple[str, ...], where: str) -> Any:
        yield from (f"{where}.{key}" for key in keys if not isinstance(value, Mapping) or key not in value)

    yield from (key for key in ("kind", "name", "verdict", "contestants") if result.get(key) in (None, []))
    for section, keys in SECTION_KEYS.items():
        if result.get(section) is not None:
            yield from of(result[section], keys, section)
    for section, keys in ROW_KEYS.items():
        for place, row in enumerate(result.get(section) or []):
            yield from of(row, keys, f"{section}[{place}]")
    for place, response in enumerate((result.get("token_view") or {}).get("responses", [])):
        yield from of(response, RESPONSE_KEYS, f"token_view.responses[{place}]")
        for at, token in enumerate(response["tokens"]):
            yield from of(token, TOKEN_KEYS, f"token_view.responses[{place}].tokens[{at}]")


def summary_of(result: Mapping[str, Any], files: ReportFiles | None = None) -> dict[str, Any]:
    """The JSON twin for CI: the verdict, the headline numbers of every contestant, warnings, checks."""
    verdict = result["verdict"]
    keys = (
        "step", "alpha", "alpha_ci", "tau", "tau_ci", "tau_by", "accepted_per_drafted", "speed_up", "speed_up_ci", "tokens_per_second",
    )  # fmt: skip
    effects, against_served = verdict.get("effects") or {}, verdict.get("against_served")
    facts = (
        "outcome",
        "pays_off",
        "sentence",
        "rule",
        "gamma",
        "prompts",
        "tokens",
        "best_gamma",
        "predicted_speed_up",
    )
    return {
        "format": RESULT_FORMAT,
        "kind": result["kind"],
        "name": result["name"],
        "made": result.get("made"),
        **{key: verdict.get(key) for key in facts},
        "judged": judged(result)["name"],
        "contestants": {row["name"]: {key: row.get(key) for key in keys} for row in result["contestants"]},
        "gain": {key: effects.get(key) for key in ("alpha", "tau", "speed_up")} if effects else None,
        "certain": effects.get("certain"),
        "against_served": {key: against_served.get(key) for key in ("alpha", "tau", "speed_up", "certain")}
        if against_served
        else None,
        "warnings": verdict.get("warnings") or [],
        "checks": result.get("checks") or {},
        "commit": (result.get("provenance") or {}).get("commit"),
        "files": {"html": files.html.name, "markdown": files.markdown.name} if files else {},
    }


def render_page(result: Mapping[str, Any], given: GivenTimes | None = None) -> str:
    """The HTML page of a result."""
    result, given = completed(result), given or measured_times(result)
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
        verdict=result["verdict"],
        main=judged(result),
        baseline=report_tables.find(result["contestants"], "baseline"),
        outcome=OUTCOMES.get(result["verdict"]["outcome"], result["verdict"]["outcome"]),
        missing=report_text.missing_lines(result),
        figures={name: Markup(svg) for name, svg in figures_of(result, given).items()},
        given=given,
        given_words=report_text.times_words(given),
        curve_data=_curve_data(result),
        token_data=_token_data(result),
        tables=report_tables,
        text=report_text,
        open_responses=OPEN_RESPONSES,
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_digest=digest,
    )


def _curve_data(result: Mapping[str, Any]) -> dict[str, Any]:
    """tau over gamma of every rule, for the script that recomputes speed-up at other times."""
    labels, colours = report_tables.labels_of(result), series_of(result)
    main = report_tables.main_curves(result)
    return {
        "chosen": main["rule"] if main else None,
        "columns": [name for name in labels if main and name in main["contestants"]],
        "rules": [
            {
                "rule": curves["rule"],
                "series": [
                    {
                        "name": name,
                        "label": label,
                        "colour": colours[name],
                        **{key: curves["contestants"][name][key] for key in ("gammas", "tau")},
                    }
                    for name, label in labels.items()
                    if name in curves["contestants"]
                ],
            }
            for curves in (result.get("curves") or {}).get("rules") or []
        ],
    }


def _token_data(result: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Every token of the view, for the script that shows both models' most probable tokens."""
    view = result.get("token_view") or {"responses": []}
    keys = ("text", "id", "by", "block", "target_prob", "draft_prob", "target_top", "draft_top")
    return [[{key: token.get(key) for key in keys} for token in response["tokens"]] for response in view["responses"]]
