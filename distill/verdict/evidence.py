"""Evidence for a verdict: drafts judged and scored on the same held-out responses, and timed on the same prompts of one target."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedModel

from distill.verdict.decoding import NamedDraft
from distill.verdict.judging_setup import JudgingSetup
from distill.verdict.scored_drafts import (
    ScoredDrafts,
    cpu_threads,
    draft_way,
    free_ways,
    score_all,
    step_costs,
    timed_gammas,
    typical_length,
    ways_of,
)
from distill.verdict.timing import Timing, time_ways, with_waits
from speculative.decoder.responses import Response
from speculative.engine.memory import check_memory
from speculative.engine.models import max_positions
from speculative.errors import UserError
from speculative.evaluate import Judgement, judge, judge_by_replay
from speculative.measure.cost import TIMED_BLOCKS, StepCosts
from speculative.measure.load import LoadCurve, fit_roofline
from speculative.measure.measured import LOOKUP_DRAFT
from speculative.measure.metrics import Curve
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import TokenScores, scored_gammas


@dataclass(frozen=True)
class Loads:
    """Timings beyond one request, the curve through the draft's speeds at all of them, and a warning for each load left out."""

    timings: tuple[Timing, ...] = ()
    curve: LoadCurve | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Evidence(ScoredDrafts):
    """judged: by draft, live or by replay alone. responses: of the live run of the last draft. timing: at one request.
    loads: at more. Without the target's weights responses, timing, loads and costs are empty.
    """

    setup: JudgingSetup
    judged: Mapping[str, Judgement]
    responses: Sequence[Response] = ()
    timing: Timing | None = None
    loads: Loads = field(default_factory=Loads)

    @property
    def best(self) -> NamedDraft:
        """The draft in question."""
        return self.drafts[-1]

    @property
    def best_costs(self) -> StepCosts | None:
        """Its step costs; None where nothing was timed."""
        return self.costs.get(self.best.name)

    @property
    def timings(self) -> list[Timing]:
        """By concurrency, 1 first."""
        return [] if self.timing is None else [self.timing, *self.loads.timings]

    def own_scores(self, name: str) -> list[TokenScores]:
        """A draft's scores on the text of the run's own rule."""
        return self.scores[self.setup.rule][name]


def gather(setup: JudgingSetup, target: PreTrainedModel, scored: ScoredDrafts, *, log: Path | None = None) -> Evidence:
    """Judge every draft of a `score_and_time` live, and time every way at one request and at each of judge.load.

    ``log``: for the proposals of the last draft.
    """
    scores, drafts = scored.scores[setup.rule], scored.drafts
    judged: dict[str, Judgement] = {}
    responses: list[Response] = []
    for draft in drafts:
        decoded = functools.partial(
            setup.decoding,
            target,
            draft,
            settings=setup.settings,
            batch_size=setup.judge.batch_size,
            log=log if draft is drafts[-1] else None,
        )
        record, responses = judge(
            target, draft.draft, setup.heldout, setup.settings, scores=scores[draft.name], decoded=decoded
        )
        judged[draft.name] = record.model_copy(update={"step": draft.step})
    ways, best = ways_of(setup, target, scored), drafts[-1].name
    lossy = [draft.name for draft in ways if not draft.lossless]
    picked = [best, LOOKUP_DRAFT, *(draft.name for draft in scored.others), *setup.judge.ways, *lossy]
    with cpu_threads(setup.judge.speed_threads):
        timing = with_waits(time_ways(setup, target, ways, best, picked), target, best)
        loads = time_at_loads(setup, target, scored, timing)
    return Evidence(
        drafts=drafts,
        others=scored.others,
        scores=scored.scores,
        costs=scored.costs,
        setup=setup,
        judged=judged,
        responses=responses,
        timing=timing,
        loads=loads,
    )


