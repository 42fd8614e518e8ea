"""Past responses: proposes the tokens that most often followed the row's last tokens in past responses (REST, 2311.08252).

Shapes: R rows, G drafted tokens (at most gamma), C columns of the token buffer, N tokens of the index, M its stored
n-grams, K sizes of n-grams up to the longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from speculative.drafters.drafter import Ask, Drafter, Plan, Proposal, Seats
from speculative.drafters.lookup import check_ngrams, proposal_width
from speculative.drafters.registry import Parts, way
from speculative.engine.models import vocab_rows
from speculative.errors import UserError

END = -1  # Follows every response in the index.
# Number of tokens of a continuation that are chosen by vote; the rest follows the first remaining match.
VOTED_TOKENS = 16
# An n-gram's hash is the sum of (id + 1) * MULTIPLIER^k, k its distance from the end, modulo 2^64.
MULTIPLIER = 0x9E3779B97F4A7C15


@dataclass(frozen=True, eq=False)
class ResponseIndex:
    """Past responses, and for each of their n-grams where its most frequent continuation begins.

    tokens_N: int32, every response followed by END. hashes_M: uint64, sorted. starts_M: int32, indices of tokens_N. "Most frequent" is
    decided token by token: the most frequent next token of all matches that agree so far, ties going to the earliest match. This is
    computed once, so that a look-up is one search in a sorted array. An n-gram longer than `min_ngram` is stored only if its last n-1
    tokens occur more than once: otherwise the shorter match gives the same position.
    """

    tokens_N: np.ndarray
    hashes_M: np.ndarray
    starts_M: np.ndarray
    vocab_size: int
    min_ngram: int
    max_ngram: int

    def __post_init__(self) -> None:
        """Raises ValueError for arrays that do not belong together: compiled code reads them by address."""
        tokens_N, hashes_M, starts_M = arrays = self.tokens_N, self.hashes_M, self.starts_M
        for array, dtype in zip(arrays, (np.int32, np.uint64, np.int32), strict=True):
            if array.dtype != dtype or array.ndim != 1 or not len(array) or not array.flags.c_contiguous:
                raise ValueError(f"an array of {array.dtype} {array.shape} where {dtype.__name__} is stored")
        inside = (tokens_N >= END) & (tokens_N < self.vocab_size)
        if not inside.all() or tokens_N[-1] != END or not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError("token ids or n-gram sizes out of range")
        if len(hashes_M) != len(starts_M) or starts_M.min() < 0 or starts_M.max() >= len(tokens_N):
            raise ValueError("n-grams that begin outside the text")

    @classmethod
    def build(
        cls, responses: Iterable[Sequence[int]], vocab_size: int, *, min_ngram: int = 1, max_ngram: int = 4
    ) -> ResponseIndex:
        """ResponseIndex of these token sequences; `vocab_size`: how many ids the target scores
        (`models.vocab_rows`). Leave out the responses
        that decoding will be measured on: retrieving them would overstate acceptance. Raises UserError for an empty range of sizes, an id
        outside the vocabulary, no token at all, too many tokens.
        """
        check_ngrams(min_ngram, max_ngram)
        parts = [np.asarray([*response, END], dtype=np.int64) for response in responses]
        tokens_N = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        said_N = tokens_N[tokens_N != END]
        if not len(said_N):
            raise UserError("the index would be empty: give at least one response with a token")
        if len(tokens_N) != len(said_N) + len(parts) or said_N.min() < 0 or said_N.max() >= vocab_size:
            worst = said_N.max() if said_N.max() >= vocab_size else min(said_N.min(), END)
            raise UserError(
                f"the responses of the index have token id {worst} but vocab_size is {vocab_size}: "
                "use the ids of the target's own tokenizer"
            )
        if len(tokens_N) >= 2**31:
            raise UserError(f"the index would hold {len(tokens_N)} tokens, the limit is 2^31: give fewer responses")
        hashes_M, starts_M = _index(tokens_N, vocab_size, min_ngram, max_ngram)
        if not len(hashes_M):
            raise UserError(f"no response of the index is longer than min_ngram = {min_ngram}: lower it")
        return cls(tokens_N.astype(np.int32), hashes_M, starts_M, vocab_size, min_ngram, max_ngram)

    def continuations(self, tokens_RC: np.ndarray, lengths_R: np.ndarray, gamma: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids (R, gamma) that follow the longest stored n-gram at each text's end, and how many of them are real: some twenty array
        operations for all rows.
        """
        rows_R1 = np.arange(len(lengths_R))[:, None]
        back_K = np.arange(1, self.max_ngram + 1)
        last_RK = tokens_RC[rows_R1, np.maximum(lengths_R[:, None] - back_K, 0)]
        # Hashes of the last 1, 2, .. K tokens, from the last one backwards.
        hashes_RK = np.cumsum((last_RK + 1).astype(np.uint64) * _powers(self.max_ngram), axis=1, dtype=np.uint64)
        keys_RK = hashes_RK[:, self.min_ngram - 1 :]
        places_RK = np.minimum(np.searchsorted(self.hashes_M, keys_RK), len(self.hashes_M) - 1)
        found_RK = (self.hashes_M[places_RK] == keys_RK) & (lengths_R[:, None] >= back_K[self.min_ngram - 1 :])
        # Whatever has a longer match has every shorter one, so the first miss ends the search.
        matches_R = np.logical_and.accumulate(found_RK, axis=1).sum(axis=1)
        starts_R1 = self.starts_M[places_RK[rows_R1[:, 0], matches_R - 1]].astype(np.int64)[:, None]
        # Two n-grams may share a hash: only the tokens themselves prove a match.
        sizes_R1 = (matches_R + self.min_ngram - 1)[:, None]
        same_RK = (self.tokens_N[np.maximum(starts_R1 - back_K, 0)] == last_RK) | (back_K > sizes_R1)
        real_R = (matches_R > 0) & same_RK.all(axis=1)

        ids_RG = self.tokens_N[np.minimum(starts_R1 + np.arange(gamma), len(self.tokens_N) - 1)].astype(np.int64)
        counts_R = np.logical_and.accumulate(ids_RG != END, axis=1).sum(axis=1) * real_R
        return np.where(np.arange(gamma) < counts_R[:, None], ids_RG, 0), counts_R


