"""The verdict under load: the draft in question, and what is free, timed beside plain decoding at each of judge.load."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel

from distill.models.target import Target
from distill.run.verdict_record import LOOKUP, TOGETHER, LoadRival, LoadRow, Roofline, Verdict
from distill.verdict.contest import TUNED_ON
from distill.verdict.evidence import BEST, Evidence, cpu_threads, typical_length
from speculative.decode import context_of
from speculative.drafters.cascade import Cascade
from speculative.drafters.drafter import Drafter
from speculative.drafters.lookup import PromptLookup
from speculative.drafters.parallel import model_drafter
from speculative.engine.memory import check_memory
from speculative.errors import UserError
from speculative.measure.cost import StepCosts, measure_costs
from speculative.measure.full_batch import TIMED_BLOCKS, full_batch_seconds
from speculative.measure.intervals import sum_by_prompt
from speculative.measure.load import LoadCurve, LoadedSpeed, fit_roofline, loaded_speed
from speculative.measure.race import ALONE
from speculative.measure.replay import expected_blocks_of, law_of
from speculative.measure.rival_replay import (
    cascade_blocks,
    certain_blocks,
    kept_by_lookup,
    tuned_cascade,
    tuned_lookup,
)
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
    prompts, each load's best gamma; then blocks at that gamma and plain steps in turn, every row taken, and the same of
    prompt lookup, alone and before the draft. A load that the machine has no memory for is left out with a warning.
    """
    judging, best = evidence.judge, evidence.best
    if not judging.load:
        return verdict
    drafter = functools.partial(model_drafter, best.draft, best.drafting)
    context, _ = context_of(target.model, drafter())
    with cpu_threads(judging.speed_threads):
        costs, warnings = _costs_at_loads(target.model, best.draft, evidence, context)
        if not costs:
            return verdict.model_copy(update={"warnings": [*verdict.warnings, *warnings]})
        tokens_P, blocks_PG = _sums(evidence, _most_gamma(evidence, context))
        taus = {g: float(tokens_P.sum() / blocks_P.sum()) for g, blocks_P in enumerate(blocks_PG.T, start=1)}
        curve, rows = LoadCurve(fit_roofline(costs), taus), []
        for at_load in costs:
            load = at_load.batch_size
            gamma = curve.best_gamma(load)
            try:
                found = _timed(target.model, evidence, load, _Way(gamma, drafter, blocks_PG[:, gamma - 1], mixed=False))
                rivals = [
                    LoadRival(name=name, **said, **_speed(_timed(target.model, evidence, load, way)))
                    for name, way, said in _rivals(evidence, at_load, drafter)
                ]
            except UserError as error:
                warnings.append(_left_out(load, error))
                continue
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


class _Way(NamedTuple):
    """A way to decode: blocks_P by prompt at this gamma. mixed: its blocks are of two kinds, found ones and others."""

    gamma: int
    drafter: Callable[[], Drafter]
    blocks_P: np.ndarray
    mixed: bool = True


def _timed(target: PreTrainedModel, evidence: Evidence, load: int, way: _Way) -> LoadedSpeed:
    texts = [(text.prompt_ids, text.response_ids) for text in evidence.frozen]
    settings = evidence.settings.under(evidence.settings.rule, way.gamma)
    # A median of two kinds of blocks is of either kind; that of one kind is not moved by a disturbed block.
    typical = np.mean if way.mixed else np.median
    plain_T, drafted_T = (
        typical(blocks_TB, axis=1) for blocks_TB in full_batch_seconds(target, way.drafter, texts, settings, load)
    )
    return loaded_speed(load, _by_prompt(evidence, [len(said) for _, said in texts]), way.blocks_P, plain_T, drafted_T)


def _rivals(
    evidence: Evidence, costs: StepCosts, drafter: Callable[[], Drafter]
) -> Iterator[tuple[str, _Way, dict[str, Any]]]:
    """Prompt lookup and lookup before the draft, as they are best at this load: (name, how, what is said of it)."""
    frozen, law = evidence.frozen, law_of(evidence.rule, evidence.settings.sampling)
    gammas = range(1, max(costs.verify_seconds) + 1)
    alone = tuned_lookup(evidence.history[:TUNED_ON] or frozen, costs, gammas)
    sizes = (alone.max_ngram, alone.min_ngram)
    kept = [kept_by_lookup(text, alone.gamma, *sizes) for text in frozen]
    blocks_P = _by_prompt(evidence, np.add(*certain_blocks(kept, (alone.gamma,)))[:, 0])
    yield LOOKUP, _Way(alone.gamma, lambda: PromptLookup(*sizes), blocks_P), {"gamma": alone.gamma, "ngrams": sizes}
    scores = evidence.own_scores(evidence.best.name)
    both = tuned_cascade(frozen, scores, law, costs, gammas)
    pair, then = (both.max_ngram, both.min_ngram), both.then_gamma or both.gamma
    kept = [kept_by_lookup(text, both.gamma, *pair) for text in frozen]
    blocks_P = _by_prompt(evidence, np.add(*cascade_blocks(kept, scores, law, (both.gamma,), (then,)))[:, 0])
    way = _Way(both.gamma, lambda: Cascade(PromptLookup(*pair), drafter(), then_gamma=then), blocks_P)
    yield TOGETHER, way, {"gamma": both.gamma, "ngrams": pair, "then_gamma": then}


def _to_run(draft: LoadedSpeed, rivals: Sequence[LoadRival]) -> str | None:
    """The fastest of what is certainly faster than plain decoding, the target alone where nothing is; None on too few prompts."""
    found = {BEST: (draft.speed_up, draft.speed_up_ci)} | {one.name: (one.speed_up, one.speed_up_ci) for one in rivals}
    if any(interval is None for _, interval in found.values()):
        return None
    faster = [name for name, (_, interval) in found.items() if interval is not None and interval[0] > 1.0]
    return max(faster, key=lambda name: found[name][0], default=ALONE)


def _speed(found: LoadedSpeed) -> dict[str, Any]:
    return {"speed_up": found.speed_up, "speed_up_ci": found.speed_up_ci}


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
    return _by_prompt(evidence, [len(own) for own in scores]), np.stack(
        [_by_prompt(evidence, blocks_N) for blocks_N in blocks_NG.T], 1
    )


def _by_prompt(evidence: Evidence, of_response: Sequence[int] | np.ndarray) -> np.ndarray:
    """(P,) sums over each prompt's responses."""
    return sum_by_prompt(evidence.keys, np.asarray(of_response))


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
