"""Which prompts are the same, and which side of the split each is on: by content alone, never by position.

A prompt's id is the hash of its content, so adding, removing or shuffling rows moves no other row.
"""

import functools
import hashlib
import heapq
import json
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from data.prompts.prompt import PromptRow
from speculative.errors import UserError

HASH_DIGITS = 16
# Punctuation that is never dropped: in code and maths "C#", "@x", "3 - 2" and "3 / 2" are not "C", "x" and "3 2".
MEANINGFUL = frozenset("#%&*@\\/_-")


@dataclass(frozen=True)
class DuplicateReport:
    """Counts of rows: those given, exact repeats, repeats after normalisation, those kept. The three add up."""

    rows: int
    exact: int
    normalised: int
    kept: int


def content_hash(row: PromptRow) -> str:
    """16 hex digits of the SHA-256 of the exact prompt (text, or canonical JSON of the messages): the prompt's id."""
    return _digest(row.text if row.text is not None else _canonical(row.messages))


def normalised_hash(row: PromptRow) -> str:
    """The same for what a reader would call the same prompt: case, width, spacing and punctuation aside.

    Punctuation is dropped at the edges of words only (inside, as in ``3.5`` or ``f(a,b)``, it carries the meaning of
    maths and code), and ``MEANINGFUL`` signs never. A text and a conversation of that one user turn count as the
    same prompt.
    """
    if row.text is not None:
        return _digest(_normalised(row.text))
    turns = [{**turn, "content": _normalised(turn["content"])} for turn in row.messages or ()]
    if len(turns) == 1 and turns[0]["role"] == "user" and set(turns[0]) == {"role", "content"}:
        return _digest(turns[0]["content"])
    return _digest(_canonical(turns))


def deduplicate(rows: Sequence[PromptRow]) -> tuple[list[PromptRow], DuplicateReport]:
    """The rows without exact and normalised repeats, in order, the first of each kept.

    Raises:
        UserError: no rows, or several rows that are all one prompt.
    """
    if not rows:
        raise UserError("the dataset is empty: give a source with at least one prompt")
    exact_seen: set[str] = set()
    normalised_seen: set[str] = set()
    kept: list[PromptRow] = []
    exact = normalised = 0
    for row in rows:
        exact_key, normalised_key = content_hash(row), normalised_hash(row)
        if exact_key in exact_seen:
            exact += 1
        elif normalised_key in normalised_seen:
            normalised += 1
        else:
            kept.append(row)
        exact_seen.add(exact_key)
        normalised_seen.add(normalised_key)
    if len(kept) == 1 and len(rows) > 1:
        raise UserError(
            f"all prompts are duplicates: {len(rows)} rows, 1 unique (first at {rows[0].origin}): check which column "
            "is mapped to the prompt"
        )
    return kept, DuplicateReport(len(rows), exact, normalised, len(kept))


def held_out(prompt_ids: Sequence[str], heldout_count: int) -> list[int]:
    """Numbers of the prompts that are held out, decided by each one's id: those that a smaller count holds out come first.

    A larger count holds out more, never others, and a new prompt takes the place of one of them at most. The ids are
    distinct (``deduplicate``); near-equal prompts may be on two sides.

    Raises:
        UserError: no prompts, or a side that would stay empty.
    """
    if not len(prompt_ids):
        raise UserError("the dataset is empty: give a source with at least one prompt")
    if len(prompt_ids) < 2:
        raise UserError("1 different prompts: two are needed for a held-out set, give more prompts")
    if not 0 < heldout_count < len(prompt_ids):
        raise UserError(
            f"heldout_count is {heldout_count} of {len(prompt_ids)} different prompts: give 1 to {len(prompt_ids) - 1}, so "
            "that both sides have some"
        )
    positions = [_position(prompt_id) for prompt_id in prompt_ids]
    return heapq.nsmallest(heldout_count, range(len(positions)), key=positions.__getitem__)


def remove_overlap(train: Sequence[PromptRow], heldout: Sequence[PromptRow]) -> tuple[list[PromptRow], int]:
    """(train without the prompts that are in heldout after normalisation, how many were removed).

    Raises:
        UserError: nothing is left to train on.
    """
    held = {normalised_hash(row) for row in heldout}
    kept = [row for row in train if normalised_hash(row) not in held]
    if train and not kept:
        raise UserError(
            f"all {len(train)} training prompts are in the held-out set too (first at {train[0].origin}): give two "
            "different sources, or one source and a held-out share"
        )
    return kept, len(train) - len(kept)


def _digest(content: str) -> str:
    # JSON may bring lone surrogates, which UTF-8 proper refuses.
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:HASH_DIGITS]


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)


def _position(prompt_id: str) -> str:
    """A prompt's place among all prompts, uniform over them, as hex digits."""
    # Hashed once more: whoever takes the first ids in order gets no more held-out rows than by chance.
    return hashlib.sha256(b"split:" + prompt_id.encode()).hexdigest()[:13]


def _normalised(text: str) -> str:
    # Casefolding can undo the normal form: hence twice.
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    words = [word.strip(_droppable()) for word in folded.split()]
    # A prompt of punctuation only is its punctuation, else all such would be one.
    return " ".join(word for word in words if word) or " ".join(folded.split())


@functools.cache
def _droppable() -> str:
    """All of Unicode's punctuation but the meaningful."""
    punctuation = (chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)).startswith("P"))
    return "".join(character for character in punctuation if character not in MEANINGFUL)
