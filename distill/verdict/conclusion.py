"""End a run or an evaluation: gather evidence, make the verdict and the findings, and write them."""

import datetime
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from data.files import write_json
from distill.config.layout import EXPORT, PROPOSALS, PROVENANCE, RESULT, STUDENT, VERDICT, best_student, step_folder
from distill.config.load import dump_config
from distill.config.run import RunConfig
from distill.engines.protocol.facts import gather_facts
from distill.engines.protocol.serving_engine import serving_engine
from distill.engines.protocol.verdict import check_all, with_places
from distill.export.facts import ways_to_serve
from distill.export.quantize import lighter_draft
from distill.models.draft import as_exported, served_draft
from distill.models.load import load_model
from distill.models.target import Target, load_target_side
from distill.report.figures import plot_run
from distill.report.page import write_page
from distill.report.screen import show_run
from distill.run.checkpoint import load_judgements
from distill.run.responses import RunData, decode_settings
from distill.run.result import RESULT_FORMAT, Curves, Result, RuleCurves, ServeCommand, TokenView
from distill.run.verdict_record import Verdict
from distill.verdict.decoding import Decoding, NamedDraft
from distill.verdict.evidence import Evidence, gather, gather_by_replay, with_speeds
from distill.verdict.judging_setup import JudgingSetup
from distill.verdict.scored_drafts import score_and_time
from distill.verdict.token_view import spread_over, token_view
from distill.verdict.verdict import training_row, verdict_of
from speculative.drafters.draft import Draft
from speculative.evaluate import Judgement
from speculative.explain.disagreements import disagreements
from speculative.explain.slices import slice_tables
from speculative.explain.target_view import target_entropies
from speculative.explain.token_class import token_pieces
from speculative.measure.measured import DRAFT, SERVED, UNDISTILLED
from speculative.measure.metrics import CURVE_GAMMAS, rule_curve
from speculative.measure.record import VERSION, Record
from speculative.progress import phase
from speculative.rules.rule import RULES, Rule
from speculative.rules.sampling import SamplingSettings

SHOWN_RESPONSES = 8
RULES_APART = 0.02  # of tau; two rules of an engine that are closer need no sentence


def conclude_run(data: RunData, self_checks: dict[str, Any]) -> None:
    """End a run whose last checkpoint is judged: write plot, verdict and report, and show them. All ranks must call it: the others decode
    what the main process asks for, and wait while it times.
    """
    run, started = data.run, time.perf_counter()
    decoding = Decoding(run, data.target)
    if not run.main:
        return decoding.take_part()
    with phase("verdict"):
        plot_run(run.folder)
        result = result_of(data, self_checks, decoding)
    run.progress.spend("verdict", time.perf_counter() - started)
    spent = {stage: round(value, 2) for stage, value in run.progress.seconds.items()}
    result = result.model_copy(update={"verdict": result.verdict.model_copy(update={"seconds": spent})})
    with phase("report"):
        write_conclusion(run.folder, result)
    decoding.end()
    show_run(run.folder)


