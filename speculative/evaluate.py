"""Judge a draft on held-out prompts: frozen target text for alpha and every gamma, live decoding for tau."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np
from transformers import PreTrainedModel

from speculative.decode import decode
from speculative.decoder.proposal_log import ProposalLog
from speculative.decoder.responses import DecodeSettings, Prompt, Response
from speculative.drafters.draft import Draft
from speculative.engine.recurrent_model import recurrence_warning
from speculative.errors import UserError
from speculative.measure.metrics import CURVE_GAMMAS, alpha_with_interval, latency, live_metrics, stage_seconds
from speculative.measure.replay import agreement_of, agreement_warning, expected_blocks_of, law_of
from speculative.measure.token_scores import TokenScores, score_tokens, scored_gammas
from speculative.rules.rule import Rule, rules_of_text


@dataclass(frozen=True)
class HeldoutResponse:
    """A frozen response of the target, sampled at the serving settings, with its log target probabilities."""

    key: str
    domain: str
    prompt_ids: list[int]
    response_ids: list[int]
    log_target_probs: list[float]  # NaN where the server does not tell them

    @property
    def prompt(self) -> Hashable:
        """What makes two responses belong to one prompt: the resampling unit of every interval."""
        return tuple(self.prompt_ids)


class UnderRule(TypedDict):
    """A draft under one rule, by replay: tau by gamma."""

    alpha: float
    replay: dict[int, float]


class OnText(UnderRule):
    """The same with alpha's interval, on a text of so many prompts and tokens."""

    alpha_ci: list[float]
    prompts: int
    tokens: int


class FrozenJudgement(OnText):
    """rules: what the same text tells of every other rule it has a law for. per_response: {accept_sums, tokens, blocks: expected at
    `settings.gamma`}, so that two judgements on the same text can be paired later without a model.
    """

    rule: Rule
    rules: dict[Rule, UnderRule]
    domains: dict[str, OnText]
    per_response: dict[str, list[float]]


def judge_frozen(
    draft: Draft,
    heldout: Sequence[HeldoutResponse],
    settings: DecodeSettings,
    *,
    scores: Sequence[TokenScores] | None = None,
) -> FrozenJudgement:
    """The cheap half of `judge`: one draft pass over frozen text, no target in memory; plain numbers.

    scores: of this draft on this text, where they are known: nothing is run then. Alpha is that of a block's first token however it
    drafts, replay goes as far as it was scored.
    """
    if not any(response.response_ids for response in heldout):
        raise UserError("there is no held-out response to judge on: give held-out prompts with non-empty responses")
    if scores is None:
        scores = score_tokens(draft.model, heldout, settings.sampling, offsets=draft.offsets(settings.gamma))
    law = law_of(settings.rule, settings.sampling)
    accept_probs = [own.accept_probs(law) for own in scores]
    known = not any(np.isnan(own.log_target_probs).any() for own in scores)
    gammas = tuple(scored_gammas(scores, CURVE_GAMMAS))
    blocks_NK = expected_blocks_of(scores, law, (*gammas, settings.gamma))
    tokens_N = np.array([len(own) for own in scores])

    def numbers(indices: Sequence[int]) -> OnText:
        probs = [accept_probs[index] for index in indices]
        alpha, interval = alpha_with_interval(probs, [heldout[index].prompt for index in indices])
        tokens = int(tokens_N[indices].sum())
        return {
            "alpha": alpha,
            "alpha_ci": list(interval),
            "prompts": len({heldout[index].prompt for index in indices}),
            "tokens": tokens,
            "replay": dict(zip(gammas, (tokens / blocks_NK[indices, : len(gammas)].sum(0)).tolist(), strict=True)),
        }

    return {
        **numbers(range(len(heldout))),
        "rule": settings.rule,
        "rules": {rule: _under_rule(scores, rule, gammas) for rule in rules_of_text(law, known) if rule != law},
        # A domain of empty responses has nothing to judge.
        "domains": {name: numbers(indices) for name, indices in _by_domain(heldout).items() if tokens_N[indices].any()},
        "per_response": {
            "accept_sums": [float(probs.sum()) for probs in accept_probs],
            "tokens": tokens_N.tolist(),
            "blocks": blocks_NK[:, -1].tolist(),
        },
    }


