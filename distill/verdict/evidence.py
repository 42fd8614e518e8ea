"""What a verdict rests on: drafts judged, scored on the same frozen text, and timed on the same prompts of one target."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from distill.config.sections import JudgeConfig
from distill.models.target import Target
from distill.run.verdict_record import WAYS, Judgement
from distill.verdict.contest import Contest, entrants_of, hold
from distill.verdict.judge import judge_by_replay
from speculative.decoder.proposal_log import ProposalLog
from speculative.decoder.responses import DecodeSettings, Response
from speculative.drafters.draft import Draft, drafts_of
from speculative.engine.models import max_positions
from speculative.evaluate import HeldoutResponse, judge
from speculative.measure.cost import TIMED_BLOCKS, StepCosts, best_gamma, measure_costs
from speculative.measure.replay import expected_blocks_of, law_of
from speculative.measure.token_scores import StoredText, TokenScores, score_tokens, scored_gammas
from speculative.rules.rule import Rule

BASELINE, SERVED, BEST = "baseline", "served", "best"
# Of judge.speed_seconds, for the steps of each pair of shapes.
COSTS_SHARE = 1 / 6


@dataclass(frozen=True)
class Contestant:
    """A draft as it would be served, under the name that records call it by."""

    name: str
    label: str
    path: str
    step: int | None
    draft: Draft


@dataclass(frozen=True)
class Field:
    """Who is judged, scored and with step times. The last contestant is the one in question.

    others: the draft in question otherwise, scored and timed too: drafting the other way, under a name of `WAYS`, where it can (by replay
    and step times the slower one), and in fewer bytes. scores, costs: as in `Evidence`.
    """

    contestants: tuple[Contestant, ...]
    others: tuple[Contestant, ...]
    scores: Mapping[Rule, Mapping[str, list[TokenScores]]]
    costs: Mapping[str, StepCosts]


@dataclass(frozen=True)
class Evidence:
    """The last contestant is the one in question.

    texts, scores: by the rule that the frozen text is for, the run's own first; scores by contestant then. Scores and costs
    have `others` too: see `Field`. history: what the target answered to other prompts under the run's own rule.
    judged: by contestant, live or by replay alone.
    responses: of the live run of the last contestant. contest: speeds at batch 1; costs: by contestant. None where the
    target's weights are not here.
    """

    judge: JudgeConfig
    settings: DecodeSettings
    contestants: tuple[Contestant, ...]
    texts: Mapping[Rule, list[HeldoutResponse]]
    scores: Mapping[Rule, Mapping[str, list[TokenScores]]]
    judged: Mapping[str, Judgement]
    responses: list[Response] | None = None
    contest: Contest | None = None
    costs: Mapping[str, StepCosts] | None = None
    others: tuple[Contestant, ...] = ()
    history: Sequence[StoredText] = ()

    @property
    def rule(self) -> Rule:
        """The engine rule that drafts are judged under."""
        return self.settings.rule

    @property
    def gamma(self) -> int:
        """Drafted tokens per block."""
        return self.settings.gamma

    @property
    def best(self) -> Contestant:
        """The draft in question."""
        return self.contestants[-1]

    @property
    def frozen(self) -> list[HeldoutResponse]:
        """The text of the run's own rule."""
        return self.texts[self.rule]

    @property
    def keys(self) -> list[Any]:
        """The prompt of each frozen response: the unit of every interval."""
        return [response.prompt for response in self.frozen]

    def own_scores(self, name: str) -> list[TokenScores]:
        """A contestant's scores on the text of the run's own rule."""
        return list(self.scores[self.rule][name])


def score_all(
    settings: DecodeSettings, contestants: Sequence[Contestant], texts: Mapping[Rule, list[HeldoutResponse]]
) -> dict[Rule, dict[str, list[TokenScores]]]:
    """One pass of every draft over every text; that of the last contestant with its confidence."""
    return {
        rule: {
            one.name: score_tokens(
                one.draft.model, text, settings.under(rule, 0).sampling,
                confidence=one.draft.model is contestants[-1].draft.model, offsets=one.draft.offsets(settings.gamma),
            )
            for one in contestants
        }
        for rule, text in texts.items()
    }  # fmt: skip


