"""Prepare a timing: score the drafts on the text, time their steps, and make the ways to decode, each at its best gamma and n-gram
sizes.

Shapes: N held-out responses, K gammas, C drafts.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from distill.config.sections import JudgeConfig
from distill.run.verdict_record import WAYS
from distill.verdict.decoding import NamedDraft
from distill.verdict.judging_setup import JudgingSetup
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft, drafts_of
from speculative.drafters.drafter import Drafter
from speculative.drafters.past_responses import ResponseIndex
from speculative.drafters.registry import Parts, recipes
from speculative.engine.models import max_positions, vocab_rows
from speculative.evaluate import HeldoutResponse, one_per_prompt
from speculative.measure.baseline_replay import (
    cross_fitted,
    found_blocks,
    found_steps,
    kept_by_lookup,
    kept_by_past_responses,
    tuned_lookup,
)
from speculative.measure.cost import TIMED_BLOCKS, StepCosts, best_gamma, first_near_best, measure_costs
from speculative.measure.measured import LOOKUP, LOOKUP_DRAFT, PAST, LossyPrice, Predicted, Way
from speculative.measure.metrics import ratio_with_interval
from speculative.measure.replay import (
    Blocks,
    TextCosts,
    expected_blocks,
    expected_blocks_of,
    texts_of,
)
from speculative.measure.token_scores import TokenScores, score_tokens, scored_gammas
from speculative.rules.rule import Rule

# Share of judge.speed_seconds for the steps of each pair of shapes.
COSTS_SHARE = 1 / 6
WIDEST = 64  # tokens of the widest call that is timed under load, beyond the first three gammas
# At most this many past responses are searched, about as many as an engine keeps.
MOST_PAST = 10_000
# Training responses that prompt lookup is tuned on. Using more of them only takes longer.
TUNED_ON = 256
# Gamma of ways that replay cannot predict, and so cannot choose a gamma for.
FEW = 4


@dataclass(frozen=True, kw_only=True)
class ScoredDrafts:
    """The drafts to judge, with scores and step times. The last one is the draft in question.

    scores: by rule and draft. costs: by draft. Both also have the `others`, variants of the draft in question: its other way
    of drafting if it has one (the slower one by replay and step times), under a name of `WAYS`, and the quantized draft.
    """

    drafts: tuple[NamedDraft, ...]
    others: tuple[NamedDraft, ...] = ()
    scores: Mapping[Rule, Mapping[str, list[TokenScores]]]
    costs: Mapping[str, StepCosts] = dataclasses.field(default_factory=dict)


def score_all(setup: JudgingSetup, drafts: Sequence[NamedDraft]) -> dict[Rule, dict[str, list[TokenScores]]]:
    """One pass of every draft over every text."""
    return {
        rule: {
            draft.name: score_tokens(
                draft.draft.model,
                text,
                setup.settings.under(rule, 0).sampling,
                offsets=draft.draft.offsets(setup.gamma),
            )
            for draft in drafts
        }
        for rule, text in setup.texts.items()
    }


def score_and_time(
    setup: JudgingSetup, target: PreTrainedModel, drafts: Sequence[NamedDraft], lighter: NamedDraft | None = None
) -> ScoredDrafts:
    """Score every draft and time its steps; a last draft that can draft both ways continues in the faster one.

    lighter: the quantized last draft, which drafts the same way.
    """
    best = drafts[-1]
    ways = [replace(best, name=WAYS[draft.drafting], draft=draft) for draft in drafts_of(best.draft.model)]
    everybody = [*drafts[:-1], *ways]
    scores, costs = score_all(setup, everybody), costs_of(setup, target, everybody)
    ways.sort(key=lambda way: _predicted(scores[setup.rule][way.name], setup.rule, costs[way.name]))
    chosen, others = ways.pop(), ways
    if lighter is not None:
        others.append(replace(lighter, draft=Draft(lighter.draft.model, chosen.draft.drafting)))
        costs |= costs_of(setup, target, others[-1:])
        for rule, found in score_all(setup, others[-1:]).items():
            scores[rule] |= found
    costs[best.name] = costs.pop(chosen.name)
    for of_rule in scores.values():
        of_rule[best.name] = of_rule.pop(chosen.name)
    best = replace(chosen, name=best.name)
    return ScoredDrafts(drafts=(*drafts[:-1], best), others=tuple(others), scores=scores, costs=costs)


def _predicted(scores: Sequence[TokenScores], rule: Rule, costs: StepCosts) -> float:
    """The highest predicted speed-up of a draft at any timed gamma."""
    gammas = scored_gammas(scores, timed_gammas(costs))
    taus = sum(map(len, scores)) / expected_blocks_of(scores, rule, gammas).sum(0)
    return best_gamma(dict(zip(gammas, taus.tolist(), strict=True)), costs)[1]


def ways_of(setup: JudgingSetup, target: PreTrainedModel, scored: ScoredDrafts) -> list[Way]:
    """Every draft, prompt lookup, past responses if there are any, lookup before the draft, the ways listed in judge.ways, and lossy ones.

    The draft after the lookup is the variant of the draft in question that needs the fewest target steps.
    """
    scores, best = scored.scores[setup.rule], scored.drafts[-1]
    ways = {
        draft.name: draft_way(setup, draft.name, draft.draft.drafter, scores[draft.name], scored.costs[draft.name])
        for draft in (*scored.drafts, *scored.others)
    }

    def steps(draft: NamedDraft) -> float:
        way = ways[draft.name]
        assert way.predicted is not None
        return float(way.predicted.blocks_N.sum()) * scored.costs[draft.name].block_price(way.gamma)

    cheapest = min((best, *scored.others), key=steps)
    free = free_ways(setup, target, scores[cheapest.name], cheapest, scored.costs[cheapest.name])
    lossy = lossy_ways(setup, target, best, scores[best.name], scored.costs[best.name])
    return [*ways.values(), *free, *live_ways(setup.judge.ways, target, best.draft), *lossy]


def free_ways(
    setup: JudgingSetup,
    target: PreTrainedModel,
    scores: Sequence[TokenScores],
    then: NamedDraft,
    costs: StepCosts,
    gammas: Sequence[int] | None = None,
) -> list[Way]:
    """Prompt lookup, past responses if there are any, and lookup before a draft."""
    gammas = gammas or timed_gammas(costs)
    past = past_way(setup, target, costs, gammas)
    return [
        lookup_way(setup, target, costs, gammas),
        *([past] if past is not None else []),
        lookup_way(setup, target, costs, gammas, then, scores),
    ]


def costs_of(setup: JudgingSetup, target: PreTrainedModel, drafts: Sequence[NamedDraft]) -> dict[str, StepCosts]:
    """Stage times of every draft at a typical length of the text; drafts of the same shape are measured once."""
    by_shape: dict[Any, StepCosts] = {}
    costs, typical = {}, typical_length(setup.heldout)
    for draft in reversed(drafts):
        shape = draft.draft.shape
        if shape not in by_shape:
            context = min(setup.context, max_positions(draft.draft.model.config) or setup.context)
            timed = step_costs(setup.judge, setup.settings, target, draft.draft, context, typical)
            by_shape[shape] = timed.of_text(setup.heldout)
        costs[draft.name] = by_shape[shape]
    return costs


def step_costs(
    judging: JudgeConfig,
    settings: DecodeSettings,
    target: PreTrainedModel,
    draft: Draft,
    context_limit: int,
    typical: int = 128,
    load: int = 1,
) -> StepCosts:
    """Stage times of this pair at a load under a rule, at gammas up to 16 that fit the context; at a large load, where wide calls take long
    and add no information, only calls of at most WIDEST tokens beyond the first three gammas.

    judging: CPU threads and the time for timing, of which the steps get COSTS_SHARE. settings: rule, sampling and a gamma that is always
    measured. typical: tokens of context at which steps are timed, or fewer if they do not fit.
    """
    blocks, gamma = TIMED_BLOCKS, settings.gamma
    every = [1, 2, 3, *(g for g in (5, 8, 12, 16) if load == 1 or load * (g + 1) <= WIDEST)]
    gammas = sorted(g for g in {*every, gamma} if g <= gamma or (blocks + 3) * (g + 1) < context_limit - 32)
    context = max(2, min(typical, context_limit - (blocks + 3) * (max(gammas) + 1)))
    with cpu_threads(judging.speed_threads):
        return measure_costs(
            target,
            draft,
            settings,
            gammas=gammas,
            batch_size=load,
            context=context,
            seconds=COSTS_SHARE * judging.speed_seconds,
        )


def typical_length(heldout: Sequence[HeldoutResponse]) -> int:
    """Context half-way through a response: the median prompt and half the median response, in tokens."""
    lengths_N2 = [(len(text.prompt_ids), len(text.response_ids)) for text in heldout]
    prompt, response = np.median(lengths_N2, axis=0).tolist()
    return max(2, round(prompt + response / 2))


@contextlib.contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Set torch's CPU threads while something is timed: one thread is best for a small model at batch 1."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def draft_way(
    setup: JudgingSetup,
    name: str,
    drafter: Callable[[], Drafter],
    scores: Sequence[TokenScores],
    costs: StepCosts,
    gammas: Sequence[int] | None = None,
    texts: Sequence[TextCosts] | None = None,
) -> Way:
    """A draft at the smallest gamma, 1 or more, whose predicted speed-up is nearly the highest. texts: its costs under another rule."""
    gammas = scored_gammas(scores, gammas or timed_gammas(costs))
    blocks_NK = expected_blocks(texts or texts_of(scores, setup.rule), gammas).others_NK
    prices_K = np.array([costs.block_price(gamma) for gamma in gammas])
    best = first_near_best(blocks_NK.sum(0) * prices_K)
    fitted = cross_fitted(blocks_NK * prices_K, setup.keys) / prices_K[best] if setup.cross_fits else None
    return Way(name, drafter, gammas[best], Predicted(blocks_NK[:, best], fitted))


def lookup_way(
    setup: JudgingSetup,
    target: PreTrainedModel,
    costs: StepCosts,
    gammas: Sequence[int],
    then: NamedDraft | None = None,
    scores: Sequence[TokenScores] = (),
) -> Way:
    """Prompt lookup, alone or before a draft of these scores, at the sizes and gammas of the highest predicted speed-up.

    Alone it is tuned on other prompts' responses if there are any.
    """
    others = setup.history[:TUNED_ON] if then is None else ()
    tuned = tuned_lookup(others or setup.heldout, costs, gammas, None if then is None else texts_of(scores, setup.rule))
    blocks, fitted = tuned.blocks, None
    if others:
        kept = [kept_by_lookup(text, tuned.gamma, *tuned.sizes) for text in setup.heldout]
        blocks = found_blocks(kept, (tuned.gamma,))
    else:
        fitted = _fitted(setup, tuned.tried_NC, blocks)
    name, draft, draft_name = (LOOKUP, None, None) if then is None else (LOOKUP_DRAFT, then.draft, then.name)
    return Way(
        name,
        _maker(name, Parts(target, draft, ngrams=tuned.sizes, then_gamma=tuned.then_gamma)),
        tuned.gamma,
        Predicted(blocks.calls_NK[:, 0], fitted),
        tuned.sizes,
        tuned.then_gamma,
        draft_name,
        "training prompts" if others else Way.tuned_on,
    )


def past_way(setup: JudgingSetup, target: PreTrainedModel, costs: StepCosts, gammas: Sequence[int]) -> Way | None:
    """Lookup in past responses at the gamma of the highest predicted speed-up; None if there are no past responses."""
    said = [text.response_ids for text in setup.history[:MOST_PAST] if text.response_ids]
    if not any(len(ids) > 1 for ids in said):
        return None
    index = ResponseIndex.build(said, vocab_rows(target))
    kept = [kept_by_past_responses(text, max(gammas), index) for text in setup.heldout]
    blocks = found_blocks(kept, gammas)
    steps_NK = found_steps(blocks, gammas, costs)
    best = first_near_best(steps_NK.sum(0))
    best_blocks = Blocks(blocks.found_NK[:, best : best + 1], blocks.others_NK[:, best : best + 1])
    return Way(
        PAST,
        _maker(PAST, Parts(target, past=index)),
        gammas[best],
        Predicted(best_blocks.calls_NK[:, 0], _fitted(setup, steps_NK, best_blocks)),
    )


def live_ways(names: Sequence[str], target: PreTrainedModel, draft: Draft) -> list[Way]:
    """The ways listed in judge.ways. Replay cannot predict them, so they are counted live at one setting."""
    ways = []
    for recipe in (recipes()[name] for name in dict.fromkeys(names)):
        gamma, drafter = recipe.tree.depth if recipe.tree else FEW, _maker(recipe.name, Parts(target, draft))
        ways.append(Way(recipe.name, drafter, gamma, tree=recipe.tree, tuned_on="nothing"))
    return ways


def _maker(name: str, parts: Parts) -> Callable[[], Drafter]:
    return functools.partial(recipes()[name].drafter, parts)


def lossy_ways(
    setup: JudgingSetup, target: PreTrainedModel, best: NamedDraft, scores: Sequence[TokenScores], costs: StepCosts
) -> list[Way]:
    """The ways of judge.lenience. Replay chooses gamma; tau is counted live, in contexts that the way itself writes.
    Its price: total variation by replay (of a block's first token); at temperature 0 the share of held-out prompts answered otherwise.
    """
    judging, heldout, ways = setup.judge, setup.heldout, []
    greedy, prompts = (
        setup.settings.at_temperature_0(),
        [(item.key, item.prompt_ids) for item in one_per_prompt(heldout)],
    )
    # Under a greedy rule, which a command may ask for, no chance of a token is there to raise.
    leniences = () if setup.rule.greedy else tuple(dict.fromkeys(judging.lenience))
    alone = setup.decoding(target, None, prompts, greedy, judging.batch_size) if leniences else []
    for lenience in leniences:
        rule = setup.rule.lenient(lenience)
        texts = texts_of(scores, rule)
        excess = [np.expm1(np.maximum(-np.atleast_2d(item.costs_T.T)[0], 0.0)) for item in texts]
        name = f"{best.name}, LOSSY lenience {lenience:g}"
        way = draft_way(setup, name, best.draft.drafter, scores, costs, texts=texts)
        excess_N = np.array([alone.sum() for alone in excess])
        distance, ends = ratio_with_interval(excess_N, setup.tokens_N, setup.keys, setup.confidence(True))
        lenient = replace(greedy, gamma=way.gamma, rule=greedy.rule.lenient(lenience))
        ours = setup.decoding(target, best, prompts, lenient, judging.batch_size)
        differing = np.mean([item.response_ids != two.response_ids for item, two in zip(ours, alone, strict=True)])
        ways.append(replace(way, predicted=None, rule=rule, price=LossyPrice(distance, ends, float(differing))))
    return ways


def timed_gammas(costs: StepCosts) -> range:
    """Gammas that were timed or lie between."""
    return range(1, max(costs.verify_seconds) + 1)


def _fitted(setup: JudgingSetup, tried_NC: np.ndarray, blocks: Blocks) -> np.ndarray | None:
    """`Predicted.fitted_N`; None if there are enough prompts. The price of a block is that of the candidate with the fewest steps."""
    if not setup.cross_fits:
        return None
    price = float(tried_NC.sum(0).min()) / float(blocks.calls_NK.sum())
    return cross_fitted(tried_NC, setup.keys) / price