def _under_rule(scores: Sequence[TokenScores], rule: Rule, gammas: Sequence[int]) -> UnderRule:
    tokens = sum(len(own) for own in scores)
    return {
        "alpha": float(sum(own.accept_probs(rule).sum() for own in scores) / tokens),
        "replay": dict(zip(gammas, (tokens / expected_blocks_of(scores, rule, gammas).sum(0)).tolist(), strict=True)),
    }


def judge(
    target: PreTrainedModel,
    draft: Draft,
    heldout: Sequence[HeldoutResponse],
    settings: DecodeSettings,
    *,
    batch_size: int = 16,
    log: ProposalLog | None = None,
    scores: Sequence[TokenScores] | None = None,
) -> tuple[dict[str, Any], list[Response]]:
    """(all numbers of one draft, the live run's responses): `judge_frozen`, and each held-out prompt decoded live once.

    Adds {gamma, tau, tau_ci, accepted_per_drafted, accepted_per_tested, overlap, survival, live_tokens, blocks,
    tokens_per_second (batched, prefill included), batch_size, replay_check: {predicted_blocks, live_blocks, z}}, the
    live numbers also per domain. `replay_check` replays the very text of the live run: |z| above 4 means a fault.
    log: every drafted token of the live run. scores: as for `judge_frozen`.

    Raises UserError when gamma is 0, for empty input and whatever `decode` refuses.
    """
    if settings.gamma < 1:
        raise UserError("gamma = 0: judging a draft needs at least one drafted token per block")
    result = judge_frozen(draft, heldout, settings, scores=scores)
    first_of_prompt = {response.prompt: response for response in reversed(heldout)}
    chosen = sorted(first_of_prompt.values(), key=lambda response: (len(response.prompt_ids), response.key))
    prompts = [(response.key, response.prompt_ids) for response in chosen]
    responses, timing = decode(target, draft.drafter(), prompts, settings, batch_size=batch_size, log=log)
    domains: dict[str, Mapping[str, Any]] = dict(result["domains"])
    for name, indices in _by_domain(chosen).items():
        if name in domains:
            live = live_metrics([responses[index] for index in indices], settings.gamma)
            domains[name] = {**domains[name], **live}
    check = None
    if settings.active_rules is None and settings.tree is None:
        own = score_tokens(draft.model, responses, settings.sampling, offsets=draft.offsets(settings.gamma, 1))
        law = law_of(settings.rule, settings.sampling)
        check = agreement_of(own, law, [response.blocks for response in responses], settings.gamma)
    warnings = (agreement_warning(check), recurrence_warning(target), recurrence_warning(draft.model))
    record = {
        **result,
        **live_metrics(responses, settings.gamma),
        "domains": domains,
        "gamma": settings.gamma,
        "tokens_per_second": sum(len(response.response_ids) for response in responses) / timing.total_seconds,
        "batch_size": batch_size,
        "latency": latency(responses),
        "seconds": stage_seconds(timing),
        "peak_bytes": timing.peak_bytes,
        "replay_check": check,
        "warnings": [warning for warning in dict.fromkeys(warnings) if warning],
    }
    return record, responses


def _by_domain(heldout: Sequence[HeldoutResponse]) -> dict[str, list[int]]:
    domains: dict[str, list[int]] = {}
    for index, response in enumerate(heldout):
        domains.setdefault(response.domain, []).append(index)
    return domains


def frozen_responses(
    target: PreTrainedModel, prompts: Sequence[Prompt], settings: DecodeSettings, domain: str, batch_size: int = 16
) -> list[HeldoutResponse]:
    """Let the target answer alone, as the frozen text to judge drafts on."""
    responses, _ = decode(target, None, prompts, replace(settings, gamma=0), batch_size=batch_size)
    return [
        HeldoutResponse(text.key, domain, text.prompt_ids, text.response_ids, text.log_target_probs)
        for text in responses
    ]
