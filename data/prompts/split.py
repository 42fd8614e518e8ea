"""Which prompts are the same, and which side of the split each is on: by content alone, never by position.

A prompt's id is the hash of its content, so adding, removing or shuffling rows moves no other row.
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
# A first turn of so many rows, and of this share of them, is no question of its own.
COMMON_LEAST, COMMON_SHARE = 16, 0.05
# Punctuation that is never dropped: in code and maths "C#", "@x", "3 - 2" and "3 / 2" are not "C", "x" and "3 2".
MEANINGFUL = frozenset("#%&*@\\/_-")


def content_hash(row: PromptRow) -> str:
    """16 hex digits of the SHA-256 of the exact prompt (text, or canonical JSON of the messages, and tools): the prompt's id.

    Of a prompt that was rendered before, the id that it was given then.
    """
    return row.prompt_id or _with_tools(row, row.text if row.text is not None else _canonical(row.messages))


def normalised_hash(row: PromptRow) -> str:
    """The same for what a reader would call the same prompt: case, width, spacing and punctuation aside.

    Punctuation is dropped at the edges of words only (inside, as in ``3.5`` or ``f(a,b)``, it carries the meaning of
    maths and code), and ``MEANINGFUL`` signs never. A text and a conversation of that one user turn count as the
    same prompt.
    """
    if row.text is not None:
        return _with_tools(row, _normalised(row.text))
    turns = [{**turn, "content": _normalised(turn["content"])} for turn in row.messages or ()]
    if len(turns) == 1 and turns[0]["role"] == "user" and set(turns[0]) == {"role", "content"}:
        return _with_tools(row, turns[0]["content"])
    return _with_tools(row, _canonical(turns))


def split_groups(rows: Sequence[PromptRow], normalised: bool = False) -> list[str]:
    """For each row what it shares with those that must be on its side of a split: all turns of a conversation, and the same
    first question under any system message; with ``normalised`` a near-equal one too.

    A question that very many rows share is an instruction whose matter stands in the system message: rows that have one are
    together where they have this in common too. So another row changes no group but that of rows which ask such a question under
    a system message, and only when it makes the question one of these, or no longer one.
    """
    say = _normalised if normalised else str
    openings = [[say(str(turn["content"])) for turn in _opening(row)] for row in rows]
    counts, limit = Counter(turns[-1] for turns in openings), max(COMMON_LEAST, int(COMMON_SHARE * len(rows)))
    return [
        _digest(turns[-1] if len(turns) == 1 or counts[turns[-1]] <= limit else _canonical(turns)) for turns in openings
    ]


def deduplicate(rows: Sequence[PromptRow]) -> tuple[list[PromptRow], int]:
    """(the rows without exact and normalised repeats, in order, the first of each kept; how many rows repeat another one).

    One that was rendered before repeats by its id.

    Raises:
        UserError: several rows that are all one prompt.
    """
    exact_seen: set[str] = set()
    normalised_seen: set[str] = set()
    kept: list[PromptRow] = []
    for row in rows:
        exact_key = content_hash(row)
        # Whoever rendered it has chosen how often a question may come.
        normalised_key = row.prompt_id or normalised_hash(row)
        if exact_key not in exact_seen and normalised_key not in normalised_seen:
            kept.append(row)
        exact_seen.add(exact_key)
        normalised_seen.add(normalised_key)
    if len(kept) == 1 and len(rows) > 1:
        raise UserError(
            f"all prompts are duplicates: {len(rows)} rows, 1 unique (first at {rows[0].origin}): check which column "
            "is mapped to the prompt"
        )
    return kept, len(rows) - len(kept)


def held_out(prompt_ids: Sequence[str], heldout_count: int, groups: Sequence[str] | None = None) -> list[int]:
    """Numbers of the prompts that are held out, decided by each one's id: those that a smaller count holds out come first.

    ``heldout_count`` is at least 1 and less than all. A larger one holds out more, never others, and a new prompt takes the place
    of one group of them at most. The ids are distinct (``deduplicate``); near-equal prompts may be on two sides. ``groups`` (see
    `split_groups`; by default each prompt is its own): who shares one is on one side, so that a few more may be held out.

    Raises:
        UserError: all would be held out.
    """
    if groups is None:
        groups = prompt_ids
    positions = [(_position(group), prompt_id) for group, prompt_id in zip(groups, prompt_ids, strict=True)]
    found = heapq.nsmallest(heldout_count, range(len(positions)), key=positions.__getitem__)
    last, first = groups[found[-1]], set(found)
    rest = [number for number, group in enumerate(groups) if group == last and number not in first]
    found += sorted(rest, key=positions.__getitem__)
    if len(found) == len(prompt_ids):
        raise UserError(
            f"all {len(found)} prompts would be held out: they begin with {len(set(groups))} questions, and who asks the same is on "
            "one side; give more prompts, lower data.heldout_count, or name data.heldout"
        )
    return found


def remove_overlap(train: Sequence[PromptRow], heldout: Sequence[PromptRow]) -> tuple[list[PromptRow], int]:
    """(train without the prompts whose question, see `split_groups`, heldout has after normalisation, how many were removed).

    Raises:
        UserError: nothing is left to train on.
    """
    groups = split_groups([*heldout, *train], normalised=True)
    held = set(groups[: len(heldout)])
    kept = [row for row, group in zip(train, groups[len(heldout) :], strict=True) if group not in held]
    if train and not kept:
        raise UserError(
            f"all {len(train)} training prompts are in the held-out set too (first at {train[0].origin}): give two "
            "different sources, or one source and a held-out share"
        )
    return kept, len(train) - len(kept)


def _opening(row: PromptRow) -> Sequence[Mapping[str, object]]:
    """A conversation's turns up to the first of the user; a text is one."""
    turns = row.messages or ({"role": "user", "content": row.text},)
    return turns[: 1 + next((number for number, turn in enumerate(turns) if turn["role"] == "user"), 0)]


def _with_tools(row: PromptRow, content: str) -> str:
    return _digest(content if row.tools is None else content + _canonical(row.tools))


def _digest(content: str) -> str:
    # JSON may bring lone surrogates, which UTF-8 proper refuses.
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:HASH_DIGITS]


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)


def _position(prompt_id: str) -> str:
    """A prompt's place among all prompts, uniform over them, as hex digits."""
    # Hashed once more, so that the first ids in order have no more held-out rows than by chance.
    return hashlib.sha256(b"split:" + prompt_id.encode()).hexdigest()[:13]


def _normalised(text: str) -> str:
    # Casefolding can undo the normal form: hence twice.
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    # All of Unicode's punctuation but the meaningful.
    droppable = (sign for sign in set(folded) if sign not in MEANINGFUL and unicodedata.category(sign).startswith("P"))
    dropped = "".join(droppable)
    words = [word.strip(dropped) for word in folded.split()]
    # A prompt of punctuation only is its punctuation, else all such would be one.
    return " ".join(word for word in words if word) or " ".join(folded.split())
