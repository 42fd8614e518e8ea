"""How much of a text repeats itself, and whether the target loops: acceptance on a loop is high and says little.

Shapes: N responses, L tokens of all prompts and responses one after the other, T tokens of one response.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pydantic import Field

from speculative.explain.slices import SlicedText
from speculative.measure.record import Record, Text
from speculative.measure.token_scores import StoredText

# So many tokens in a row hardly stand twice by chance; a line of code has about as many.
REPEATED_NGRAM = 8
# A loop comes back after at most so many tokens (a few lines), has come back twice, and for so many tokens at least: rows
# of a table and a line that was copied once are none.
LONGEST_PERIOD = 64
LOOPED_PERIODS = 2
FEWEST_LOOPED = 16
# Share of looping tokens above which the text is no measure of a draft.
WORRYING_LOOPING = 0.1


class Repeats(NamedTuple):
    """Tokens (N,) of each response: in all, inside an n-gram that stood earlier in its prompt or itself, and looping."""

    tokens_N: np.ndarray
    repeated_N: np.ndarray
    looping_N: np.ndarray


def repeats(texts: Sequence[StoredText], ngram: int = REPEATED_NGRAM) -> Repeats:
    """What repeats in each response.

    Repeated: inside `ngram` tokens in a row that begin earlier in prompt and response too. Looping: in a stretch that
    repeats with a period p of at most `LONGEST_PERIOD` tokens, x[t] == x[t - p], for two more periods and at least 16
    tokens of the response; the first period is not counted. Time is proportional to the tokens (and its logarithm).
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
        same_L[period:-1] = (
            (ids_L[period:] == ids_L[:-period]) & (text_L[period:] == text_L[:-period]) & said_L[period:]
        )
        # A stretch in one text and one in the next are parted: the next begins with its prompt, or has nothing before it.
        edges = np.flatnonzero(np.diff(same_L, prepend=False))
        begins, ends = edges[::2], edges[1::2]
        long = ends - begins >= max(LOOPED_PERIODS * period, FEWEST_LOOPED)
        for begin, end in zip(begins[long].tolist(), ends[long].tolist(), strict=True):
            marked_L[begin:end] = True
    return marked_L


class RepetitionShares(Record):
    """How much of some text repeats itself."""

    repeated: float = Field(description="share of tokens inside 8 in a row that stood earlier in prompt or response")
    looping: float = Field(
        description="share of tokens in a stretch that goes on repeating its last 1 to 64 tokens, twice more and for 16 at least"
    )
    tokens: int | None = Field(None, description="of the text")


class Repetition(RepetitionShares):
    """How much of the target's own text repeats itself: acceptance on a loop says little."""

    by_domain: dict[str, RepetitionShares] = Field({}, description="the same by domain")
    warning: Text | None = Field(None, description="where more than 10 % loops")


def repetition(texts: Sequence[SlicedText]) -> Repetition:
    """How much of these responses repeats."""
    found = repeats(texts)
    rows_by_domain: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        rows_by_domain.setdefault(text.domain, []).append(row)
    whole = _shares(found, list(range(len(texts))))
    by_domain = {name: _shares(found, rows) for name, rows in rows_by_domain.items()}
    warning = (
        f"{100 * whole.looping:.0f} % of the target's tokens repeat what it has just said, in a loop: acceptance on such text "
        "says little; sample (serving.temperature), or take a better target"
    )
    worrying = whole.looping > WORRYING_LOOPING
    return Repetition(**whole.record(), by_domain=by_domain, warning=warning if worrying else None)


def _shares(found: Repeats, rows: list[int]) -> RepetitionShares:
    tokens, repeated, looping = (int(counts_N[rows].sum()) for counts_N in found)
    return RepetitionShares(repeated=repeated / max(1, tokens), looping=looping / max(1, tokens), tokens=tokens)
