"""The ways to decode that a contest holds, each at the gamma and sizes that pay most: drafts, what needs no training, both.

Shapes: N held-out responses, K gammas, C candidates.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedModel

from distill.verdict.question import Question
from speculative.drafters.cascade import Cascade
from speculative.drafters.drafter import Drafter
from speculative.drafters.lookup import PromptLookup
from speculative.drafters.registry import Parts, make_drafter, registered
from speculative.drafters.retrieval import Datastore, Retrieval
from speculative.engine.models import vocab_rows
from speculative.measure.cost import StepCosts
from speculative.measure.measured import LOOKUP, PAST, TOGETHER, Way
from speculative.measure.replay import Blocks, expected_blocks_of, texts_of
from speculative.measure.rival_replay import (
    cross_fitted,
    found_blocks,
    found_steps,
    kept_by_lookup,
    kept_by_retrieval,
    tuned_lookup,
)
from speculative.measure.token_scores import TokenScores, scored_gammas

# Past responses that things are looked up in, at most: about as many as an engine keeps.
MOST_PAST = 10_000
# Training responses that prompt lookup is tuned on: more change nothing but the time it takes.
TUNED_ON = 256
# Tokens that a way proposes for which replay has no law to choose them by.
FEW = 4


def draft_way(
    question: Question, name: str, drafter: Callable[[], Drafter], scores: Sequence[TokenScores], costs: StepCosts,
    gammas: Sequence[int] | None = None,
) -> Way:  # fmt: skip
    """A draft at the gamma of the highest predicted speed-up, 1 or more."""
    gammas = scored_gammas(scores, gammas or timed_gammas(costs))
    blocks_NK = expected_blocks_of(scores, question.law, gammas)
    prices_K = np.array([costs.block_price(gamma) for gamma in gammas])
    best = int((blocks_NK.sum(0) * prices_K).argmin())
    fitted = cross_fitted(blocks_NK * prices_K, question.keys) / prices_K[best] if question.cross_fits else None
    return Way(name, drafter, gammas[best], blocks_NK[:, best], fitted)


def lookup_way(question: Question, costs: StepCosts, gammas: Sequence[int]) -> Way:
    """Prompt lookup at the sizes and gamma of the highest predicted speed-up on other prompts' responses, where there are any."""
    tuned = tuned_lookup(question.history[:TUNED_ON] or question.frozen, costs, gammas)
    sizes, blocks, fitted = tuned.sizes, tuned.blocks, None
    if question.history:
        kept = [kept_by_lookup(text, tuned.gamma, *sizes) for text in question.frozen]
        blocks = found_blocks(kept, (tuned.gamma,))
    else:
        fitted = _fitted(question, tuned.tried_NC, blocks)
    return Way(
        LOOKUP, lambda: PromptLookup(*sizes), tuned.gamma, blocks.calls_NK[:, 0], fitted, sizes, found=_found(blocks),
        tuned_on="training prompts" if question.history else Way.tuned_on,
    )  # fmt: skip


def together_way(
    question: Question,
    drafter: Callable[[], Drafter],
    scores: Sequence[TokenScores],
    costs: StepCosts,
    gammas: Sequence[int],
    behind: str,
) -> Way:
    """Prompt lookup before a draft of these scores, at the sizes and gammas of the highest predicted speed-up."""
    tuned = tuned_lookup(question.frozen, costs, gammas, texts_of(scores, question.law))
    sizes, then = tuned.sizes, tuned.then_gamma
    return Way(
        TOGETHER, lambda: Cascade(PromptLookup(*sizes), drafter(), then_gamma=then),
        tuned.gamma, tuned.blocks.calls_NK[:, 0], _fitted(question, tuned.tried_NC, tuned.blocks), sizes, then, behind,
        _found(tuned.blocks),
    )  # fmt: skip


def past_way(question: Question, target: PreTrainedModel, costs: StepCosts, gammas: Sequence[int]) -> Way | None:
    """Past responses to look things up in, at the gamma of the highest predicted speed-up; None where there are none."""
    said = [text.response_ids for text in question.history[:MOST_PAST] if text.response_ids]
    if not any(len(ids) > 1 for ids in said):
        return None
    datastore = Datastore.build(said, vocab_rows(target))
    kept = [kept_by_retrieval(text, max(gammas), datastore) for text in question.frozen]
    blocks = found_blocks(kept, gammas)
    steps_NK = found_steps(blocks, gammas, costs)
    best = int(steps_NK.sum(0).argmin())
    own = Blocks(blocks.found_NK[:, best : best + 1], blocks.others_NK[:, best : best + 1])
    return Way(
        PAST, lambda: Retrieval(datastore), gammas[best], own.calls_NK[:, 0], _fitted(question, steps_NK, own),
        found=_found(own),
    )  # fmt: skip


def live_ways(asked: Sequence[str], target: PreTrainedModel, drafter: Callable[[], Drafter]) -> list[Way]:
    """What judge.ways name: replay has no law for them, so they are counted live, at one setting. drafter: of the draft model."""
    parts, known = Parts(target, drafter), registered()
    return [
        Way(
            name, functools.partial(make_drafter, name, parts), tree.depth if (tree := known[name].tree) else FEW,
            tree=tree, tuned_on="nothing",
        )
        for name in dict.fromkeys(asked)
    ]  # fmt: skip


def timed_gammas(costs: StepCosts) -> range:
    """Gammas that were timed or lie between."""
    return range(1, max(costs.verify_seconds) + 1)


def _fitted(question: Question, tried_NC: np.ndarray, blocks: Blocks) -> np.ndarray | None:
    """`Way.fitted_N`; None where there are prompts enough. The price of a block is that of the candidate of the fewest steps."""
    if not question.cross_fits:
        return None
    price = float(tried_NC.sum(0).min()) / float(blocks.calls_NK.sum())
    return cross_fitted(tried_NC, question.keys) / price


def _found(blocks: Blocks) -> float:
    """The share of all blocks for which something was found."""
    return float(blocks.found_NK.sum()) / max(float(blocks.calls_NK.sum()), 1.0)
