"""Replay of drafters without training on stored target text: prompt lookup, past responses, and either of them before a draft.

A drafter without a model proposes from the text alone, with probability 1. So a proposed token is kept exactly where the target's
text has it (min(1, target / draft) couples it to the emitted token), at every temperature and under every rule, and the blocks are
certain given the text. Between them the target decodes alone or, with lookup before a draft, the draft's blocks follow
the law in `replay`. The
last block counts in full, as in live decoding.

Shapes: N texts, T tokens of one text, K gammas, G drafted tokens, C candidates.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from speculative.drafters.lookup import RowIndex
from speculative.drafters.past_responses import ResponseIndex
from speculative.measure.cost import StepCosts
from speculative.measure.replay import GAMMAS, Blocks, TextCosts, expected_blocks
from speculative.measure.token_scores import StoredText
from speculative.progress import each

# (longest, shortest) n-gram that prompt lookup may be set to. Short ones propose often and are often wrong, which is
# fine if a wrong proposal costs little. Before a draft, only nearly certain proposals should replace it.
NGRAM_SIZES = ((2, 1), (3, 1), (3, 2), (4, 2), (5, 3), (8, 4))


def kept_by_lookup(text: StoredText, gamma: int, max_ngram: int = 3, min_ngram: int = 1) -> np.ndarray:
    """(T,) number of kept tokens of a proposal of gamma tokens at each position; -1 if there is none. For a smaller gamma it is min(kept,
    gamma): `PromptLookup` finds as many tokens as requested, or none.
    """
    index = RowIndex(min_ngram, max_ngram)
    index.read(list(text.prompt_ids))
    ids = list(text.response_ids)
    kept_T = np.full(len(ids), -1, dtype=np.int64)
    for position, token_id in enumerate(ids):
        chain = index.continuation(gamma)
        if chain:
            pairs = zip(chain, ids[position:], strict=False)
            left = len(ids) - position
            parted = (place for place, (one, other) in enumerate(pairs) if one != other)
            kept_T[position] = next(parted, min(gamma, left))
        index.read([token_id])
    return kept_T


def kept_by_past_responses(text: StoredText, gamma: int, index: ResponseIndex) -> np.ndarray:
    """(T,) as `kept_by_lookup`, of proposals from past responses."""
    prompt, ids = len(text.prompt_ids), np.asarray(text.response_ids, dtype=np.int64)
    if not len(ids):
        return np.zeros(0, dtype=np.int64)
    tokens_C = np.concatenate((np.asarray(text.prompt_ids, dtype=np.int64), ids))
    # Every position is a row of the same text at its own length.
    tokens_TC = np.broadcast_to(tokens_C, (len(ids), len(tokens_C)))
    ids_TG, counts_T = index.continuations(tokens_TC, prompt + np.arange(len(ids)), gamma)
    padded = np.concatenate((ids, np.full(gamma - 1, -1)))
    same_TG = np.lib.stride_tricks.sliding_window_view(padded, gamma) == ids_TG
    same_TG &= np.arange(gamma) < counts_T[:, None]
    kept_T = np.logical_and.accumulate(same_TG, axis=1).sum(1)
    return np.where(counts_T > 0, kept_T, -1)


def found_blocks(
    kept: Sequence[np.ndarray],
    gammas: Sequence[int],
    drafted: Sequence[TextCosts] | None = None,
    then_gammas: Sequence[int] | None = None,
) -> Blocks:
    """Blocks at each gamma of a drafter that keeps `kept` (T,) tokens of a text (`kept_by_lookup`, `kept_by_past_responses`, at the largest
    gamma or beyond), and the blocks between them. drafted: texts of the second drafter (`replay.texts_of`), which drafts then_gammas (K,),
    by default the same; None: the target decodes alone there.
    """
    if drafted is None:
        drafted, then_gammas = [TextCosts(np.zeros(len(kept_T))) for kept_T in kept], [0] * len(gammas)
    texts = [own._replace(sure_T=kept_T) for own, kept_T in zip(drafted, kept, strict=True)]
    return expected_blocks(texts, then_gammas or gammas, gammas)


def found_steps(
    blocks: Blocks, gammas: Sequence[int], costs: StepCosts, then_gammas: Sequence[int] | None = None
) -> np.ndarray:
    """(N, K) target steps of these blocks: `block_price` with nothing drafted for a found one, the whole for a
    drafted one, 1 for a plain one.
    then_gammas: of the drafted ones; None = plain. In a batch larger than 1, every block costs both: some row nearly always needs the
    draft, which then drafts for all, and some row finds a proposal, which makes the call wide for all.
    """
    then_gammas = then_gammas or [0] * len(gammas)
    if costs.batch_size > 1:
        return blocks.calls_NK * [costs.block_price(*both) for both in zip(gammas, then_gammas, strict=True)]
    found_K, then_K = (
        np.array([costs.block_price(*own) for own in of])
        for of in ([(gamma, 0) for gamma in gammas], [(gamma, gamma) for gamma in then_gammas])
    )
    return blocks.found_NK * found_K + blocks.others_NK * then_K


@dataclass(frozen=True)
class Tuned:
    """Prompt lookup, alone or before a draft, at the sizes and gamma of the highest predicted speed-up on some texts.

    sizes: (longest, shortest) n-gram. then_gamma: of the draft after the lookup; None = no draft. tau: tokens per target call. speed_up:
    tokens over steps_N, the target steps of each text with its prompt. blocks: (N, 1). tried_NC: steps of the blocks of every candidate.
    """

    sizes: tuple[int, int]
    gamma: int
    then_gamma: int | None
    tau: float
    speed_up: float
    blocks: Blocks
    steps_N: np.ndarray
    tried_NC: np.ndarray


def tuned_lookup(
    texts: Sequence[StoredText],
    costs: StepCosts,
    gammas: Sequence[int] = GAMMAS,
    drafted: Sequence[TextCosts] | None = None,
) -> Tuned:
    """Prompt lookup at the n-gram sizes and the gamma that take the fewest target steps a token on these texts; ties go to the first sizes
    and the smallest gamma. Choose on other texts than those it is judged on. drafted: texts of a draft after the lookup
    (`replay.texts_of`), whose own gamma is not larger: looked-up tokens cost nothing to propose.
    """
    candidates = [(gamma, 0) for gamma in gammas]
    if drafted is not None:
        # Later offsets of a parallel draft were not scored.
        scored = min(
            (own_gammas.costs_T.shape[1] for own_gammas in drafted if own_gammas.costs_T.ndim == 2), default=max(gammas)
        )
        candidates = [(gamma, then) for gamma in gammas for then in gammas if then <= min(gamma, scored)]
    own_gammas, then_gammas = zip(*candidates, strict=True)
    tried = []
    for sizes in each(NGRAM_SIZES, "tuning prompt lookup"):
        kept = [kept_by_lookup(text, max(gammas), *sizes) for text in texts]
        blocks = found_blocks(kept, own_gammas, drafted, then_gammas)
        tried.append((blocks, found_steps(blocks, own_gammas, costs, then_gammas)))
    tried_NC = np.concatenate([steps_NK for _, steps_NK in tried], 1)
    best = int(tried_NC.sum(0).argmin())
    size, place = divmod(best, len(candidates))
    blocks = Blocks(*(one_NK[:, place : place + 1] for one_NK in tried[size][0]))
    tokens_N = np.array([len(text.response_ids) for text in texts], dtype=np.float64)
    steps_N = costs.with_prompts(tried_NC[:, best], tokens_N, drafted is not None)
    tau, speed_up = (float(tokens_N.sum() / one.sum()) for one in (blocks.calls_NK, steps_N))
    gamma, then = candidates[place]
    return Tuned(NGRAM_SIZES[size], gamma, then or None, tau, speed_up, blocks, steps_N, tried_NC)


def cross_fitted(tried_NC: np.ndarray, prompt_keys: Sequence[Hashable]) -> np.ndarray:
    """(N,) steps of each response at the candidate with the fewest steps on the other half of the prompts, so that a choice is
    not judged on the prompts it was made on. Prompts alternate between the halves, in order of first appearance.
    """
    numbers: dict[Hashable, int] = {}
    odd_N = np.array([numbers.setdefault(key, len(numbers)) % 2 == 1 for key in prompt_keys])
    best_of_even, best_of_odd = (tried_NC[half_N].sum(0).argmin() for half_N in (~odd_N, odd_N))
    return np.where(odd_N, tried_NC[:, best_of_even], tried_NC[:, best_of_odd])
