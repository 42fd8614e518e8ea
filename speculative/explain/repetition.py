"""How much of a text repeats itself, and whether the target loops. Acceptance on a loop is high and not meaningful.

Shapes: N responses, L tokens of all prompts and responses one after the other, T tokens of one response.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pydantic import Field

from speculative.explain.slices import SlicedText
from speculative.measure.record import Record, Text
from speculative.measure.token_scores import StoredText

# This many equal tokens in a row are hardly ever chance; a line of code is about as long.
REPEATED_NGRAM = 8
# A loop has a period of at most 64 tokens (a few lines), repeats at least twice and lasts at least 16 tokens. Rows of a table and a
# line copied once are not loops.
LONGEST_PERIOD = 64
LOOPED_PERIODS = 2
FEWEST_LOOPED = 16
# Above this share of looping tokens the text is a poor measure of a draft.
WORRYING_LOOPING = 0.1


class Repeats(NamedTuple):
    """Tokens (N,) of each response: all, those inside an n-gram that occurred earlier in prompt or response, and looping ones."""

    tokens_N: np.ndarray
    repeated_N: np.ndarray
    looping_N: np.ndarray


def repeats(texts: Sequence[StoredText], ngram: int = REPEATED_NGRAM) -> Repeats:
    """Count the repeated and looping tokens of each response. Repeated: inside a sequence of `ngram` tokens that also occurs earlier in
    prompt or response. Looping: in a stretch that repeats with a period p of at most `LONGEST_PERIOD` tokens, x[t] == x[t - p], for two
    more periods and at least 16 tokens of the response; the first period is not counted.
    """
    # All texts one after the other: token, whose it is, and whether it is of the response.
    parts = [np.asarray([*text.prompt_ids, *text.response_ids], dtype=np.int64) for text in texts]
    ids_L = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
    text_L = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    said = [np.arange(len(part)) >= len(text.prompt_ids) for part, text in zip(parts, texts, strict=True)]
    said_L = np.concatenate([np.zeros(0, dtype=bool), *said])
    marked = (np.ones_like(said_L), _repeated(ids_L, text_L, ngram), _looping(ids_L, text_L, said_L))
    return Repeats(*(np.bincount(text_L[marked_L & said_L], minlength=len(texts)) for marked_L in marked))


def _repeated(ids_L: np.ndarray, text_L: np.ndarray, ngram: int) -> np.ndarray:
    marked_L = np.zeros(len(ids_L), dtype=bool)
    if len(ids_L) < ngram:
        return marked_L
    # n-grams of one text that are the same get one number: that of the n-gram one token shorter, and the next token.
    ids_L = np.unique(ids_L, return_inverse=True)[1]
    kinds = int(ids_L.max()) + 1
    number_L = text_L * kinds + ids_L
    for size in range(1, ngram):
        number_L = np.unique(number_L, return_inverse=True)[1][:-1] * kinds + ids_L[size:]
    _, first, number_L = np.unique(number_L, return_index=True, return_inverse=True)
    starts = np.arange(len(number_L))
    # An n-gram that runs on into the next text is none.
    again_L = (first[number_L] < starts) & (text_L[ngram - 1 :] == text_L[: len(starts)])
    for place in range(ngram):
        marked_L[place : place + len(starts)] |= again_L
    return marked_L


def _looping(ids_L: np.ndarray, text_L: np.ndarray, said_L: np.ndarray) -> np.ndarray:
    marked_L = np.zeros(len(ids_L), dtype=bool)
    for period in range(1, min(LONGEST_PERIOD, len(ids_L) - 1) + 1):
        same_L = np.zeros(len(ids_L) + 1, dtype=bool)
        same_L[period:-1] = (ids_L[period:] == ids_L[:-period]) & said_L[period:]
        same_L[period:-1] &= text_L[period:] == text_L[:-period]
        # A stretch in one text and one in the next are parted: the next begins with its prompt, or has nothing before it.
        edges = np.flatnonzero(np.diff(same_L, prepend=False))
        begins, ends = edges[::2], edges[1::2]
        long = ends - begins >= max(LOOPED_PERIODS * period, FEWEST_LOOPED)
        for begin, end in zip(begins[long].tolist(), ends[long].tolist(), strict=True):
            marked_L[begin:end] = True
    return marked_L


class RepetitionShares(Record):
    """How much of some text repeats itself."""

    repeated: float = Field(description="share of tokens in a sequence of 8 that occurred before in prompt or response")
    looping: float = Field(
        description="share of tokens in a loop: a period of 1 to 64 tokens, repeated at least twice and for at least 16 tokens"
    )
    tokens: int | None = Field(None, description="tokens of the text")


class Repetition(RepetitionShares):
    """How much of the target's own text repeats itself. Acceptance on a loop is not meaningful."""

    by_domain: dict[str, RepetitionShares] = Field({}, description="the same by domain")
    warning: Text | None = Field(None, description="warning if more than 10 % of the tokens are in a loop")


def repetition(texts: Sequence[SlicedText]) -> Repetition:
    """Shares of repeated and looping tokens of these responses."""
    counts = repeats(texts)
    rows_by_domain: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        rows_by_domain.setdefault(text.domain, []).append(row)
    whole = _shares(counts, list(range(len(texts))))
    by_domain = {name: _shares(counts, rows) for name, rows in rows_by_domain.items()}
    warning = (
        f"{100 * whole.looping:.0f} % of the target's tokens are in a loop, and acceptance on such text is not meaningful: "
        "sample (serving.temperature), or use a better target"
    )
    worrying = whole.looping > WORRYING_LOOPING
    return Repetition(**whole.record(), by_domain=by_domain, warning=warning if worrying else None)


def _shares(found: Repeats, rows: list[int]) -> RepetitionShares:
    tokens, repeated, looping = (int(counts_N[rows].sum()) for counts_N in found)
    return RepetitionShares(repeated=repeated / max(1, tokens), looping=looping / max(1, tokens), tokens=tokens)
