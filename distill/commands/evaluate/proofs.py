"""Losslessness and task scores of a draft, added to the result that judges it: the report shows them beside its verdict."""

from pathlib import Path
from typing import Any

import yaml

from data.files import write_json
from distill.commands.output import writing
from distill.config.layout import REPORT, find_student
from distill.config.run import RunConfig
from distill.models.load import load_model, model_fingerprint
from distill.report.page import report_command
from distill.report.tables import judged
from distill.run.result import Losslessness, Result, TaskScores, load_result
from speculative.errors import UserError


def result_of_draft(out: Path, config: RunConfig, draft: str) -> tuple[Result | None, str]:
    """(the result at `out` when it judges this very draft beside this target, why nothing can be added to it otherwise).

    The very draft: the same weights, wherever they lie.
    """
    if not out.is_file():
        return None, f"{out} is not there; judge the draft first (the same command without the tests)"
    try:
        result = load_result(out)
    except UserError as error:
        return None, str(error)
    theirs = (yaml.safe_load(result.config) or {}).get("target", {}).get("path")
    if theirs != config.target.path:
        return None, f"{out} is of target {theirs}, not of {config.target.path}"
    known = judged(result).path
    try:
        same = known is not None and _fingerprint(known) == _fingerprint(draft)
    except UserError as error:
        return None, f"whether {out} judges this draft is not known: {error}"
    return (result, "") if same else (None, f"{out} judges another draft ({known})")


def add_proofs(out: Path, result: Result, results: dict[str, dict[str, Any]]) -> str:
    """Writes the result with these tests, and its report anew where there is one; says what was written.

    A later test takes the place of an earlier one, task scores that of the same scorer.
    """
    update: dict[str, Any] = {}
    if "losslessness" in results:
        update["losslessness"] = Losslessness.model_validate(results["losslessness"])
    if "scores" in results:
        own = TaskScores.model_validate(results["scores"])
        update["scores"] = [*(one for one in result.scores if one.scorer != own.scorer), own]
    with writing("--out", out):
        write_json(out, result.model_copy(update=update).record())
    report = out.parent / REPORT
    if result.kind == "run" and report.is_file():
        report_command(out)
        return f"added to {out} and {report}"
    return f"added to {out} (a page of it: understudy report {out})"


def _fingerprint(path: str) -> str:
    return model_fingerprint(load_model("draft", find_student(path)))
