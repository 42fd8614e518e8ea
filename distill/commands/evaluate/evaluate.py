"""`understudy evaluate`: judge a draft and write the result, or test that drafting changes neither text nor task scores."""

import json
from pathlib import Path

from rich.console import Console

from distill.commands.evaluate.options import EvaluateOptions
from distill.commands.evaluate.proofs import add_proofs, lossless_lines, losslessness, result_of_draft
from distill.commands.evaluate.scores import Asked, score_lines, task_scores
from distill.commands.output import check_known, check_writable, write_asked
from distill.config.load import dump_config, load_trusted
from distill.config.run import RunConfig
from distill.engines.protocol.serving_engine import for_engine
from distill.report.measured import ways_tables
from distill.report.screen import judgement_table
from distill.run.provenance import describe_run
from distill.run.responses import RunData
from distill.run.result import Losslessness, Result
from distill.run.run import Run
from distill.run.session import CHECKED_PROMPTS, open_pair
from distill.verdict.conclusion import findings_of
from distill.verdict.decoding import NamedDraft
from distill.verdict.evidence import gather
from distill.verdict.judging_setup import JudgingSetup
from distill.verdict.scored_drafts import score_and_time
from distill.verdict.verdict import verdict_of
from speculative.drafters.draft import Draft
from speculative.errors import UserError
from speculative.measure.measured import DRAFT
from speculative.measure.self_checks import self_checks
from speculative.rules.rule import RULES, Rule


def evaluate_command(options: EvaluateOptions) -> int:
    """Print and write what was asked for. Returns the exit status, 1 if a losslessness or score test fails.

    Raises UserError: options that contradict each other, a place that cannot be written, and see `evaluate`.
    """
    config = for_engine(load_trusted(options.config, options.trust_remote_code, options.overrides or []))
    check_known("--rule", options.rule, ("", *RULES))
    rule = Rule.named(options.rule) if options.rule else config.judge_rule
    gamma = options.gamma or config.judge.gamma
    if options.losslessness or options.scorer:
        return _prove(options, Asked(config, options.draft, rule, gamma, options.prompts))
    if options.references is not None:
        raise UserError("--references needs --scorer")
    out = options.out
    check_writable("--out", out)
    if _is_of_a_run(out):
        raise UserError(f"--out {out}: this is the result of a training run; give another name")
    result = evaluate(config, options.draft, gamma, rule, out.with_suffix(".proposals.parquet"))
    write_asked("--out", out, result.record())
    _print(result, out)
    return 0


def _print(result: Result, out: Path) -> None:
    verdict, console = result.verdict, Console()
    console.print(judgement_table(f"rule {verdict.rule}, gamma {verdict.gamma}", verdict.checkpoints[-1]))
    for table in ways_tables(verdict):
        console.print(table)
    console.print(verdict.headline, style="bold")
    for line in (*verdict.facts, f"written to {out} (make its report with: understudy show {out} --page FILE)"):
        console.print(line, highlight=False, markup=False)


def _is_of_a_run(path: Path) -> bool:
    """Whether a training run's own result.json is there: drift and report read it."""
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("kind") == "run"
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _prove(options: EvaluateOptions, asked: Asked) -> int:
    """Run the losslessness and score tests and add them to the result at --out if it judges this draft; 1 if one fails."""
    lossless = losslessness(asked) if options.losslessness else None
    scores = task_scores(asked, options.scorer, options.references) if options.scorer else None
    proof = None if lossless is None else Losslessness.model_validate({"draft": asked.draft, **lossless.record()})
    known, why = result_of_draft(options.out, asked)
    said = f"Not added to a result: {why}" if known is None else add_proofs(options.out, known, proof, scores)
    print(*(lossless_lines(lossless) if lossless else ()), *(score_lines(scores) if scores else ()), said, sep="\n")
    return int((lossless is not None and bool(lossless.failed)) or (scores is not None and not scores.passed))


def evaluate(config: RunConfig, path: str, gamma: int, rule: Rule, log: Path | None = None) -> Result:
    """The result of one draft, judged at this gamma.

    The held-out responses are taken from the config's run folder, or made there. log: every drafted token of the live run.

    Raises UserError: see `load_draft` and `load_prompts`. SelfCheckError: the judge contradicts itself on this target.
    """
    with open_pair(config, path, config.judge.prompts, rule) as pair:
        target, settings = pair.target, pair.settings.under(rule, gamma)
        checks = self_checks(pair.model, pair.keyed[:CHECKED_PROMPTS], settings, batch_size=config.judge.batch_size)
        data = RunData(Run(config), target)
        heldout = data.heldout_of(pair.prompts, rule)
        setup = JudgingSetup(config.judge, settings, {rule: heldout}, pair.context, data.past(rule))
        scored = score_and_time(setup, pair.model, [NamedDraft(DRAFT, path, None, Draft(pair.draft))])
        evidence = gather(setup, pair.model, scored, log=log)
        verdict = verdict_of(evidence, checkpoints=[evidence.judged[DRAFT]], self_checks=dict(checks))
        result = findings_of(evidence, verdict, target.tokenizer, kind="evaluation", name=path, seen=pair.model)
    about = {"provenance": describe_run(config.seed), "config": dump_config(config)}
    return result.model_copy(update=about | {"files": {"proposals": log.name if log is not None else None}})
