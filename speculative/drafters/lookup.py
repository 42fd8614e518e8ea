"""Drafters without weights or training: prompt lookup (what followed the row's last tokens earlier in its text), and a pool of
the target's own predictions (after lookahead decoding, 2402.02057).

Shapes: R rows, G drafted tokens (at most gamma), G1 = G + 1, C columns of the token buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from speculative.drafters.drafter import Ask, Drafter, Plan, Proposal, Seats
from speculative.drafters.registry import Parts, way
from speculative.errors import UserError


def one_hot_proposal(chains: Sequence[Sequence[int]], gamma: int, device: torch.device) -> Proposal:
    """A proposal from one chain of at most `gamma` ids per row; a row without a guess has an empty chain."""
    counts_R = np.array([len(chain) for chain in chains], dtype=np.int64)
    ids_RG = np.zeros((len(chains), proposal_width(counts_R, gamma, device)), dtype=np.int64)
    for row, chain in enumerate(chains):
        if chain:
            ids_RG[row, : len(chain)] = chain
    return Proposal(torch.from_numpy(ids_RG).to(device), counts_R=counts_R)


def proposal_width(counts_R: np.ndarray, gamma: int, device: torch.device) -> int:
    """Number of columns of a proposal whose rows hold `counts_R` ids: 0 if no row found any."""
    longest = int(counts_R.max(initial=0))
    # An accelerator verifies gamma tokens in the time of one, and each other width would need another recorded graph.
    return longest if device.type == "cpu" or longest == 0 else gamma


def check_ngrams(min_ngram: int, max_ngram: int) -> None:
    """Raises UserError unless 1 <= min_ngram <= max_ngram."""
    if not 1 <= min_ngram <= max_ngram:
        raise UserError(f"min_ngram = {min_ngram}, max_ngram = {max_ngram}: must be 1 <= min_ngram <= max_ngram")


class Row(Protocol):
    """State of a drafter for one row."""

    def chain(self, text_C: np.ndarray, gamma: int) -> Sequence[int]:
        """At most gamma ids to propose after the committed text."""


R = TypeVar("R", bound=Row)


class RowDrafter(Drafter, Generic[R]):
    """Proposes for each row from the state of that row alone, because a response must not depend on the other rows."""

    def __init__(self, fresh: Callable[[], R]):
        self._fresh = fresh
        self._device = torch.device("cpu")
        self._rows: list[R] = []

    def start(self, seats: Seats) -> None:
        self._device = seats.target.device
        self._rows = [self._fresh() for _ in range(seats.rows)]

    def admit(self, rows: list[int], tokens_RC: np.ndarray, lengths_R: np.ndarray) -> None:
        for row in rows:
            self._rows[row] = self._fresh()

    def propose(self, ask: Ask) -> Proposal:
        chains: list[Sequence[int]] = [()] * len(self._rows)
        if ask.gamma > 0:
            lengths = ask.lengths_R.tolist()
            for row in np.flatnonzero(ask.active_R).tolist():
                chains[row] = self._rows[row].chain(ask.tokens_RC[row, : lengths[row]], ask.gamma)
        return one_hot_proposal(chains, ask.gamma, self._device)

    def keep(self, rows: list[int]) -> None:
        self._rows = [self._rows[row] for row in rows]


class PromptLookup(RowDrafter["RowIndex"]):
    """Proposes what followed the longest n-gram that ends the text now, at its latest earlier occurrence.

    The latest, because a text repeats recent text (a loop, a variable in scope) more than its beginning: 2 % to 6 % more tokens per block
    than with the first occurrence on greedy code and sampled arithmetic at gamma 5. The index also needs only one entry per n-gram.

    A continuation that reaches the end of the text continues with its own tokens, like an overlapping copy in LZ77. So a row finds gamma
    tokens or none.
    """

    name = "prompt lookup"
    source_names: tuple[str, ...] = ("lookup",)

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1):
        """n-grams of `min_ngram` to `max_ngram` tokens, the longest first. Raises UserError for an empty range."""
        check_ngrams(min_ngram, max_ngram)
        super().__init__(lambda: RowIndex(min_ngram, max_ngram))
        self.ngrams = max_ngram, min_ngram

    def plan(self) -> Plan | None:
        return Plan(self.ngrams) if type(self) is PromptLookup else None

    def admit(self, rows: list[int], tokens_RC: np.ndarray, lengths_R: np.ndarray) -> None:
        super().admit(rows, tokens_RC, lengths_R)
        for row in rows:
            self._rows[row].read(tokens_RC[row, : lengths_R[row]].tolist())


class RowIndex:
    """One row's text and, for every n-gram in it that something follows, the latest position of what follows."""

    def __init__(self, min_ngram: int, max_ngram: int):
        self.text: list[int] = []
        self._followers: list[tuple[int, dict[tuple[int, ...], int]]] = [
            (size, {}) for size in range(max_ngram, min_ngram - 1, -1)
        ]

    def read(self, ids: list[int]) -> None:
        """Append committed tokens, at a cost proportional to their number."""
        before = len(self.text)
        self.text += ids
        stop = len(self.text)
        for size, followers in self._followers:
            # An n-gram is added with the token that follows it, so the n-gram at the end of the text never finds itself.
            first = max(before, size)
            if first >= stop:
                continue
            columns = [self.text[first - size + place : stop - size + place] for place in range(size)]
            followers.update(zip(zip(*columns, strict=True), range(first, stop), strict=True))

    def chain(self, text_C: np.ndarray, gamma: int) -> list[int]:
        self.read(text_C[len(self.text) :].tolist())
        return self.continuation(gamma)

    def continuation(self, gamma: int) -> list[int]:
        """The tokens that followed the longest n-gram at the end of the text; empty if none occurred before."""
        for size, followers in self._followers:
            start = followers.get(tuple(self.text[-size:]))
            if start is not None:
                chain = self.text[start : start + gamma]
                period = len(self.text) - start
                while len(chain) < gamma:
                    chain.append(chain[-period])
                return chain
        return []