def gather_by_replay(setup: JudgingSetup, drafts: Sequence[NamedDraft], records: Mapping[str, Judgement]) -> Evidence:
    """Evidence without the target's weights: nothing is decoded or timed. records: those that checkpoints have."""
    scores, judged = score_all(setup, drafts), dict(records)
    for one in drafts:
        if one.name not in judged:
            own = scores[setup.rule][one.name]
            judged[one.name] = judge_by_replay(one.draft, setup.heldout, setup.settings, scores=own)
    return Evidence(drafts=tuple(drafts), scores=scores, setup=setup, judged=judged)


def time_at_loads(setup: JudgingSetup, target: PreTrainedModel, scored: ScoredDrafts, first: Timing) -> Loads:
    """Time the draft in question, the baselines that need no training and lookup before the draft, at each of judge.load.

    Two passes over the loads. The first times the steps of both models: they give the roofline and, with tau by replay on all
    held-out prompts, the best gammas of each load. The second times every way at those gammas. first: the timing at one
    request. A load that does not fit memory is left out with a warning.
    """
    if not setup.judge.load:
        return Loads()
    best, scores = scored.drafts[-1], scored.scores[setup.rule]
    gammas = scored_gammas(scores[best.name], timed_gammas(scored.costs[best.name]))
    costs, warnings = _costs_at_loads(setup, target, best, max(gammas))
    costs = [scored.costs[best.name], *costs]
    blocks_G = expected_blocks_of(scores[best.name], setup.rule, gammas).sum(0)
    taus = dict(zip(gammas, (setup.tokens_N.sum() / blocks_G).tolist(), strict=True))
    roofline = fit_roofline(costs)
    then = next(item for item in (*scored.others, *scored.drafts) if item.name == first[LOOKUP_DRAFT].then_way)
    timings = []
    # A server cuts the gamma of every load to that of one request, so no larger one is timed.
    of_one = (first[best.name].gamma if best.name in first else 0) or max(gammas)
    for at_load in costs[1:]:
        ways = [
            draft_way(setup, best.name, best.draft.drafter, scores[best.name], at_load, gammas[:of_one]),
            *free_ways(setup, target, scores[then.name], then, at_load, gammas),
            *(item for item in first.ways if item.predicted is None),
        ]
        try:
            timing = time_ways(setup, target, ways, best.name, first.picked, at_load.batch_size)
        except UserError as error:
            warnings.append(f"judge.load {at_load.batch_size} was not measured: {error}")
            continue
        timings.append(with_waits(timing, target, best.name))
    measured = {
        item.concurrency: item.speed(best.name).speed_up / roofline.speed_up(item.concurrency, gamma, taus[gamma])
        for item in (first, *timings)
        if best.name in item and (gamma := item[best.name].gamma) in taus
    }
    return Loads(tuple(timings), LoadCurve(roofline, taus, measured), tuple(warnings))


def _costs_at_loads(
    setup: JudgingSetup, target: PreTrainedModel, best: NamedDraft, gamma: int
) -> tuple[list[StepCosts], list[str]]:
    """Stage times at every load beyond one request that fits memory, and a warning for each other load. gamma: the largest."""
    costs, warnings, typical = list[StepCosts](), list[str](), typical_length(setup.heldout)
    for load in sorted(set(setup.judge.load) - {1}):
        try:
            check_memory(target, best.draft.model, load, typical + (TIMED_BLOCKS + 2) * (gamma + 1), gamma + 1)
        except UserError as error:
            warnings.append(f"judge.load {load} was not measured: {error}")
            continue
        context = min(setup.context, max_positions(best.draft.model.config) or setup.context)
        costs.append(step_costs(setup.judge, setup.settings, target, best.draft, context, typical, load))
    return costs, warnings


def with_speeds(curve: Curve, costs: StepCosts | None) -> Curve:
    """Add the predicted speed-up at every gamma: None beyond the timed ones, and where nothing was timed."""
    speeds = costs and [
        costs.speed_up(gamma, tau) if gamma <= max(costs.verify_seconds) else None
        for gamma, tau in zip(curve.gammas, curve.tau, strict=True)
    ]
    return curve.model_copy(update={"predicted_speed_up": speeds})
