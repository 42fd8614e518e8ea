"""`understudy evaluate`: judges a draft and writes the result, or proves that drafting changes neither text nor task scores."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from distill.commands.evaluate.evaluate import evaluate, parse_gammas
from distill.commands.evaluate.proofs import add_proofs, lossless_lines, losslessness, result_of_draft
from distill.commands.evaluate.scores import Asked, score_lines, task_scores
from distill.commands.options import EvaluateOptions
from distill.commands.output import check_writable, write_asked
from distill.config.load import load_config
from distill.config.run import RunConfig
from distill.report.measured import ways_tables
from distill.report.screen import judgement_table
from speculative.drafters.parallel import DRAFTINGS
from speculative.errors import UserError
from speculative.rules.rule import RULES, Rule


def evaluate_command(options: EvaluateOptions) -> int:
    """Prints and writes what was asked for; returns the exit status, 1 when a test for a doubter fails.

    Raises:
        UserError: options that contradict each other, a place that cannot be written, and see `evaluate`.
    """
    config = load_config(options.config, options.overrides or [])
    rule: Any = options.rule or config.judge_rule
    if rule not in RULES:
        raise UserError(f"--rule {options.rule}: one of {', '.join(RULES)}")
    gammas = parse_gammas(options.gamma) if options.gamma else [config.judge.gamma]
    if options.losslessness or options.scorer:
        if len(gammas) > 1:
            raise UserError(f"--gamma {options.gamma}: --losslessness and --scorer take one gamma")
        return _prove(config, options, rule, gammas[0])
    if options.references is not None:
        raise UserError("--references goes with --scorer")
    if options.drafting:
        raise UserError("--drafting goes with --losslessness and --scorer: a judgement takes the faster way by itself")
    _judge(config, options, rule, gammas)
    return 0


def _judge(config: RunConfig, options: EvaluateOptions, rule: Rule, gammas: list[int]) -> None:
    """A table, or the verdict as JSON; the result in a file."""
    out = options.out
    check_writable("--out", out)
    if _is_of_a_run(out):
        raise UserError(f"--out {out}: holds the result of a training run; give another name")
    result = evaluate(config, options.draft, gammas, rule, out.with_suffix(".proposals.parquet"))
    write_asked("--out", out, result.record())
    verdict = result.verdict
    if options.as_json:
        print(json.dumps(verdict.record(), indent=2))
        return
    console = Console()
    for number, record in sorted((result.gammas or {}).items()):
        console.print(judgement_table(f"rule {rule}, gamma {number}", record))
    for table in ways_tables(verdict):
        console.print(table)
    console.print(verdict.headline, style="bold")
    for line in (*verdict.facts, f"written to {out} (a page of it: understudy report {out})"):
        console.print(line, highlight=False, markup=False)


def _is_of_a_run(path: Path) -> bool:
    """Whether a training run's own result.json is there: drift and report read it."""
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("kind") == "run"
    except (OSError, ValueError, AttributeError):
        return False


def _prove(config: RunConfig, options: EvaluateOptions, rule: Rule, gamma: int) -> int:
    """The tests for a doubter, added to the result at --out where that judges this draft; 1 when one fails."""
    drafting: Any = options.drafting or DRAFTINGS[0]
    if drafting not in DRAFTINGS:
        raise UserError(f"--drafting {drafting}: one of {', '.join(DRAFTINGS)}")
    asked = Asked(options.draft, rule, gamma, options.prompts, options.samples, drafting)
    lossless = losslessness(config, asked, options.control) if options.losslessness else None
    scores = task_scores(config, asked, options.scorer, options.references) if options.scorer else None
    known, why = result_of_draft(options.out, config, options.draft)
    said = f"not added to a result: {why}" if known is None else add_proofs(options.out, known, lossless, scores)
    if options.as_json:
        found = {"losslessness": lossless, "scores": None if scores is None else scores.record()}
        print(json.dumps({name: one for name, one in found.items() if one is not None}, indent=2))
    else:
        lines = [
            *([] if lossless is None else lossless_lines(lossless)),
            *([] if scores is None else score_lines(scores)),
        ]
        print("\n".join([*lines, said]))
    return 0 if (lossless is None or lossless["passed"]) and (scores is None or scores.passed) else 1
