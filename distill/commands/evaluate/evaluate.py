"""Judges one draft by a config's target, held-out prompts and serving settings: what `understudy evaluate` does."""

from pathlib import Path
from typing import Any

from distill.config.load import dump_config
from distill.config.run import RunConfig
from distill.models.draft import load_draft, served_copy
from distill.models.target import ServedTarget
from distill.run.prompts import load_prompts
from distill.run.provenance import describe_run
from distill.run.responses import RunStores, decode_settings
from distill.run.session import context_limit, new_accelerator, positions_of
from distill.verdict.conclusion import seen_by_both
from distill.verdict.evidence import BEST, Contestant, gather, score_all, step_costs, typical_length
from distill.verdict.findings import findings_of
from distill.verdict.verdict import best_gamma_facts, verdict_of
from speculative.errors import UserError
from speculative.evaluate import judge
from speculative.measure.self_checks import self_checks
from speculative.rules.verify import Rule


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


def evaluate(
    config: RunConfig, path: str, gammas: list[int], rule: Rule, log: Path | None = None
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """(result.json of one draft at the listed gamma nearest to the best one, judgement of every gamma).

    The held-out responses are taken from the config's run folder, or made there. log: every drafted token of the live
    run that the result tells of.

    Raises:
        UserError: see `load_draft` and `load_prompts`.
        SelfCheckError: the judge contradicts itself on this target.
    """
    if (rule != "greedy") and config.serving.temperature == 0:
        raise UserError(f"--rule {rule} samples from the target, but serving.temperature is 0; use --rule greedy")
    accelerator = new_accelerator()
    served = ServedTarget(config.target, accelerator.device)
    target, tokenizer = served.model, served.tokenizer
    draft = served_copy(load_draft(path, target, tokenizer), served.saved_dtype, target)
    context = context_limit(config, positions_of(target), positions_of(draft))
    max_tokens = config.serving.max_tokens
    prompts = load_prompts(config.data, tokenizer, context, max_tokens, config.judge.prompts, heldout_only=True).heldout
    keyed = [(prompt.prompt_id, prompt.prompt_ids) for prompt in prompts[:8]]
    checks = self_checks(target, keyed, decode_settings(config, target, gammas[0], rule))
    frozen = RunStores(config, accelerator, target, tokenizer).heldout(prompts, rule)
    contestant = Contestant(BEST, path, path, None, draft)
    scores = score_all(config, target, [contestant], {rule: frozen})
    by_gamma: dict[int, dict[str, Any]] = {}
    chosen = gammas[0]
    if len(gammas) > 1:
        for gamma in gammas:
            settings = decode_settings(config, target, gamma, rule)
            by_gamma[gamma], _ = judge(
                target, draft, frozen, settings, batch_size=config.judge.batch_size, scores=scores[rule][BEST]
            )
        costs = step_costs(config, target, draft, rule, max(gammas), context, typical_length(frozen))
        best = best_gamma_facts(by_gamma[chosen]["replay"], costs)
        chosen = min(gammas, key=lambda gamma: abs(gamma - (best["best_gamma"] or 1)))
    evidence = gather(
        config, target, [contestant], {rule: frozen}, gamma=chosen, rule=rule, context=context, scores=scores, log=log
    )
    by_gamma[chosen] = evidence.judged[BEST]
    verdict = verdict_of(evidence, checkpoints=[by_gamma[chosen]], self_checks=checks)
    result = findings_of(
        evidence, verdict, tokenizer, kind="evaluation", name=path, checkpoints=[by_gamma[chosen]], provenance=describe_run(config.seed),
        config=dump_config(config), files={"proposals": log.name if log is not None else None},
        **seen_by_both(evidence, target, tokenizer),
    )  # fmt: skip
    return result, by_gamma
