"""The end of a run and of an evaluation: evidence gathered, verdict.json, result.json, the report and the plot written."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.files import write_json
from distill.config.layout import PROPOSALS, PROVENANCE, RESULT, STUDENT, VERDICT, step_folder
from distill.config.load import dump_config
from distill.config.sections import Quantization
from distill.export.quantize import lighter_draft
from distill.models.draft import as_exported, load_draft
from distill.models.load import load_model
from distill.models.target import Target
from distill.report.page import report_command
from distill.report.plot import plot_run
from distill.report.wandb_panels import log_result
from distill.run.answers import Answers
from distill.run.checkpoint import load_judgements
from distill.run.responses import decode_settings
from distill.run.result import Result
from distill.run.verdict_record import Judgement
from distill.verdict.evidence import Evidence, gather, gather_by_replay
from distill.verdict.field import Candidate, line_up
from distill.verdict.findings import SeenByBoth, findings_of, serve_commands
from distill.verdict.question import Question
from distill.verdict.temperatures import temperature_rows
from distill.verdict.token_view import spread_over, token_view
from distill.verdict.verdict import looks_of, verdict_of
from speculative.drafters.draft import Draft
from speculative.explain.target_view import target_entropies
from speculative.measure.measured import DRAFT, SERVED, UNDISTILLED

SHOWN_RESPONSES = 8


def conclude_run(answers: Answers, self_checks: dict[str, Any]) -> None:
    """Ends a run whose last checkpoint is judged, on the main process: plot, verdict, report; what trackers show of them."""
    run, started = answers.run, time.perf_counter()
    plot_run(run.folder)
    result = result_of(answers, self_checks)
    run.progress.spend("verdict", time.perf_counter() - started)
    spent = {stage: round(value, 2) for stage, value in run.progress.seconds.items()}
    result = result.model_copy(update={"verdict": result.verdict.model_copy(update={"seconds": spent})})
    write_conclusion(run.folder, result)
    log_result(run.accelerator, result)
    run.say(result.verdict.headline)


def result_of(answers: Answers, self_checks: dict[str, Any]) -> Result:
    """Verdict and findings, without the seconds that they took.

    With judge.live: never, nothing is decoded or timed: what only that measures is null.
    """
    config, target, run = answers.run.config, answers.target, answers.run.folder
    live = config.judge.live != "never"
    settings = decode_settings(config.serving, config.seed, target).under(config.judge_rule, config.judge.gamma)
    records = load_judgements(run)
    best = max(records, key=lambda record: record.score or 0.0)
    question = Question(config.judge, settings, answers.heldout, answers.context, looks=looks_of(records))
    candidates = _candidates(run, config.judge.served, target, records[0], best)
    # Checkpoints of a parallel draft are judged as its blocks; nobody would serve it so before it has learnt them.
    first = {} if config.student.parallel else {UNDISTILLED: records[0]}
    if live:
        # Replay records are of the dial; a verdict of what was decoded.
        known = first if records[0].live else {}
        question = replace(question, history=answers.stores.past(config.judge_rule))
        field = line_up(question, target.model, candidates, _lighter(config.export.quantize, target, candidates[-1]))
        evidence = gather(question, target, field, known=known, log=run / PROPOSALS)
    else:
        if config.student.parallel:
            candidates[-1] = replace(candidates[-1], draft=Draft(candidates[-1].draft.model, "parallel"))
        evidence = gather_by_replay(question, candidates, first | {DRAFT: best})
    verdict = verdict_of(evidence, checkpoints=records, self_checks=self_checks, others=answers.others)
    result = findings_of(
        evidence, verdict, target.tokenizer, kind="run", name=config.name,
        seen=seen_by_both(evidence, target) if live else None, trained_on=answers.domains,
    )  # fmt: skip
    about = {
        "provenance": json.loads((step_folder(run, best.step or 0) / PROVENANCE).read_text(encoding="utf-8")),
        "config": dump_config(config), "serve": serve_commands(run, target, verdict, settings.sampling, result.curves),
        "files": {"proposals": PROPOSALS if live else None},
    }  # fmt: skip
    return result.model_copy(update=about)


def write_conclusion(run: Path, result: Result) -> None:
    """result.json, the report, and last verdict.json: where that is, a run is finished."""
    write_json(run / RESULT, result.record())
    report_command(run)
    write_json(run / VERDICT, result.verdict.record())


def seen_by_both(evidence: Evidence, target: Target) -> SeenByBoth:
    """What only the target's weights can tell beside the live run."""
    of_prompt = {response.prompt: response.domain for response in evidence.question.frozen}
    responses = evidence.responses or []
    domains = [of_prompt[tuple(response.prompt_ids)] for response in responses]
    chosen = spread_over(responses, domains, SHOWN_RESPONSES)
    view = token_view(
        target.model, evidence.best.draft.model, [responses[index] for index in chosen], [domains[index] for index in chosen],
        target.tokenizer, evidence.question.settings, name=evidence.best.name,
    )  # fmt: skip
    entropies = target_entropies(target.model, evidence.question.frozen)
    return SeenByBoth(entropies, view, temperature_rows(evidence, target))


def _candidates(run: Path, served: str | None, target: Target, first: Judgement, best: Judgement) -> list[Candidate]:
    """Undistilled, served today (when the config names it), distilled."""
    found = []
    for name, record in ((UNDISTILLED, first), (DRAFT, best)):
        path = str(step_folder(run, record.step or 0) / STUDENT)
        found.append(Candidate(name, path, record.step, Draft(as_exported(load_model(name, path), target))))
    if served is not None:
        draft = Draft(as_exported(load_draft(served, target), target))
        found.insert(1, Candidate(SERVED, served, None, draft))
    return found


def _lighter(how: Quantization | None, target: Target, best: Candidate) -> Candidate | None:
    """The distilled draft as export.quantize has it written; None where it is not asked for."""
    if how is None:
        return None
    draft = Draft(lighter_draft(load_model(DRAFT, best.path), how, target))
    return Candidate(f"{DRAFT} in {how}", best.path, best.step, draft)
