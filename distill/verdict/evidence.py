"""What a verdict rests on: drafts judged, scored on the same frozen text, and timed on the same prompts of one target."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from distill.config.sections import JudgeConfig
from distill.models.target import Target
from distill.run.verdict_record import Judgement
from distill.verdict.contest import Contest, draft_entrant, entrants_of, hold
from distill.verdict.judge import judge_by_replay
from speculative.decoder.proposal_log import ProposalLog
from speculative.decoder.responses import DecodeSettings, Response
from speculative.engine.models import max_positions
from speculative.evaluate import HeldoutResponse, judge
from speculative.measure.cost import StepCosts, measure_costs
from speculative.measure.replay import law_of
from speculative.measure.token_scores import StoredText, TokenScores, score_tokens
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
    draft: PreTrainedModel


@dataclass(frozen=True)
class Evidence:
    """The last contestant is the one in question.

    texts, scores: by the rule that the frozen text is for, the run's own first; scores by contestant then.
    judged: by contestant, live or by replay alone.
    responses: of the live run of the last contestant. contest: speeds at batch 1; costs: by contestant. None where the
    target's weights are not here. lighter, lighter_scores: the last contestant in fewer bytes (export.quantize), by the run's own rule.
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
    lighter: Contestant | None = None
    lighter_scores: Sequence[TokenScores] = ()

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
        lighter = self.lighter is not None and name == self.lighter.name
        return list(self.lighter_scores if lighter else self.scores[self.rule][name])


def score_all(
    settings: DecodeSettings,
    contestants: Sequence[Contestant],
    texts: Mapping[Rule, list[HeldoutResponse]],
) -> dict[Rule, dict[str, list[TokenScores]]]:
    """One pass of every draft over every text; the last contestant's with its confidence."""
    return {
        rule: {
            one.name: score_tokens(one.draft, text, settings.under(rule, 0).sampling, confidence=one is contestants[-1])
            for one in contestants
        }
        for rule, text in texts.items()
    }


def gather(
    judging: JudgeConfig,
    settings: DecodeSettings,
    target: Target,
    contestants: Sequence[Contestant],
    texts: Mapping[Rule, list[HeldoutResponse]],
    *,
    context: int,
    known: Mapping[str, Judgement] | None = None,
    scores: Mapping[Rule, Mapping[str, list[TokenScores]]] | None = None,
    history: Sequence[StoredText] = (),
    log: Path | None = None,
    lighter: Contestant | None = None,
) -> Evidence:
    """Judges live, scores and times.

    settings: with the rule and gamma to judge under. context: tokens of prompt and response that the pair takes.
    known: live records of contestants that need not be decoded again; the last one always is, so that its numbers, its
    responses and the proposals in ``log`` are of one and the same run. scores: `score_all`, where it was called already.
    history: what the target answered to other prompts under this rule, for rivals to be tuned on and to look things up in.
    lighter: the last contestant in fewer bytes: scored and timed like a rival.
    """
    frozen, scores = texts[settings.rule], scores or score_all(settings, contestants, texts)
    judged = dict(known or {})
    responses: list[Response] = []
    for one in contestants:
        if one.name in judged and one is not contestants[-1]:
            continue
        writes = ProposalLog(log) if log is not None and one is contestants[-1] else contextlib.nullcontext()
        with writes as opened:
            record, responses = judge(
                target.model, one.draft, frozen, settings, batch_size=judging.batch_size, log=opened,
                scores=scores[settings.rule][one.name],
            )  # fmt: skip
        judged[one.name] = Judgement.model_validate(record | {"step": one.step, "live": True})
    timed = contestants if lighter is None else [lighter, *contestants]
    costs = costs_of(judging, settings, target.model, timed, context, typical_length(frozen))
    drafts = {one.name: (one.label, one.draft) for one in contestants}
    own = scores[settings.rule]
    entrants = entrants_of(settings, target.model, drafts, frozen, own, costs, history)
    light: list[TokenScores] = []
    if lighter is not None:
        light, law = score_tokens(lighter.draft, frozen, settings.sampling), law_of(settings.rule, settings.sampling)
        entrants.append(draft_entrant(lighter.name, lighter.label, lighter.draft, light, law, costs[lighter.name]))
    with cpu_threads(judging.speed_threads):
        contest = hold(judging, settings, target.model, entrants, contestants[-1].name, frozen)
    return Evidence(
        judging, settings, tuple(contestants), texts, scores, judged, responses, contest, costs, lighter, light
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
        shape = tuple((name, tuple(weight.shape)) for name, weight in one.draft.named_parameters())
        if shape not in by_shape:
            room = min(context, max_positions(one.draft.config) or context)
            by_shape[shape] = step_costs(judging, settings, target, one.draft, room, typical)
        costs[one.name] = by_shape[shape]
    return costs


def step_costs(
    judging: JudgeConfig,
    settings: DecodeSettings,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    context_limit: int,
    typical: int = 128,
) -> StepCosts:
    """Stage times of this pair at batch 1 under a rule, at gammas up to 16 as far as the context has room.

    judging: CPU threads, and how long timing may take, of which the steps have COSTS_SHARE. settings: rule, sampling and the gamma that is measured in any case.
    typical: tokens of context that are timed, or fewer where there is no room for them.
    """
    blocks, gamma = 8, settings.gamma
    gammas = sorted(
        g for g in {1, 2, 3, 5, 8, 12, 16, gamma} if g <= gamma or (blocks + 3) * (g + 1) < context_limit - 32
    )
    context = max(2, min(typical, context_limit - (blocks + 3) * (max(gammas) + 1)))
    with cpu_threads(judging.speed_threads):
        return measure_costs(
            target, draft, gammas=gammas, sampling=settings.sampling, rule=settings.rule, context=context, blocks=blocks,
            seconds=COSTS_SHARE * judging.speed_seconds,
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