class PastResponses(Drafter):
    """Proposes from an index of past responses. The index is fixed, so a row's proposals depend only on its own text."""

    name = "past responses"
    source_names: tuple[str, ...] = ("past responses",)

    def __init__(self, index: ResponseIndex):
        self.index = index
        self._device = torch.device("cpu")

    def plan(self) -> Plan | None:
        sizes = self.index.max_ngram, self.index.min_ngram
        return Plan(sizes, past=self.index) if type(self) is PastResponses else None

    def start(self, seats: Seats) -> None:
        """Raises UserError if the index was built for another vocabulary than the target's."""
        known = vocab_rows(seats.target.model)
        if known != self.index.vocab_size:
            raise UserError(
                f"the index was built for a vocabulary of {self.index.vocab_size} token ids but the target has {known}: "
                "build it from responses of this target"
            )
        self._device = seats.target.device

    def propose(self, ask: Ask) -> Proposal:
        if ask.gamma == 0:
            return Proposal(torch.zeros((len(ask.lengths_R), 0), dtype=torch.int64, device=self._device))
        ids_RG, counts_R = self.index.continuations(ask.tokens_RC, ask.lengths_R, ask.gamma)
        counts_R = counts_R * ask.active_R
        width = proposal_width(counts_R, ask.gamma, self._device)
        return Proposal(torch.from_numpy(ids_RG[:, :width]).to(self._device), counts_R=counts_R)


def _powers(count: int) -> np.ndarray:
    return np.array([pow(MULTIPLIER, place, 2**64) for place in range(1, count + 1)], dtype=np.uint64)


def _index(tokens_N: np.ndarray, vocab_size: int, min_ngram: int, max_ngram: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted hashes of all stored n-grams, and where each one's continuation begins."""
    powers = _powers(max_ngram)
    # Number of tokens of its response before each token; END never continues an n-gram.
    ends_N = np.flatnonzero(tokens_N == END)
    begins_N = np.concatenate(([0], ends_N[:-1] + 1))
    before_N = np.arange(len(tokens_N)) - np.repeat(begins_N, ends_N - begins_N + 1)
    followers = np.flatnonzero(tokens_N != END)
    hashes = np.zeros(len(followers), dtype=np.uint64)
    stored: list[tuple[np.ndarray, np.ndarray]] = []
    for size in range(1, max_ngram + 1):
        long_enough = before_N[followers] >= size
        followers, hashes = followers[long_enough], hashes[long_enough]
        hashes = hashes + (tokens_N[followers - size] + 1).astype(np.uint64) * powers[size - 1]
        if size < min_ngram:
            continue
        distinct, groups, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        stored.append((distinct, _elect(tokens_N, followers, groups, vocab_size)))
        ambiguous = counts[groups] > 1
        followers, hashes = followers[ambiguous], hashes[ambiguous]
    hashes_M = np.concatenate([hashes for hashes, _ in stored])
    starts_M = np.concatenate([starts for _, starts in stored])
    order = np.argsort(hashes_M, kind="stable")
    return hashes_M[order], starts_M[order].astype(np.int32)


def _elect(tokens_N: np.ndarray, followers: np.ndarray, groups: np.ndarray, vocab_size: int) -> np.ndarray:
    """For each group of equal n-grams the position that represents its most frequent continuation. `followers` (ascending positions that
    follow an n-gram) and `groups` (the number of that n-gram) are parallel.
    """
    elected = np.full(groups.max(initial=-1) + 1, len(tokens_N))
    np.minimum.at(elected, groups, followers)
    for step in range(VOTED_TOKENS):
        next_ids = tokens_N[followers + step]
        # A group of one has nothing left to decide; a response that ended here does not vote.
        voting = (np.bincount(groups, minlength=len(elected))[groups] > 1) & (next_ids != END)
        followers, groups, next_ids = followers[voting], groups[voting], next_ids[voting]
        if not len(followers):
            break
        # One candidate = one group and next token. Stable: each candidate's first member is its earliest.
        order = np.argsort(groups * vocab_size + next_ids, kind="stable")
        candidates = (groups * vocab_size + next_ids)[order]
        first = np.flatnonzero(np.concatenate(([True], candidates[1:] != candidates[:-1])))
        votes = np.diff(np.concatenate((first, [len(candidates)])))
        earliest, voters = followers[order[first]], groups[order[first]]
        ranking = np.lexsort((earliest, -votes, voters))
        best = ranking[np.concatenate(([True], voters[ranking[1:]] != voters[ranking[:-1]]))]
        elected[voters[best]] = earliest[best]
        stays = np.zeros(len(first), dtype=bool)
        stays[best] = True
        kept = np.sort(order[np.repeat(stays, votes)])
        followers, groups = followers[kept], groups[kept]
    return elected


@way("past-responses", needs=("past",))
def _past_responses(parts: Parts) -> Drafter:
    return PastResponses(parts.past)
