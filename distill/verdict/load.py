"""The verdict under load: the draft in question and what needs no training, timed beside plain decoding at each of judge.load."""

from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
from transformers import PreTrainedModel

from distill.models.target import Target
from distill.run.verdict_record import TOGETHER, LoadRival, LoadRow, Roofline, Verdict
from distill.verdict.contest import Entrant, cascade_entrant, lookup_entrant, past_entrant
from distill.verdict.evidence import BEST, Contestant, Evidence, cpu_threads, typical_length
from distill.verdict.sentence import TOGETHER_WORTHWHILE
from speculative.decode import context_of
from speculative.drafters.draft import Draft
from speculative.drafters.drafter import Drafter
from speculative.engine.memory import check_memory
from speculative.errors import UserError
from speculative.measure.cost import TIMED_BLOCKS as COST_BLOCKS
from speculative.measure.cost import StepCosts, measure_costs
from speculative.measure.full_batch import DRAFTED, TIMED_BLOCKS, full_batch_seconds, kind_shares
from speculative.measure.intervals import sum_by_prompt
from speculative.measure.load import LoadCurve, LoadedSpeed, fit_roofline, loaded_speed
from speculative.measure.race import ALONE
from speculative.measure.replay import expected_blocks_of, law_of
from speculative.measure.token_scores import scored_gammas

MOST_GAMMA = 16
# Of the calls that the roofline is fitted to. At a large load wide calls take long and say nothing new, so beyond the first
# two gammas only calls of so many tokens are timed.
FITTED_GAMMAS = (1, 3, 8, 16)
FITTED_TOKENS = 64
REPEATS = 2


def under_load(verdict: Verdict, evidence: Evidence, target: Target) -> Verdict:
    """The verdict with `load`, `plain_wins_from` and `roofline`; as it is where judge.load is empty.

    Two passes over the loads: the steps of both models, which give the roofline and, with replay's tau on all held-out
    prompts, each load's best gamma; then blocks at that gamma and plain steps in turn, every row taken, and the same of
    prompt lookup, of past responses and of lookup before the draft. What the machine has no memory for is left out with a warning.
    """
    judging, best = evidence.judge, evidence.best
    if not judging.load:
        return verdict
    drafter = _drafter(best)
    context, _ = context_of(target.model, drafter())
    most = _most_gamma(evidence, context)
    with cpu_threads(judging.speed_threads):
        costs, warnings = _costs_at_loads(target.model, best.draft, evidence, context)
        if not costs:
            return verdict.model_copy(update={"warnings": [*verdict.warnings, *warnings]})
        scores, gammas = evidence.own_scores(best.name), range(1, most + 1)
        blocks_NG = expected_blocks_of(scores, law_of(evidence.rule, evidence.settings.sampling), gammas)
        taus = dict(zip(gammas, (sum(map(len, scores)) / blocks_NG.sum(0)).tolist(), strict=True))
        curve, rows = LoadCurve(fit_roofline(costs), taus), []
        for at_load in costs:
            load = at_load.batch_size
            gamma = curve.best_gamma(load)
            draft = Entrant(BEST, best.label, gamma, blocks_NG[:, gamma - 1], drafter)
            try:
                found = _timed(target.model, evidence, load, draft)
            except UserError as error:
                warnings.append(_left_out(f"judge.load {load}", error))
                continue
            rivals = []
            for way in _rivals(target.model, evidence, at_load, most):
                try:
                    timed = _timed(target.model, evidence, load, way)
                except UserError as error:
                    warnings.append(_left_out(f"{way.name} at judge.load {load}", error))
                    continue
                told = {key: getattr(way, key) for key in ("name", "gamma", "ngrams", "then_gamma", "tuned_on")}
                rivals.append(LoadRival(**told, speed_up=timed.speed_up, speed_up_ci=timed.speed_up_ci))
            rows.append(
                LoadRow(
                    concurrency=load, gamma=gamma, predicted=curve.predicted(load, gamma), rivals=rivals,
                    run=_to_run(found, rivals), **asdict(found),
                )
            )  # fmt: skip
    measured = {row.concurrency: row.speed_up / row.predicted for row in rows}
    update = {
        "load": rows,
        "plain_wins_from": LoadCurve(curve.roofline, taus, measured).plain_wins_from(),
        "roofline": _roofline(curve),
        "warnings": [*verdict.warnings, *warnings],
    }
    return verdict.model_copy(update=update)