def line_up(
    judging: JudgeConfig,
    settings: DecodeSettings,
    target: PreTrainedModel,
    contestants: Sequence[Contestant],
    texts: Mapping[Rule, list[HeldoutResponse]],
    context: int,
    lighter: Contestant | None = None,
) -> Field:
    """Scores everybody and times their steps; a last contestant that can draft both ways goes on with the faster.

    context: tokens of prompt and response that the pair takes. lighter: the last contestant in fewer bytes; it drafts the same way.
    """
    best, typical = contestants[-1], typical_length(texts[settings.rule])
    ways = [replace(best, name=WAYS[draft.drafting], draft=draft) for draft in drafts_of(best.draft.model)]
    everybody = [*contestants[:-1], *ways]
    scores = score_all(settings, everybody, texts)
    costs = costs_of(judging, settings, target, everybody, context, typical)
    law = law_of(settings.rule, settings.sampling)
    ways.sort(key=lambda way: _predicted(scores[settings.rule][way.name], law, costs[way.name]))
    chosen, others = ways.pop(), ways
    if lighter is not None:
        others.append(replace(lighter, draft=Draft(lighter.draft.model, chosen.draft.drafting)))
        costs |= costs_of(judging, settings, target, others[-1:], context, typical)
        for rule, found in score_all(settings, others[-1:], texts).items():
            scores[rule] |= found
    costs[best.name] = costs.pop(chosen.name)
    for of_rule in scores.values():
        of_rule[best.name] = of_rule.pop(chosen.name)
    return Field((*contestants[:-1], replace(chosen, name=best.name)), tuple(others), scores, costs)


def _predicted(scores: Sequence[TokenScores], law: str, costs: StepCosts) -> float:
    """The highest predicted speed-up of a draft at any timed gamma."""
    gammas = scored_gammas(scores, range(1, max(costs.verify_seconds) + 1))
    tokens = sum(map(len, scores))
    taus = tokens / expected_blocks_of(scores, law, gammas).sum(0)
    return best_gamma(dict(zip(gammas, taus.tolist(), strict=True)), costs)[1]


def gather(
    judging: JudgeConfig,
    settings: DecodeSettings,
    target: Target,
    field: Field,
    texts: Mapping[Rule, list[HeldoutResponse]],
    *,
    known: Mapping[str, Judgement] | None = None,
    history: Sequence[StoredText] = (),
    log: Path | None = None,
) -> Evidence:
    """Judges live and times everybody of a `line_up`.

    settings: with the rule and gamma to judge under.
    known: live records of contestants that need not be decoded again; the last one always is, so that its numbers, its
    responses and the proposals in ``log`` are of one and the same run.
    history: what the target answered to other prompts under this rule, for rivals to be tuned on and to look things up in.
    """
    frozen, own, contestants = texts[settings.rule], field.scores[settings.rule], field.contestants
    judged = dict(known or {})
    responses: list[Response] = []
    for one in contestants:
        if one.name in judged and one is not contestants[-1]:
            continue
        writes = ProposalLog(log) if log is not None and one is contestants[-1] else contextlib.nullcontext()
        with writes as opened:
            record, responses = judge(
                target.model, one.draft, frozen, settings, batch_size=judging.batch_size, log=opened, scores=own[one.name],
            )  # fmt: skip
        judged[one.name] = Judgement.model_validate(record | {"step": one.step, "live": True})
    drafts = {one.name: (one.label, one.draft.drafter) for one in (*field.others, *contestants)}
    same = [one.name for one in field.others]
    entrants = entrants_of(settings, target.model, drafts, frozen, own, field.costs, history, same)
    with cpu_threads(judging.speed_threads):
        contest = hold(judging, settings, target.model, entrants, contestants[-1].name, frozen)
    return Evidence(
        judging,
        settings,
        contestants,
        texts,
        field.scores,
        judged,
        responses,
        contest,
        field.costs,
        field.others,
        history,
    )


def gather_by_replay(
    judging: JudgeConfig,
    settings: DecodeSettings,
    contestants: Sequence[Contestant],
    texts: Mapping[Rule, list[HeldoutResponse]],
    known: Mapping[str, Judgement],
) -> Evidence:
    """Evidence without the target's weights: nothing is decoded or timed. known: the records that checkpoints have."""
    scores, judged = score_all(settings, contestants, texts), dict(known)
    for one in contestants:
        if one.name not in judged:
            own = scores[settings.rule][one.name]
            record = judge_by_replay(one.draft, texts[settings.rule], settings, own)
            judged[one.name] = Judgement.model_validate(record)
    return Evidence(judging, settings, tuple(contestants), texts, scores, judged)


def costs_of(
    judging: JudgeConfig,
    settings: DecodeSettings,
    target: PreTrainedModel,
    contestants: Sequence[Contestant],
    context: int,
    typical: int,
) -> dict[str, StepCosts]:
    """Stage times of every contestant at a typical length of the text; drafts of the same shape are measured once."""
    by_shape: dict[Any, StepCosts] = {}
    costs = {}
    for one in reversed(contestants):
        shape = (
            one.draft.drafting,
            *((name, tuple(weight.shape)) for name, weight in one.draft.model.named_parameters()),
        )
        if shape not in by_shape:
            room = min(context, max_positions(one.draft.model.config) or context)
            by_shape[shape] = step_costs(judging, settings, target, one.draft, room, typical)
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
            target, draft, settings, gammas=gammas, context=context, seconds=COSTS_SHARE * judging.speed_seconds,
        )  # fmt: skip


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