@way("prompt-lookup", looks_up=True)
def _prompt_lookup(parts: Parts) -> Drafter:
    return PromptLookup(*(parts.ngrams or ()))


class Lookahead(RowDrafter["_RowPool"]):
    """Proposes n-grams of the target's own predictions, pooled per row by their first token. Nothing is trained.

    Each verify call also predicts tokens after its first rejection. A token fed there and the prediction after it are one step of a Jacobi
    iteration: a likely pair, though not at this position. If the next fed token equals the prediction, the n-gram continues. The latest
    n-gram of a token replaces the former one. N-grams of neighbouring predictions, whatever was fed between them, are useless (1.10 tokens
    a block at gamma 5 on greedy code, compared with 2.27). If the pool has no entry, the row's last predictions for these positions are
    fed again, then tokens of its prompt: rarely accepted, but they fill the pool (1.98 tokens a block without them).
    """

    name = "lookahead pool"
    source_names: tuple[str, ...] = ("lookahead",)
    observes = True

    def __init__(self, ngram: int = 4):
        """`ngram`: tokens of a pooled n-gram, its key included. Raises UserError for one without a continuation."""
        if ngram < 2:
            raise UserError(f"ngram = {ngram}: must be at least 2 (a token and the one that follows it)")
        super().__init__(_RowPool)
        self.ngram = ngram
        self._active_R = np.zeros(0, dtype=bool)

    def propose(self, ask: Ask) -> Proposal:
        self._active_R = ask.active_R.copy()
        return super().propose(ask)

    def observe(self, fed_ids_RG1: np.ndarray, predicted_ids_RG1: np.ndarray, accepted_R: np.ndarray) -> None:
        fed, predicted, accepted = fed_ids_RG1.tolist(), predicted_ids_RG1.tolist(), accepted_R.tolist()
        for row in np.flatnonzero(self._active_R).tolist():
            self._rows[row].learn(fed[row], predicted[row], self.ngram)
            self._rows[row].guesses = predicted[row][accepted[row] + 1 :]


class _RowPool:
    """N-grams of one row by their first token, and its last predictions after the committed text."""

    def __init__(self) -> None:
        self.followers: dict[int, tuple[int, ...]] = {}
        self.guesses: list[int] = []

    def learn(self, fed: list[int], predicted: list[int], ngram: int) -> None:
        chain: tuple[int, ...] = ()
        chains: list[tuple[int, ...]] = []
        for place in range(len(fed) - 1, -1, -1):
            follows = place + 1 < len(fed) and fed[place + 1] == predicted[place]
            chain = (predicted[place], *(chain[: ngram - 2] if follows else ()))
            chains.append(chain)
        # In order of the text: of a token fed twice the later n-gram stays.
        self.followers.update(zip(fed, reversed(chains), strict=True))

    def chain(self, text_C: np.ndarray, gamma: int) -> list[int]:
        chain: list[int] = []
        last = int(text_C[-1])
        while len(chain) < gamma:
            place = len(chain)
            known = self.followers.get(last)
            if known is not None:
                chain += known
            elif place < len(self.guesses):
                chain.append(self.guesses[place])
            else:
                chain.append(int(text_C[place % len(text_C)]))
            last = chain[-1]
        return chain[:gamma]


@way("lookahead", served=False, replayed=False)
def _lookahead(parts: Parts) -> Drafter:
    return Lookahead()