def result_of(data: RunData, self_checks: dict[str, Any], decoding: Decoding) -> Result:
    """Verdict and findings, without the seconds that they took.

    With judge.live: never or a target at a server, nothing is decoded or timed, and every figure that needs it is null.
    """
    config, target, run = data.run.config, data.target, data.run.folder
    live = config.decodes
    settings = decode_settings(config.serving, config.seed, target).under(config.judge_rule, config.judge.gamma)
    records = load_judgements(run)
    best = max(records, key=lambda record: record.score or 0.0)
    setup = JudgingSetup(
        config.judge,
        settings,
        data.heldout,
        data.context,
        data.past(config.judge_rule),
        looks=max(1, len(records) - 1),  # the best one was picked from all but step 0
        decoding=decoding,
    )
    with target.loaded() if live else nullcontext() as model:
        drafts = _drafts(run, config.judge.served_paths, target, records[0], best)
        if model is not None:
            lighter = None
            if (how := config.export.quantize) is not None:
                quantised = lighter_draft(load_model(DRAFT, drafts[-1].path), how, target)
                lighter = replace(drafts[-1], name=f"{DRAFT} in {how}", draft=Draft(quantised))
            scored = score_and_time(setup, model, drafts, lighter)
            evidence = gather(setup, model, scored, log=run / PROPOSALS)
        else:
            if config.student.parallel:
                drafts[-1] = replace(drafts[-1], draft=Draft(drafts[-1].draft.model, "parallel"))
            # Checkpoints of a parallel draft are judged block by block, but the undistilled one would be served token by token.
            first = {} if config.student.parallel else {UNDISTILLED: records[0]}
            evidence = gather_by_replay(setup, drafts, first | {DRAFT: best})
        learned = training_row(setup, evidence.best)
        verdict = verdict_of(evidence, checkpoints=records, self_checks=self_checks, learned=learned)
        result = findings_of(
            evidence,
            verdict,
            target.tokenizer,
            kind="run",
            name=config.name,
            seen=model,
            trained_on=data.domains,
        )
    facts = [*verdict.facts, *other_rules(config, verdict, result.curves)]
    about = {
        "verdict": verdict.model_copy(update={"facts": facts}),
        "provenance": Record.read(step_folder(run, best.step or 0) / PROVENANCE).record(),
        "config": dump_config(config),
        "serve": serve_commands(run, target, verdict, settings.sampling, result.curves),
        "files": {"proposals": PROPOSALS if live else None},
    }
    return result.model_copy(update=about)


def other_rules(config: RunConfig, verdict: Verdict, curves: Curves | None) -> list[str]:
    """A sentence for each other rule that the serving engine can run, if tau by replay differs by more than a share RULES_APART."""
    engine = serving_engine(config)
    taus = curves.taus_at(verdict.gamma, verdict.drafts[-1].way) if curves else {}
    if engine is None or verdict.rule not in taus:
        return []
    tau, others = taus[verdict.rule], [rule for rule in engine.rules_at(config.serving.sampling) if rule in taus]
    return [
        f"{engine.name} can also accept by rule {rule}: tau {taus[rule]:.2f} at gamma {verdict.gamma}, {tau:.2f} by {verdict.rule}."
        for rule in others
        if abs(taus[rule] / tau - 1.0) > RULES_APART
    ]


def write_conclusion(run: Path, result: Result) -> None:
    """Write result.json, the report, and last verdict.json: its presence says that the run is finished."""
    write_json(run / RESULT, result.record())
    write_page(run)
    write_json(run / VERDICT, result.verdict.record())


def _token_view(evidence: Evidence, target: PreTrainedModel, tokenizer: Any) -> TokenView:
    """Some responses of the live run, spread over the domains."""
    of_prompt = {response.prompt: response.domain for response in evidence.setup.heldout}
    responses = evidence.responses or []
    domains = [of_prompt[tuple(response.prompt_ids)] for response in responses]
    chosen = spread_over(responses, domains, SHOWN_RESPONSES)
    return token_view(
        target,
        evidence.best.draft.model,
        [responses[index] for index in chosen],
        [domains[index] for index in chosen],
        tokenizer,
        evidence.setup.settings,
        name=evidence.best.name,
    )


def _drafts(run: Path, served: Sequence[str], target: Target, first: Judgement, best: Judgement) -> list[NamedDraft]:
    """The undistilled draft, the served ones that the config names and the distilled one."""
    drafts = []
    for name, record in ((UNDISTILLED, first), (DRAFT, best)):
        path = str(step_folder(run, record.step or 0) / STUDENT)
        drafts.append(NamedDraft(name, path, record.step, Draft(as_exported(load_model(name, path), target))))
    for number, path in enumerate(served, start=1):
        draft = Draft(served_draft(path, target))
        name = SERVED if number == 1 else f"{SERVED} {number}, {Path(path).name}"
        drafts.insert(number, NamedDraft(name, path, None, draft))
    return drafts


