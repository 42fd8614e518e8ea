"""What needs no training, on stored target text: prompt lookup, retrieval, and either of them before a draft.

Who proposes without a model proposes from the text alone, with probability 1, so a proposed token is kept exactly where the
target says it (min(1, target / draft) couples it to the emitted token), at every temperature and under every rule. Given the
text its blocks are certain. In a cascade the other blocks follow the draft's law (`replay`). The last block counts in full,
as in live decoding.

Shapes: N texts, T tokens of one text, K gammas, G drafted tokens.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from speculative.drafters.lookup import RowIndex
from speculative.drafters.retrieval import Datastore
from speculative.measure.cost import StepCosts
from speculative.measure.replay import GAMMAS, TextCosts, blocks_by_proposer, texts_of
from speculative.measure.token_scores import StoredText, TokenScores

# (longest, shortest) n-gram that prompt lookup may be set to. Short ones propose often and are wrong often: right where a
# wrong proposal costs little; before a draft only what is nearly sure should take its place.
NGRAM_SIZES = ((2, 1), (3, 1), (3, 2), (4, 2), (5, 3), (8, 4))


class RivalBlocks(NamedTuple):
    """Blocks (N, K), expected ones where a draft is asked: `found_NK` with a proposal that took no model, and the others.

    The others are plain decoding where nobody else is asked, and the draft's in a cascade.
    """

    found_NK: np.ndarray
    others_NK: np.ndarray


@dataclass(frozen=True)
class Tuned:
    """Prompt lookup, alone or before a draft, at the sizes and gamma of the highest predicted speed-up on some texts.

    then_gamma: of the draft behind the lookup; None = none. tau: tokens per target call. speed_up: tokens over target
    steps, also where it is under 1. blocks: (N, 1) of them. tried_NC: target steps of each text at every candidate, this one's
    among them.
    """

    max_ngram: int
    min_ngram: int
    gamma: int
    tau: float
    speed_up: float
    then_gamma: int | None
    blocks: RivalBlocks
    tried_NC: np.ndarray


def kept_by_lookup(text: StoredText, gamma: int, max_ngram: int = 3, min_ngram: int = 1) -> np.ndarray:
    """(T,) how many tokens of a proposal of gamma made at each position would be kept; -1 where there is none.

    Of a smaller gamma it is min(kept, gamma): `PromptLookup` finds as many tokens as it is asked for, or none.
    """
    index = RowIndex(min_ngram, max_ngram)
    index.read(list(text.prompt_ids))
    said = list(text.response_ids)
    kept_T = np.full(len(said), -1, dtype=np.int64)
    for position, token_id in enumerate(said):
        chain = index.continuation(gamma)
        if chain:
            pairs = zip(chain, said[position:], strict=False)
            left = len(said) - position
            kept_T[position] = next(
                (place for place, (one, other) in enumerate(pairs) if one != other), min(gamma, left)
            )
        index.read([token_id])
    return kept_T


def kept_by_retrieval(text: StoredText, gamma: int, datastore: Datastore, min_found: int = 1) -> np.ndarray:
    """(T,) as `kept_by_lookup`, of proposals from a datastore; -1 too where fewer than min(min_found, gamma) are found.

    Of a smaller gamma it is min(kept, gamma) as long as that is at least `min_found`.
    """
    prompt, said = len(text.prompt_ids), np.asarray(text.response_ids, dtype=np.int64)
    if not len(said):
        return np.zeros(0, dtype=np.int64)
    tokens_C = np.concatenate((np.asarray(text.prompt_ids, dtype=np.int64), said))
    # Every position is a row of the same text at its own length.
    tokens_TC = np.broadcast_to(tokens_C, (len(said), len(tokens_C)))
    ids_TG, counts_T = datastore.continuations(tokens_TC, prompt + np.arange(len(said)), gamma)
    padded = np.concatenate((said, np.full(gamma - 1, -1)))
    same_TG = np.lib.stride_tricks.sliding_window_view(padded, gamma) == ids_TG
    same_TG &= np.arange(gamma) < counts_T[:, None]
    kept_T = np.logical_and.accumulate(same_TG, axis=1).sum(1)
    return np.where(counts_T >= min(min_found, gamma), kept_T, -1)


def certain_blocks(kept: Sequence[np.ndarray], gammas: Sequence[int]) -> RivalBlocks:
    """Blocks at each gamma of somebody who keeps `kept` (T,) of a text; between proposals the target decodes alone.

    kept: of `kept_by_lookup` or `kept_by_retrieval`, at the largest of the gammas or beyond.
    """
    lengths_N = np.array([len(kept_T) for kept_T in kept], dtype=np.int64)
    kept_NT = np.full((len(kept), max(1, int(lengths_N.max(initial=0)))), -1, dtype=np.int64)
    for row, kept_T in enumerate(kept):
        kept_NT[row, : len(kept_T)] = kept_T
    gammas_K = np.asarray(gammas)
    places_NK, found_NK, others_NK = (np.zeros((len(kept), len(gammas_K)), dtype=np.int64) for _ in range(3))
    while (inside_NK := places_NK < lengths_N[:, None]).any():
        now_NK = np.take_along_axis(kept_NT, np.minimum(places_NK, kept_NT.shape[1] - 1), 1)
        found_NK += inside_NK & (now_NK >= 0)
        others_NK += inside_NK & (now_NK < 0)
        places_NK += np.minimum(np.maximum(now_NK, 0), gammas_K) + 1
    return RivalBlocks(found_NK, others_NK)


def cascade_blocks(
    kept: Sequence[np.ndarray],
    scores: Sequence[TokenScores],
    rule: str,
    gammas: Sequence[int],
    then_gammas: Sequence[int] | None = None,
) -> RivalBlocks:
    """Expected blocks at each gamma of `Cascade(who keeps kept, the draft that was scored)`; `others_NK` the draft's.

    kept: as for `certain_blocks`. then_gammas: (K,) the draft's beside each of `gammas`; None = the same.
    rule: as in `replay.expected_blocks_of`.
    """
    texts = texts_of(scores, rule, sure=kept)
    return RivalBlocks(*blocks_by_proposer(texts, then_gammas or gammas, gammas))


def lookup_steps(blocks: RivalBlocks, gammas: Sequence[int], costs: StepCosts) -> np.ndarray:
    """(N, K) target steps that these blocks take: v(gamma) for one with a proposal, 1 for a plain one at batch 1.

    In a larger batch some row nearly always proposes, and the call is as wide as its widest row: v(gamma) for all.
    """
    v_K = np.array([costs.verify_ratio(gamma) for gamma in gammas])
    plain_K = np.ones_like(v_K) if costs.batch_size == 1 else v_K
    return blocks.found_NK * v_K + blocks.others_NK * plain_K


def cascade_steps(
    blocks: RivalBlocks, gammas: Sequence[int], costs: StepCosts, then_gammas: Sequence[int] | None = None
) -> np.ndarray:
    """(N, K) target steps of a cascade's blocks: v(gamma) for a found one, gamma * c(gamma) + v(gamma) for a drafted one.

    A drafted one is of then_gammas (None = the same). In a larger batch some row nearly always needs the draft, which then
    drafts for all, and some row finds something, which makes the call wide for all.
    """
    then_gammas = then_gammas or gammas
    found_K = np.array([costs.verify_ratio(gamma) for gamma in gammas])
    draft_K = np.array([gamma * costs.cost_ratio_at(gamma) for gamma in then_gammas])
    if costs.batch_size > 1:
        return (blocks.found_NK + blocks.others_NK) * (found_K + draft_K)
    then_K = np.array([costs.verify_ratio(gamma) for gamma in then_gammas])
    return blocks.found_NK * found_K + blocks.others_NK * (then_K + draft_K)


def tuned_lookup(
    texts: Sequence[StoredText],
    costs: StepCosts,
    gammas: Sequence[int] = GAMMAS,
    sizes: Sequence[tuple[int, int]] = NGRAM_SIZES,
) -> Tuned:
    """Prompt lookup at the n-gram sizes and the gamma that take the fewest target steps a token on these texts.

    Choose on other texts than those that judge it. Of equals the first sizes and the smallest gamma.
    """
    tried = _Tried(texts)
    for max_ngram, min_ngram in sizes:
        kept = [kept_by_lookup(text, max(gammas), max_ngram, min_ngram) for text in texts]
        blocks = certain_blocks(kept, gammas)
        settings = [(max_ngram, min_ngram, gamma, None) for gamma in gammas]
        tried.add(settings, blocks, lookup_steps(blocks, gammas, costs))
    return tried.best()


def tuned_cascade(
    texts: Sequence[StoredText],
    scores: Sequence[TokenScores],
    rule: str,
    costs: StepCosts,
    gammas: Sequence[int] = GAMMAS,
    sizes: Sequence[tuple[int, int]] = NGRAM_SIZES,
) -> Tuned:
    """As `tuned_lookup`, with the draft of these scores behind the lookup, at a gamma of its own that is no larger.

    What was found costs nothing to propose, so more of it is worth a try than of what must be drafted.
    """
    return _tuned_before(texts, texts_of(scores, rule), costs, gammas, sizes)


def tuned_cascade_at(
    texts: Sequence[StoredText],
    accept_probs: Sequence[np.ndarray],
    costs: StepCosts,
    gammas: Sequence[int] = GAMMAS,
    sizes: Sequence[tuple[int, int]] = NGRAM_SIZES,
) -> Tuned:
    """`tuned_cascade` of a draft whose tokens are kept with these probabilities, each by itself (as `replay.replay`)."""
    with np.errstate(divide="ignore"):
        return _tuned_before(texts, [TextCosts(-np.log(probs)) for probs in accept_probs], costs, gammas, sizes)


def _tuned_before(
    texts: Sequence[StoredText],
    drafted: Sequence[TextCosts],
    costs: StepCosts,
    gammas: Sequence[int],
    sizes: Sequence[tuple[int, int]],
) -> Tuned:
    tried = _Tried(texts)
    # What a parallel draft would propose further on was not scored.
    scored = min((own.costs_T.shape[1] for own in drafted if own.costs_T.ndim == 2), default=max(gammas))
    for max_ngram, min_ngram in sizes:
        kept = [kept_by_lookup(text, max(gammas), max_ngram, min_ngram) for text in texts]
        together = [own._replace(sure_T=kept_T) for own, kept_T in zip(drafted, kept, strict=True)]
        for gamma in gammas:
            then_gammas = [other for other in gammas if other <= min(gamma, scored)]
            same = [gamma] * len(then_gammas)
            blocks = RivalBlocks(*blocks_by_proposer(together, then_gammas, same))
            settings = [(max_ngram, min_ngram, gamma, then) for then in then_gammas]
            tried.add(settings, blocks, cascade_steps(blocks, same, costs, then_gammas))
    return tried.best()


class _Tried:
    """Candidates side by side: (longest, shortest n-gram, gamma, the draft's), their blocks and their steps."""

    def __init__(self, texts: Sequence[StoredText]) -> None:
        self.tokens = sum(len(text.response_ids) for text in texts)
        self.settings: list[tuple[int, int, int, int | None]] = []
        self.found: list[np.ndarray] = []
        self.others: list[np.ndarray] = []
        self.steps: list[np.ndarray] = []

    def add(
        self, settings: Sequence[tuple[int, int, int, int | None]], blocks: RivalBlocks, steps_NK: np.ndarray
    ) -> None:
        self.settings += settings
        self.found.append(blocks.found_NK)
        self.others.append(blocks.others_NK)
        self.steps.append(steps_NK)

    def best(self) -> Tuned:
        """The candidate of the fewest steps, of equals the first."""
        steps_NC = np.concatenate(self.steps, 1)
        place = int(steps_NC.sum(0).argmin())
        one = slice(place, place + 1)
        blocks = RivalBlocks(np.concatenate(self.found, 1)[:, one], np.concatenate(self.others, 1)[:, one])
        calls = float(blocks.found_NK.sum() + blocks.others_NK.sum())
        max_ngram, min_ngram, gamma, then_gamma = self.settings[place]
        speed_up = self.tokens / float(steps_NC[:, place].sum())
        return Tuned(max_ngram, min_ngram, gamma, self.tokens / calls, speed_up, then_gamma, blocks, steps_NC)


def cross_fitted(tried_NC: np.ndarray, prompt_keys: Sequence[Hashable]) -> np.ndarray:
    """(N,) steps of each response at the candidate that takes the fewest on the prompts of the other half: what was chosen on
    some prompts is judged on others. Prompts go to the halves in turn, in order of first appearance.
    """
    numbers: dict[Hashable, int] = {}
    odd_N = np.array([numbers.setdefault(key, len(numbers)) % 2 == 1 for key in prompt_keys])
    best_of_even, best_of_odd = (tried_NC[half_N].sum(0).argmin() for half_N in (~odd_N, odd_N))
    return np.where(odd_N, tried_NC[:, best_of_even], tried_NC[:, best_of_odd])
