"""Who is lined up for a contest: drafts scored on the text, their steps timed, and the ways to decode that follow."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from distill.config.sections import JudgeConfig
from distill.run.verdict_record import WAYS
from distill.verdict.question import Question
from distill.verdict.ways import draft_way, live_ways, lookup_way, past_way, timed_gammas, together_way
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft, drafts_of
from speculative.engine.models import max_positions
from speculative.evaluate import HeldoutResponse
from speculative.measure.cost import TIMED_BLOCKS, StepCosts, best_gamma, measure_costs
from speculative.measure.measured import Way
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import TokenScores, score_tokens, scored_gammas
from speculative.rules.rule import Rule

# Of judge.speed_seconds, for the steps of each pair of shapes.
COSTS_SHARE = 1 / 6


@dataclass(frozen=True)
class Candidate:
    """A draft as it would be served, under the name of its way."""

    name: str
    path: str
    step: int | None
    draft: Draft


@dataclass(frozen=True, kw_only=True)
class Field:
    """Which drafts are judged, scored and with step times. The last candidate is the one in question.

    scores: by rule, by candidate; costs: by candidate; both of the `others` too: the draft in question otherwise, drafting the
    other way where it can (by replay and step times the slower one), under a name of `WAYS`, and in fewer bytes.
    """

    candidates: tuple[Candidate, ...]
    others: tuple[Candidate, ...] = ()
    scores: Mapping[Rule, Mapping[str, list[TokenScores]]]
    costs: Mapping[str, StepCosts] = dataclasses.field(default_factory=dict)


def score_all(question: Question, candidates: Sequence[Candidate]) -> dict[Rule, dict[str, list[TokenScores]]]:
    """One pass of every draft over every text; that of the last candidate with its confidence."""
    return {
        rule: {
            one.name: score_tokens(
                one.draft.model, text, question.settings.under(rule, 0).sampling,
                confidence=one.draft.model is candidates[-1].draft.model, offsets=one.draft.offsets(question.gamma),
            )
            for one in candidates
        }
        for rule, text in question.texts.items()
    }  # fmt: skip


def line_up(
    question: Question, target: PreTrainedModel, candidates: Sequence[Candidate], lighter: Candidate | None = None
) -> Field:
    """Scores everybody and times their steps; a last candidate that can draft both ways goes on with the faster.

    lighter: the last candidate in fewer bytes; it drafts the same way.
    """
    best = candidates[-1]
    ways = [replace(best, name=WAYS[draft.drafting], draft=draft) for draft in drafts_of(best.draft.model)]
    everybody = [*candidates[:-1], *ways]
    scores, costs = score_all(question, everybody), costs_of(question, target, everybody)
    ways.sort(key=lambda way: _predicted(scores[question.rule][way.name], question.law, costs[way.name]))
    chosen, others = ways.pop(), ways
    if lighter is not None:
        others.append(replace(lighter, draft=Draft(lighter.draft.model, chosen.draft.drafting)))
        costs |= costs_of(question, target, others[-1:])
        for rule, found in score_all(question, others[-1:]).items():
            scores[rule] |= found
    costs[best.name] = costs.pop(chosen.name)
    for of_rule in scores.values():
        of_rule[best.name] = of_rule.pop(chosen.name)
    best = replace(chosen, name=best.name)
    return Field(candidates=(*candidates[:-1], best), others=tuple(others), scores=scores, costs=costs)


def _predicted(scores: Sequence[TokenScores], law: str, costs: StepCosts) -> float:
    """The highest predicted speed-up of a draft at any timed gamma."""
    gammas = scored_gammas(scores, timed_gammas(costs))
    taus = sum(map(len, scores)) / expected_blocks_of(scores, law, gammas).sum(0)
    return best_gamma(dict(zip(gammas, taus.tolist(), strict=True)), costs)[1]


def ways_of(question: Question, target: PreTrainedModel, field: Field) -> list[Way]:
    """Every draft, prompt lookup, past responses where there are any, lookup before the draft, and what judge.ways name more.

    Behind the lookup stands what needs the fewest target steps of the draft in question and the same draft otherwise.
    """
    own, best = field.scores[question.rule], field.candidates[-1]
    found = {
        one.name: draft_way(question, one.name, one.draft.drafter, own[one.name], field.costs[one.name])
        for one in (*field.candidates, *field.others)
    }

    def steps(one: Candidate) -> float:
        way = found[one.name]
        assert way.blocks_N is not None
        return float(way.blocks_N.sum()) * field.costs[one.name].block_price(way.gamma)

    behind = min((best, *field.others), key=steps)
    free = free_ways(question, target, own[behind.name], behind, field.costs[behind.name])
    return [*found.values(), *free, *live_ways(question.judge.ways, target, best.draft.drafter)]


def free_ways(
    question: Question, target: PreTrainedModel, scores: Sequence[TokenScores], behind: Candidate, costs: StepCosts,
    gammas: Sequence[int] | None = None,
) -> list[Way]:  # fmt: skip
    """Prompt lookup, past responses where there are any, lookup before a draft."""
    gammas = gammas or timed_gammas(costs)
    past = past_way(question, target, costs, gammas)
    return [
        lookup_way(question, costs, gammas),
        *([past] if past is not None else []),
        together_way(question, behind.draft.drafter, scores, costs, gammas, behind.name),
    ]


def costs_of(question: Question, target: PreTrainedModel, candidates: Sequence[Candidate]) -> dict[str, StepCosts]:
    """Stage times of every candidate at a typical length of the text; drafts of the same shape are measured once."""
    by_shape: dict[Any, StepCosts] = {}
    costs, typical = {}, typical_length(question.frozen)
    for one in reversed(candidates):
        shape = one.draft.shape
        if shape not in by_shape:
            room = min(question.context, max_positions(one.draft.model.config) or question.context)
            by_shape[shape] = step_costs(question.judge, question.settings, target, one.draft, room, typical)
        costs[one.name] = by_shape[shape]
    return costs


def step_costs(
    judging: JudgeConfig,
    settings: DecodeSettings,
    target: PreTrainedModel,
    draft: Draft,
    context_limit: int,
    typical: int = 128,
) -> StepCosts:
    """Stage times of this pair at batch 1 under a rule, at gammas up to 16 as far as the context has room.

    judging: CPU threads, and how long timing may take, of which the steps have COSTS_SHARE. settings: rule, sampling and the gamma that is measured in any case.
    typical: tokens of context that are timed, or fewer where there is no room for them.
    """
    blocks, gamma = TIMED_BLOCKS, settings.gamma
    gammas = sorted(
        g for g in {1, 2, 3, 5, 8, 12, 16, gamma} if g <= gamma or (blocks + 3) * (g + 1) < context_limit - 32
    )
    context = max(2, min(typical, context_limit - (blocks + 3) * (max(gammas) + 1)))
    with cpu_threads(judging.speed_threads):
        return measure_costs(
            target, draft, settings, gammas=gammas, context=context, seconds=COSTS_SHARE * judging.speed_seconds
        )


def typical_length(frozen: Sequence[HeldoutResponse]) -> int:
    """Context half-way through a response: the median prompt and half the median response, in tokens."""
    prompt, response = (
        float(np.median([len(getattr(text, name)) for text in frozen])) for name in ("prompt_ids", "response_ids")
    )
    return max(2, round(prompt + response / 2))


@contextlib.contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Torch's CPU threads while something is timed: a small model at batch 1 is served best by one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
