"""Judges one draft by a config's target, held-out prompts and serving settings: what `understudy evaluate` does."""

from typing import Any

from transformers import PreTrainedModel

from distill.config import RunConfig
from distill.prompts import load_prompts
from distill.responses import RunStores, decode_settings
from distill.served_target import ServedTarget
from distill.student import find_student, load_model, load_tokenizer
from distill.train import context_limit, load_target, new_accelerator, positions_of
from distill.validate import served_copy
from distill.verdict import best_gamma_facts, describe_costs, step_costs, time_drafts, verdict_of_one
from distill.vocabulary import repair_rows, require_agreement, vocabulary_rows
from speculative.errors import UserError
from speculative.evaluate import judge, self_checks
from speculative.verify import Rule


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


def load_draft(path: str, target: PreTrainedModel | ServedTarget, tokenizer: Any) -> PreTrainedModel:
    """A draft from a run, checkpoint, directory or hub id, its vocabulary checked against the target's.

    Raises:
        UserError: not there, or another vocabulary.
    """
    name = find_student(path)
    draft = load_model("draft", name)
    rows = target.facts.vocab_rows if isinstance(target, ServedTarget) else vocabulary_rows(target.config)
    agreement = require_agreement(tokenizer, rows, load_tokenizer(name), vocabulary_rows(draft.config))
    if agreement.verdict == "repair":
        repair_rows(draft, rows, agreement.token_rows)
    return draft


def evaluate(
    config: RunConfig, path: str, gammas: list[int], rule: Rule
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """(verdict of one draft at the listed gamma nearest to the best one, judgement of every gamma).

    The held-out responses are taken from the config's run folder, or made there.

    Raises:
        UserError: see `load_draft` and `load_prompts`.
        SelfCheckError: the judge contradicts itself on this target.
    """
    if config.target is None:
        raise UserError("this config has no target (target: null): there is nothing to judge a draft against")
    if (rule != "greedy") and config.serving.temperature == 0:
        raise UserError(f"--rule {rule} samples from the target, but serving.temperature is 0; use --rule greedy")
    accelerator = new_accelerator()
    target, tokenizer, saved = load_target(config.target, accelerator.device)
    draft = served_copy(load_draft(path, target, tokenizer), saved, target)
    context = context_limit(config, positions_of(target), positions_of(draft))
    max_tokens = config.serving.max_tokens
    prompts = load_prompts(config.data, tokenizer, context, max_tokens, config.judge.prompts, heldout_only=True).heldout
    keyed = [(prompt.prompt_id, prompt.prompt_ids) for prompt in prompts[:8]]
    checks = self_checks(target, keyed, decode_settings(config, target, gammas[0], rule))
    frozen = RunStores(config, accelerator, target, tokenizer).heldout(prompts, rule)
    by_gamma = {}
    for gamma in gammas:
        settings = decode_settings(config, target, gamma, rule)
        by_gamma[gamma] = judge(target, draft, frozen, settings, batch_size=config.judge.batch_size)
        del by_gamma[gamma]["per_prompt"]
    costs = step_costs(config, target, draft, rule, max(gammas), context)
    best = best_gamma_facts(by_gamma[gammas[0]]["replay"], costs)
    chosen = min(gammas, key=lambda gamma: abs(gamma - (best["best_gamma"] or 1)))
    facts = best | {"costs": describe_costs(costs, chosen)}
    speed = time_drafts(config, target, {"best": draft}, frozen, chosen, rule)
    return verdict_of_one({"step": None, **by_gamma[chosen]}, facts, speed, checks, path), by_gamma
