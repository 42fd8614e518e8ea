"""Judges one draft by a config's target, held-out prompts and serving settings: what `understudy evaluate` does."""

from dataclasses import replace
from pathlib import Path

from distill.config.load import dump_config
from distill.config.run import RunConfig
from distill.run.provenance import describe_run
from distill.run.responses import RunStores, past_responses
from distill.run.result import Result
from distill.run.run import Run
from distill.run.session import CHECKED_PROMPTS, open_pair
from distill.run.verdict_record import Judgement
from distill.verdict.conclusion import seen_by_both
from distill.verdict.evidence import gather
from distill.verdict.field import Candidate, line_up
from distill.verdict.findings import findings_of
from distill.verdict.question import Question
from distill.verdict.verdict import best_timed_gamma, verdict_of
from speculative.drafters.draft import Draft
from speculative.errors import UserError
from speculative.evaluate import judge
from speculative.measure.measured import DRAFT
from speculative.measure.self_checks import self_checks
from speculative.rules.rule import Rule


def parse_gammas(text: str) -> list[int]:
    """`5` -> [5]; `1:8` -> [1, ..., 8].

    Raises:
        UserError: anything else, or outside 1..16.
    """
    first, colon, last = text.partition(":")
    try:
        gammas = list(range(int(first), int(last) + 1)) if colon else [int(first)]
    except ValueError:
        gammas = []
    if not gammas or gammas[0] < 1 or gammas[-1] > 16:
        raise UserError(f"--gamma {text}: give a number such as 5, or a range such as 1:8, between 1 and 16")
    return gammas


def evaluate(config: RunConfig, path: str, gammas: list[int], rule: Rule, log: Path | None = None) -> Result:
    """The result of one draft at the listed gamma nearest to the best one, with the judgement of every gamma.

    The held-out responses are taken from the config's run folder, or made there. log: every drafted token of the live
    run that the result tells of.

    Raises:
        UserError: see `load_draft` and `load_prompts`.
        SelfCheckError: the judge contradicts itself on this target.
    """
    pair = open_pair(config, path, config.judge.prompts, rule)
    target = pair.target
    checked = pair.settings.under(rule, gammas[0])
    checks = self_checks(target.model, pair.keyed[:CHECKED_PROMPTS], checked, batch_size=config.judge.batch_size)
    frozen = RunStores(Run(config), target).heldout(pair.prompts, rule)
    history = past_responses(config, target, rule)
    question = Question(config.judge, pair.settings.under(rule, max(gammas)), {rule: frozen}, pair.context, history)
    field = line_up(question, target.model, [Candidate(DRAFT, path, path, None, Draft(pair.draft))])
    by_gamma: dict[int, Judgement] = {}
    chosen = gammas[0]
    if len(gammas) > 1:
        for gamma in gammas:
            record, _ = judge(
                target.model, field.candidates[-1].draft, frozen, pair.settings.under(rule, gamma), batch_size=config.judge.batch_size,
                scores=field.scores[rule][DRAFT],
            )  # fmt: skip
            by_gamma[gamma] = Judgement.model_validate(record)
        best, _ = best_timed_gamma(by_gamma[chosen].replay, field.costs[DRAFT])
        chosen = min(gammas, key=lambda gamma: abs(gamma - (best or 1)))
    evidence = gather(replace(question, settings=pair.settings.under(rule, chosen)), target, field, log=log)
    by_gamma[chosen] = evidence.judged[DRAFT]
    verdict = verdict_of(evidence, checkpoints=[by_gamma[chosen]], self_checks=checks)
    result = findings_of(
        evidence, verdict, target.tokenizer, kind="evaluation", name=path, checkpoints=[by_gamma[chosen]], provenance=describe_run(config.seed),
        config=dump_config(config), files={"proposals": log.name if log is not None else None},
        **seen_by_both(evidence, target),
    )  # fmt: skip
    return result.model_copy(update={"gammas": by_gamma})