def _timed(target: PreTrainedModel, evidence: Evidence, load: int, way: Entrant) -> LoadedSpeed:
    texts = [(text.prompt_ids, text.response_ids) for text in evidence.frozen]
    settings = evidence.settings.under(evidence.settings.rule, way.gamma)
    shares = {DRAFTED: 1.0} if way.found is None else kind_shares(way.found, load, drafts=way.then_gamma is not None)
    timed = full_batch_seconds(target, way.drafter, texts, settings, load)
    plain_T = np.median(timed.plain_TB, axis=1)
    tokens_P = _by_prompt(evidence, [len(said) for _, said in texts])
    return loaded_speed(load, tokens_P, _by_prompt(evidence, way.blocks_N), plain_T, plain_T * timed.ratios(shares))


def _rivals(target: PreTrainedModel, evidence: Evidence, costs: StepCosts, most: int) -> list[Entrant]:
    """Prompt lookup, past responses where there are any, lookup before the draft that stands behind it in the contest: each at its best."""
    behind, gammas = _behind(evidence), range(1, most + 1)
    law = law_of(evidence.rule, evidence.settings.sampling)
    scores = evidence.own_scores(behind.name)
    found = (
        lookup_entrant(evidence.frozen, evidence.history, costs, gammas),
        past_entrant(target, evidence.frozen, evidence.history, costs, gammas),
        cascade_entrant(_drafter(behind), evidence.frozen, scores, law, costs, gammas),
    )
    return [one for one in found if one is not None]


def _behind(evidence: Evidence) -> Contestant:
    contest = evidence.contest
    name = contest[TOGETHER].behind if contest is not None and TOGETHER in contest else None
    return next((one for one in (*evidence.others, *evidence.contestants) if one.name == name), evidence.best)


def _drafter(one: Contestant) -> Callable[[], Drafter]:
    return one.draft.drafter


def _to_run(draft: LoadedSpeed, rivals: Sequence[LoadRival]) -> str | None:
    """The fastest of what is certainly faster than plain decoding, the target alone where nothing is; None on too few prompts.

    Lookup before the draft only where it is worth having beside either alone, as at batch 1.
    """
    found = {BEST: (draft.speed_up, draft.speed_up_ci)} | {one.name: (one.speed_up, one.speed_up_ci) for one in rivals}
    if any(interval is None for _, interval in found.values()):
        return None
    faster = {name: speed for name, (speed, interval) in found.items() if interval is not None and interval[0] > 1.0}
    alone = {name: speed for name, speed in faster.items() if name != TOGETHER}
    if faster.get(TOGETHER, 0.0) >= TOGETHER_WORTHWHILE * max(alone.values(), default=0.0) > 0.0 or not alone:
        return TOGETHER if TOGETHER in faster else ALONE
    return max(alone, key=alone.__getitem__)


def _costs_at_loads(
    target: PreTrainedModel, draft: Draft, evidence: Evidence, context: int | None
) -> tuple[list[StepCosts], list[str]]:
    """Stage times at every load that there is memory for, and what is said of the others."""
    settings, costs, warnings = evidence.settings, [], []
    typical, most = typical_length(evidence.frozen), _most_gamma(evidence, context)
    needed = (COST_BLOCKS + 2) * (most + 1)
    typical = typical if context is None else max(2, min(typical, context - needed))
    for load in sorted(evidence.judge.load):
        try:
            check_memory(target, draft.model, load, typical + needed, most + 1)
        except UserError as error:
            warnings.append(_left_out(f"judge.load {load}", error))
            continue
        widest = min(most, max(FITTED_GAMMAS[1], FITTED_TOKENS // load - 1))
        gammas = [gamma for gamma in FITTED_GAMMAS if gamma <= widest]
        costs.append(
            measure_costs(
                target, draft, settings, gammas=gammas, batch_size=load, context=typical, repeats=REPEATS,
            )
        )  # fmt: skip
    return costs, warnings


def _by_prompt(evidence: Evidence, of_response: Sequence[int] | np.ndarray) -> np.ndarray:
    """(P,) sums over each prompt's responses."""
    return sum_by_prompt(evidence.keys, np.asarray(of_response))


def _most_gamma(evidence: Evidence, context: int | None) -> int:
    """The largest gamma asked about: its timed blocks take no more than half of the context, and replay knows its tau."""
    room = MOST_GAMMA if context is None else context // (2 * TIMED_BLOCKS) - 1
    known = scored_gammas(evidence.own_scores(evidence.best.name), range(MOST_GAMMA + 1))[-1]
    return max(evidence.gamma, min(MOST_GAMMA, room, known))


def _left_out(what: str, error: UserError) -> str:
    return f"{what} was not measured: {error}"


def _roofline(curve: LoadCurve) -> Roofline:
    target, draft = curve.roofline.target, curve.roofline.draft
    return Roofline(
        target_fixed_seconds=target.fixed,
        target_seconds_per_token=target.per_token,
        draft_fixed_seconds=draft.fixed,
        draft_seconds_per_token=draft.per_token,
        free_tokens=target.free_tokens,
    )
