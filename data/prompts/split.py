"""Find equal prompts and split prompts into training and held-out, by content only, never by position.

The id of a prompt is the hash of its content, so adding, removing or shuffling rows does not move other rows.
"""

import hashlib
import heapq
import json
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence

from data.prompts.prompt import PromptRow
from speculative.errors import UserError

HASH_DIGITS = 16
# A first question of more than this many rows and this share of rows is treated as an instruction, not as a question.
COMMON_LEAST, COMMON_SHARE = 16, 0.05
# Punctuation that is kept, because in code and maths "C#", "@x", "3 - 2" and "3 / 2" are not "C", "x" and "3 2".
MEANINGFUL = frozenset("#%&*@\\/_-")


def content_hash(row: PromptRow) -> str:
    """The id of a prompt: 16 hex digits of the SHA-256 of its exact text or messages and tools; kept if it was rendered earlier."""
    return row.prompt_id or _with_tools(row, row.text if row.text is not None else _canonical(row.messages))


def normalised_hash(row: PromptRow) -> str:
    """Like `content_hash`, but ignores case, width, spacing and punctuation, to find near-equal prompts.

    Punctuation is removed only at the edges of words, because inside, as in ``3.5`` or ``f(a,b)``, it carries meaning.
    ``MEANINGFUL`` signs are kept. A text and a conversation with that text as its only user turn are equal.
    """
    if row.text is not None:
        return _with_tools(row, _normalised(row.text))
    turns = [{**turn, "content": _normalised(turn["content"])} for turn in row.messages or ()]
    if len(turns) == 1 and turns[0]["role"] == "user" and set(turns[0]) == {"role", "content"}:
        return _with_tools(row, turns[0]["content"])
    return _with_tools(row, _canonical(turns))


def split_groups(rows: Sequence[PromptRow], normalised: bool = False) -> list[str]:
    """The group of each row. Rows of a group must be on the same side of a split.

    A group is the first question of a conversation, whatever the system message; with ``normalised`` near-equal questions are one
    group. If very many rows share a question, it is an instruction and the system message holds the content, so then the system
    message is part of the group too. Adding a row therefore changes no other group, unless it makes a question that common.
    """
    say = _normalised if normalised else str
    openings = [[say(str(turn["content"])) for turn in _opening(row)] for row in rows]
    counts, limit = Counter(turns[-1] for turns in openings), max(COMMON_LEAST, int(COMMON_SHARE * len(rows)))
    return [
        _digest(turns[-1] if len(turns) == 1 or counts[turns[-1]] <= limit else _canonical(turns)) for turns in openings
    ]


def deduplicate(rows: Sequence[PromptRow]) -> tuple[list[PromptRow], int]:
    """(rows without exact and near-equal repeats, in order, the first of each kept; number of repeats).

    Prompts that were rendered earlier are compared by id. UserError if several rows all have the same prompt.
    """
    seen: set[str] = set()
    unique: list[PromptRow] = []
    for row in rows:
        # The program that rendered a prompt chose how often a question may occur.
        keys = {content_hash(row), row.prompt_id or normalised_hash(row)}
        if seen.isdisjoint(keys):
            unique.append(row)
        seen |= keys
    if len(unique) == 1 and len(rows) > 1:
        raise UserError(
            f"all prompts are duplicates: {len(rows)} rows, 1 unique (first at {rows[0].origin}); check which column "
            "is mapped to the prompt"
        )
    return unique, len(rows) - len(unique)


def held_out(prompt_ids: Sequence[str], heldout_count: int, groups: Sequence[str] | None = None) -> list[int]:
    """Numbers of the held-out prompts, chosen by id. The held-out prompts of a smaller count come first.

    ``heldout_count`` is at least 1 and less than all. A larger count holds out more prompts, never others, and a new prompt
    replaces at most one group. The ids are distinct (``deduplicate``); near-equal prompts may be on both sides. ``groups`` (see
    `split_groups`; default: each prompt is its own group) stay on one side, so a few more prompts may be held out.

    Raises UserError: all prompts would be held out.
    """
    if groups is None:
        groups = prompt_ids
    positions = [(_position(group), prompt_id) for group, prompt_id in zip(groups, prompt_ids, strict=True)]
    numbers = heapq.nsmallest(heldout_count, range(len(positions)), key=positions.__getitem__)
    last, first = groups[numbers[-1]], set(numbers)
    rest = [number for number, group in enumerate(groups) if group == last and number not in first]
    numbers += sorted(rest, key=positions.__getitem__)
    if len(numbers) == len(prompt_ids):
        raise UserError(
            f"all {len(numbers)} prompts would be held out: they start with only {len(set(groups))} questions, and prompts with the same "
            "question stay together; give more prompts, lower data.heldout_count, or set data.heldout"
        )
    return numbers


def remove_overlap(train: Sequence[PromptRow], heldout: Sequence[PromptRow]) -> tuple[list[PromptRow], int]:
    """(training prompts whose group, see `split_groups`, is not held out; number of removed ones). UserError if none is left."""
    groups = split_groups([*heldout, *train], normalised=True)
    held = set(groups[: len(heldout)])
    rows = [row for row, group in zip(train, groups[len(heldout) :], strict=True) if group not in held]
    if train and not rows:
        raise UserError(
            f"all {len(train)} training prompts are also held out (first at {train[0].origin}); give two "
            "different sources, or one source and a held-out share"
        )
    return rows, len(train) - len(rows)


def _opening(row: PromptRow) -> Sequence[Mapping[str, object]]:
    """Turns of a conversation up to the first user turn; a text is one user turn."""
    turns = row.messages or ({"role": "user", "content": row.text},)
    return turns[: 1 + next((number for number, turn in enumerate(turns) if turn["role"] == "user"), 0)]


def _with_tools(row: PromptRow, content: str) -> str:
    return _digest(content if row.tools is None else content + _canonical(row.tools))


def _digest(content: str) -> str:
    # JSON may contain lone surrogates, which strict UTF-8 refuses.
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:HASH_DIGITS]


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)


def _position(prompt_id: str) -> str:
    """A prompt's place among all prompts, uniform over them, as hex digits."""
    # Hashed once more, so that the first ids in order have no more held-out rows than by chance.
    return hashlib.sha256(b"split:" + prompt_id.encode()).hexdigest()[:13]


def _normalised(text: str) -> str:
    # Casefolding can undo the normal form, so normalise twice.
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    # All Unicode punctuation except MEANINGFUL.
    droppable = (sign for sign in set(folded) if sign not in MEANINGFUL and unicodedata.category(sign).startswith("P"))
    dropped = "".join(droppable)
    words = [word.strip(dropped) for word in folded.split()]
    # A prompt of only punctuation keeps it, otherwise all such prompts would be equal.
    return " ".join(word for word in words if word) or " ".join(folded.split())