def findings_of(
    evidence: Evidence,
    verdict: Verdict,
    tokenizer: Any,
    *,
    kind: str,
    name: str,
    seen: PreTrainedModel | None,
    trained_on: list[str] | None = None,
) -> Result:
    """The result without its provenance. seen: the target of a live run. trained_on: domains of the training
    prompts; None when nothing was trained.
    """
    setup, best = evidence.setup, evidence.best.name
    scores = {one.name: evidence.own_scores(one.name) for one in evidence.drafts}
    pieces = [token_pieces(tokenizer, response.response_ids) for response in setup.heldout]
    slices = slice_tables(
        setup.heldout,
        scores,
        rule=setup.rule,
        pieces=pieces,
        best=best,
        entropies=target_entropies(seen, setup.heldout) if seen else None,
    )
    costs = evidence.best_costs
    worst = disagreements(
        setup.heldout,
        scores[best],
        rule=setup.rule,
        gamma=setup.gamma,
        tokenizer=tokenizer,
        seconds_per_block=costs.step_seconds * costs.block_price(setup.gamma) if costs else None,
    )
    return Result(
        format=RESULT_FORMAT,
        version=VERSION,
        kind=kind,
        name=name,
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        verdict=verdict,
        curves=curves_of(evidence),
        slices=slices,
        disagreements=worst,
        trained_on=trained_on,
        timed_prompts=_timed(evidence),
        token_view=_token_view(evidence, seen, tokenizer) if seen else None,
    )


def curves_of(evidence: Evidence) -> Curves:
    """Curves of every rule that some held-out responses can be replayed under; the other rules with the reason."""
    rules, gamma = [], evidence.setup.gamma
    covered: set[Rule] = set()
    for text_rule, text in evidence.setup.texts.items():
        keys = [response.prompt for response in text]
        sampling = "temperature 0" if text_rule.greedy else "the serving settings"
        known = not any(np.isnan(response.log_target_probs).any() for response in text)
        for rule in text_rule.replayable(known, evidence.setup.settings.sampling.truncates):
            if rule in covered:
                continue
            covered.add(rule)
            of = {
                name: with_speeds(rule_curve(scores, keys, rule, survival_gamma=gamma), evidence.costs.get(name))
                for name, scores in evidence.scores[text_rule].items()
            }
            # Steps are timed under the run's own rule; sampling adds a little to each.
            timed = evidence.costs and rule != evidence.setup.rule
            own = f"; step times are those of rule {evidence.setup.rule}" if timed else ""
            note = f"by replay of text answered at {sampling}{own}"
            rules.append(RuleCurves(rule=rule.name, ways=of, note=note))
    rules.sort(key=lambda entry: entry.rule != evidence.setup.rule.name)
    lacking = "needs text that the target sampled, but this run serves at temperature 0"
    if any(not rule.greedy for rule in covered):
        lacking = "needs the target's probabilities under the serving settings, but its server returns only the model's unmodified ones"
    refused = {rule.name: lacking for rule in map(Rule.named, RULES) if rule not in covered}
    for rule in map(Rule.named, list(refused)):
        if rule.greedy:
            refused[rule.name] = "needs text that the target answered at temperature 0, but this run has none"
        if not rule.truncated and any(one.draws for one in covered):
            del refused[rule.name]  # without truncation it is the rule that draws
    return Curves(gammas=list(CURVE_GAMMAS), rules=rules, refused=refused)


def _timed(evidence: Evidence) -> dict[str, dict[str, float]]:
    rates: dict[str, dict[str, float]] = {}
    for name, samples in evidence.timing.samples.items() if evidence.timing else ():
        for key, sample in samples.items():
            rates.setdefault(key, {})[name] = sample.tokens_per_second
    return rates


def serve_commands(
    run: Path, target: Target, verdict: Verdict, sampling: SamplingSettings, curves: Curves | None
) -> list[ServeCommand]:
    """The command that starts each engine with this run's draft, once the draft is exported to RUN/export."""
    student = load_target_side(str(best_student(run)), False)
    draft = str((run / EXPORT).resolve())
    _, served = ways_to_serve(verdict, curves, student.config)
    facts = gather_facts(target.side, student, draft, sampling=sampling, **served)
    return [
        ServeCommand(
            engine=check.engine,
            ok=check.ok,
            language=check.language,
            note=check.rule_note,
            command=with_places(check.command, check.language, draft, facts.target, facts.revision),
        )
        for check in check_all(facts)
    ]
