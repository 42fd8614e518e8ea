"""The verdict under load: the draft in question timed beside plain decoding at each of judge.load."""

from dataclasses import asdict

import numpy as np
from transformers import PreTrainedModel

from distill.models.target import Target
from distill.run.verdict_record import LoadRow, Roofline, Verdict
from distill.verdict.evidence import Evidence, cpu_threads, typical_length
from speculative.decode import context_of
from speculative.drafters.parallel import model_drafter
from speculative.engine.memory import check_memory
from speculative.errors import UserError
from speculative.measure.cost import StepCosts, measure_costs
from speculative.measure.full_batch import TIMED_BLOCKS, full_batch_seconds
from speculative.measure.intervals import sum_by_prompt
from speculative.measure.load import LoadCurve, fit_roofline, loaded_speed
from speculative.measure.replay import expected_blocks_of, law_of
from speculative.measure.token_scores import scored_gammas

MOST_GAMMA = 16
# Of the calls that the roofline is fitted to. At a large load wide calls take long and say nothing new, so beyond the first
# two gammas only calls of so many tokens are timed.
FITTED_GAMMAS = (1, 3, 8, 16)
FITTED_TOKENS = 64
BLOCKS, REPEATS = 8, 2


def under_load(verdict: Verdict, evidence: Evidence, target: Target) -> Verdict:
    """The verdict with `load`, `plain_wins_from` and `roofline`; as it is where judge.load is empty.

    Two passes over the loads: the steps of both models, which give the roofline and, with replay's tau on all held-out
    prompts, each load's best gamma; then blocks at that gamma and plain steps in turn, every row taken. A load that the
    machine has no memory for is left out with a warning.
    """
    judging, settings, draft = evidence.judge, evidence.settings, evidence.best.draft
    if not judging.load:
        return verdict
    drafting = evidence.best.drafting
    context, _ = context_of(target.model, model_drafter(draft, drafting))
    texts = [(text.prompt_ids, text.response_ids) for text in evidence.frozen]
    with cpu_threads(judging.speed_threads):
        costs, warnings = _costs_at_loads(target.model, draft, evidence, context)
        if not costs:
            return verdict.model_copy(update={"warnings": [*verdict.warnings, *warnings]})
        tokens_P, blocks_PG = _sums(evidence, _most_gamma(evidence, context))
        taus = {g: float(tokens_P.sum() / blocks_P.sum()) for g, blocks_P in enumerate(blocks_PG.T, start=1)}
        curve, rows = LoadCurve(fit_roofline(costs), taus), []
        for load in (one.batch_size for one in costs):
            gamma = curve.best_gamma(load)
            try:
                at_gamma = settings.under(settings.rule, gamma)
                seconds = full_batch_seconds(target.model, draft, texts, at_gamma, load, drafting=drafting)
            except UserError as error:
                warnings.append(_left_out(load, error))
                continue
            found = loaded_speed(load, tokens_P, blocks_PG[:, gamma - 1], *seconds)
            rows.append(LoadRow(concurrency=load, gamma=gamma, predicted=curve.predicted(load, gamma), **asdict(found)))
    measured = {row.concurrency: row.speed_up / row.predicted for row in rows}
    update = {
        "load": rows,
        "plain_wins_from": LoadCurve(curve.roofline, taus, measured).plain_wins_from(),
        "roofline": _roofline(curve),
        "warnings": [*verdict.warnings, *warnings],
    }
    return verdict.model_copy(update=update)


def _costs_at_loads(
    target: PreTrainedModel, draft: PreTrainedModel, evidence: Evidence, context: int | None
) -> tuple[list[StepCosts], list[str]]:
    """Stage times at every load that there is memory for, and what is said of the others."""
    settings, costs, warnings = evidence.settings, [], []
    typical, most = typical_length(evidence.frozen), _most_gamma(evidence, context)
    needed = (BLOCKS + 2) * (most + 1)
    typical = typical if context is None else max(2, min(typical, context - needed))
    for load in sorted(evidence.judge.load):
        try:
            check_memory(target, draft, load, typical + needed, most + 1)
        except UserError as error:
            warnings.append(_left_out(load, error))
            continue
        widest = min(most, max(FITTED_GAMMAS[1], FITTED_TOKENS // load - 1))
        gammas = [gamma for gamma in FITTED_GAMMAS if gamma <= widest]
        costs.append(
            measure_costs(
                target, draft, gammas=gammas, sampling=settings.sampling, rule=settings.rule, batch_size=load,
                context=typical, blocks=BLOCKS, repeats=REPEATS, drafting=evidence.best.drafting,
            )
        )  # fmt: skip
    return costs, warnings


def _sums(evidence: Evidence, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each prompt's responses (P,), and the target calls that replay expects for them at gamma 1..most (P, G)."""
    scores = evidence.own_scores(evidence.best.name)
    law = law_of(evidence.rule, evidence.settings.sampling)
    blocks_NG = expected_blocks_of(scores, law, range(1, most + 1))
    tokens_P = sum_by_prompt(evidence.keys, np.array([len(own) for own in scores]))
    return tokens_P, np.stack([sum_by_prompt(evidence.keys, blocks_N) for blocks_N in blocks_NG.T], 1)


def _most_gamma(evidence: Evidence, context: int | None) -> int:
    """The largest gamma asked about: its timed blocks take no more than half of the context, and replay knows its tau."""
    room = MOST_GAMMA if context is None else context // (2 * TIMED_BLOCKS) - 1
    known = scored_gammas(evidence.own_scores(evidence.best.name), range(MOST_GAMMA + 1))[-1]
    return max(evidence.gamma, min(MOST_GAMMA, room, known))


def _left_out(load: int, error: UserError) -> str:
    return f"judge.load {load} was not measured: {error}"


def _roofline(curve: LoadCurve) -> Roofline:
    target, draft = curve.roofline.target, curve.roofline.draft
    return Roofline(
        target_fixed_seconds=target.fixed,
        target_seconds_per_token=target.per_token,
        draft_fixed_seconds=draft.fixed,
        draft_seconds_per_token=draft.per_token,
        free_tokens=target.free_tokens,
    )
