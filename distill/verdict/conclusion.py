"""The end of a run and of an evaluation: evidence gathered, verdict.json, result.json, the report and the plot written."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.files import write_json
from distill.config.layout import PROPOSALS, PROVENANCE, RESULT, STUDENT, VERDICT, step_folder
from distill.config.load import dump_config
from distill.config.run import RunConfig
from distill.export.quantize import lighter_draft
from distill.models.draft import as_exported, load_draft
from distill.models.load import load_model
from distill.models.target import Target
from distill.report.page import report_command
from distill.run.checkpoint import load_judgements
from distill.run.others import OtherTarget
from distill.run.responses import decode_settings, past_responses
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
from speculative.engine.models import max_positions
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.explain.target_view import target_entropies
from speculative.measure.measured import DRAFT, SERVED, UNDISTILLED
from speculative.rules.rule import Rule

SHOWN_RESPONSES = 8


def conclude_run(
    config: RunConfig,
    target: Target,
    heldout: Mapping[Rule, list[HeldoutResponse]],
    self_checks: dict[str, Any],
    seconds: Callable[[], Mapping[str, float]],
    context: int,
    trained_on: Sequence[str],
    others: Sequence[OtherTarget] = (),
) -> Result:
    """The result of a run whose last checkpoint is judged, finished: verdict and findings.

    With judge.live: never, nothing is decoded or timed: what only that measures is null.

    Args:
        heldout: frozen held-out responses by rule, the configured rule first.
        seconds: asked when everything is found: by stage, this one included.
        context: tokens of prompt and response that both models take.
        trained_on: domains of the training prompts.
        others: other targets that the draft learned from; judged by replay.
    """
    run, live = config.folder, config.judge.live != "never"
    serving = decode_settings(config.serving, config.seed, target)
    settings = serving.under(config.judge_rule, config.judge.gamma)
    records = load_judgements(run)
    best = max(records, key=lambda record: record.score or 0.0)
    question = Question(config.judge, settings, heldout, context, looks=looks_of(records))
    candidates = _candidates(run, config.judge.served, target, records[0], best)
    # Checkpoints of a parallel draft are judged as its blocks; nobody would serve it so before it has learnt them.
    first = {} if config.student.parallel else {UNDISTILLED: records[0]}
    if live:
        # Replay records are of the dial; a verdict of what was decoded.
        known = first if records[0].live else {}
        question = replace(question, history=past_responses(config, target, config.judge_rule))
        field = line_up(question, target.model, candidates, _lighter(config, target, candidates[-1]))
        evidence = gather(question, target, field, known=known, log=run / PROPOSALS)
    else:
        if config.student.parallel:
            candidates[-1] = replace(candidates[-1], draft=Draft(candidates[-1].draft.model, "parallel"))
        evidence = gather_by_replay(question, candidates, first | {DRAFT: best})
    verdict = verdict_of(evidence, checkpoints=records, self_checks=self_checks, others=others)
    result = findings_of(
        evidence, verdict, target.tokenizer, records, kind="run", name=config.name,
        seen=seen_by_both(evidence, target) if live else None, trained_on=trained_on,
    )  # fmt: skip
    about = {"provenance": _provenance(step_folder(run, best.step or 0)), "config": dump_config(config)}
    serve = serve_commands(run, target, verdict, serving.sampling, result.curves)
    spent = {stage: round(value, 2) for stage, value in seconds().items()}
    told = {"serve": serve, "verdict": verdict.model_copy(update={"seconds": spent})}
    return result.model_copy(update=about | told | {"files": {"proposals": PROPOSALS if live else None}})


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


def require_served(path: str | None, target: Target, longest: int) -> None:
    """Refuses a judge.served that could not be judged in the end, before the long work.

    Raises:
        UserError: not there, another vocabulary, or a context shorter than `longest`, prompt and response.
    """
    if path is None:
        return
    limit = max_positions(load_draft(path, target).config)
    if limit is not None and limit < longest:
        raise UserError(
            f"judge.served: {path} takes {limit} tokens, the longest held-out prompt with its response up to "
            f"{longest}; leave it out, or lower data.max_prompt_tokens or serving.max_tokens"
        )


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


def _lighter(config: RunConfig, target: Target, best: Candidate) -> Candidate | None:
    """The distilled draft as export.quantize has it written; None where it is not asked for."""
    how = config.export.quantize
    if how is None:
        return None
    draft = Draft(lighter_draft(load_model(DRAFT, best.path), how, target))
    return Candidate(f"{DRAFT} in {how}", best.path, best.step, draft)


def _provenance(folder: Path) -> dict[str, Any]:
    path = folder / PROVENANCE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
