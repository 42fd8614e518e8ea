"""Test the losslessness of a draft. This and task scores are added to the draft's result, and the report shows them next to its verdict."""

from pathlib import Path
from typing import Any

import yaml

from data.files import write_json, writing
from distill.commands.evaluate.scores import Asked
from distill.config.layout import REPORT, find_student
from distill.models.load import load_model, model_fingerprint
from distill.report.page import write_page
from distill.run.lock import held_for
from distill.run.result import Losslessness, Result, TaskScores
from distill.run.session import open_pair
from speculative.drafters.draft import drafts_of
from speculative.errors import UserError
from speculative.explain import losslessness as tests
from speculative.explain.losslessness import LEVEL, Lossless


def losslessness(request: Asked, control: bool = True) -> Lossless:
    """Whether the text is the target's own at the serving settings.

    control: decode once more at 1.1 times the temperature, to show that the tests would have detected that.

    Raises UserError: see `open_pair` and `Draft`.
    """
    with open_pair(request.config, request.draft, request.prompts, request.rule) as pair:
        return tests.losslessness(
            pair.model,
            drafts_of(pair.draft)[-1].drafter(),
            pair.keyed,
            pair.settings.under(request.rule, request.gamma),
            samples=request.samples or 16,
            batch_size=request.config.judge.batch_size,
            control=control,
        )


def lossless_lines(result: Lossless) -> list[str]:
    """Lines for the screen: both tests with their numbers, then the answer."""
    greedy, sampled = result.greedy, result.sampled
    lines = [
        f"greedy text       {greedy.equal} of {greedy.prompts} prompts equal ({greedy.tokens:,} tokens), "
        f"{len(greedy.near_ties)} differ after a near-tie ({result.dtype}), {len(greedy.differences)} differ otherwise",
        *(f"  {line}" for line in greedy.differences[:5]),
    ]
    if sampled is not None:
        settings = ", ".join(f"{name} {value:g}" for name, value in sampled.tested_at.items())
        outside = f", {sampled.impossible} of probability 0" if sampled.impossible else ""
        lines.append(
            f"sampled text      p = {sampled.p:.2g} ({sampled.prompts} prompts x {sampled.samples}, "
            f"{sampled.tokens:,} tokens{outside}; {settings})"
        )
        lines.append(f"a correct decoder fails this check at most about once in {round(1 / LEVEL):,} uses")
    return [*lines, result.sentence]


def result_of_draft(out: Path, request: Asked) -> tuple[Result | None, str]:
    """(the result at `out` if it judges the same draft and target, else the reason why nothing can be added to it).

    The same draft means the same weights, in any directory.
    """
    if not out.is_file():
        return None, f"{out} does not exist; judge the draft first (the same command without the tests)"
    try:
        result = Result.read(out)
    except UserError as error:
        return None, str(error)
    theirs, ours = (yaml.safe_load(result.config) or {}).get("target", {}).get("path"), request.config.target.path
    if theirs != ours:
        return None, f"{out} judges a draft of target {theirs}, not of {ours}"
    judged_path = result.verdict.drafts[-1].path
    try:
        same = judged_path is not None and _fingerprint(judged_path) == _fingerprint(request.draft)
    except UserError as error:
        return None, f"it is not known whether {out} judges this draft: {error}"
    return (result, "") if same else (None, f"{out} judges another draft ({judged_path})")


def add_proofs(out: Path, result: Result, lossless: Losslessness | None, scores: TaskScores | None) -> str:
    """Write the result with these tests, and update its report if there is one. Return a sentence about the files written.

    A later test replaces an earlier one, and task scores replace those of the same scorer.
    """
    update: dict[str, Any] = {}
    if lossless is not None:
        update["losslessness"] = lossless
    if scores is not None:
        update["scores"] = [*(one for one in result.scores if one.scorer != scores.scorer), scores]
    with writing(f"--out {out}"), held_for(out):
        write_json(out, result.model_copy(update=update).record())
    report = out.parent / REPORT
    if result.kind == "run" and report.is_file():
        write_page(out)
        return f"added to {out} and {report}"
    return f"added to {out} (make its report with: understudy show {out} --page FILE)"


def _fingerprint(path: str) -> str:
    return model_fingerprint(load_model("draft", find_student(path)))
