"""Selects the requests of a log to train on and to hold out: pure functions of the records.

Shapes: N records in order of time. A *group* is a number shared by requests that must be on the same side of the split: nearly equal
prompts (see `data/prompts/split.py`), one conversation, and prompts that continue another request's response.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from data.prompts.prompt import PromptRow
from data.prompts.split import normalised_hash
from distill.live.traffic.record import TrafficRecord

CONTINUED = 8  # tokens of a response that a prompt must contain to continue it
MOST_ALIKE = 8  # near-equal prompts, and prompts of one conversation
LATEST = 5  # held-out requests come from the last fifth at most


@dataclass(frozen=True)
class Wanted:
    """Conditions for a response that a run may train on. sampling: the run's temperature, top_k, top_p and min_p."""

    sampling: Mapping[str, float | int]
    target_versions: Collection[str]
    most_prompt_tokens: int
    vocab_rows: int


def fault_of(record: TrafficRecord, wanted: Wanted) -> str:
    """Why a response may not be trained on; empty if it may."""
    prompt_ids, response_ids = record.prompt_ids, record.response_ids
    if prompt_ids is None or response_ids is None:
        return "no text"
    if record.target_version not in wanted.target_versions:
        return f"another target version ({record.target_version})"
    if record.constrained:
        return "a constraint on the text"
    if record.finish not in ("stop", "length", "tool_calls"):
        return f"finish {record.finish}"
    if record.sampling is None:
        return "unknown sampling settings"
    if _settings(record.sampling) != _settings(wanted.sampling):
        return "other sampling settings"
    if not prompt_ids or not response_ids:
        return "empty"
    if max(*prompt_ids, *response_ids) >= wanted.vocab_rows:
        return "ids beyond the target's vocabulary"
    return "" if len(prompt_ids) <= wanted.most_prompt_tokens else "too long"


def _settings(sampling: Mapping[str, float | int | None]) -> tuple[float | None, ...]:
    """Comparable settings: at temperature 0 nothing else counts, and a top_k of -1 or 0 is off."""
    if sampling.get("temperature") == 0:
        return (0,)
    temperature, top_k, top_p, min_p = map(sampling.get, ("temperature", "top_k", "top_p", "min_p"))
    return temperature, None if top_k is None else max(0, top_k), top_p, min_p


def groups_of(records: Sequence[TrafficRecord], texts: Sequence[str]) -> list[int]:
    """Group (N) of each request; ``texts``: the decoded prompts."""
    parents = list(range(len(records)))

    def root(number: int) -> int:
        while parents[number] != number:
            parents[number] = number = parents[parents[number]]
        return number

    first: dict[str, int] = {}
    for number, (text, record) in enumerate(zip(texts, records, strict=True)):
        for shared in (near_hash(text), record.conversation):
            if shared is not None:
                parents[root(number)] = root(first.setdefault(shared, number))
    # In token order a prefix comes before its continuations; `opened` holds the prefixes of the current sequence.
    sequences = []
    for number, record in enumerate(records):
        prompt_ids, response_ids = record.prompt_ids or (), record.response_ids or ()
        sequences.append((prompt_ids, True, number))
        if len(response_ids) >= CONTINUED:
            sequences.append((prompt_ids + response_ids[:CONTINUED], False, number))
    opened: list[tuple[tuple[int, ...], int]] = []
    for ids, is_prompt, number in sorted(sequences):
        while opened and ids[: len(opened[-1][0])] != opened[-1][0]:
            opened.pop()
        if opened:
            parents[root(number)] = root(opened[-1][1])
        if not is_prompt:
            opened.append((ids, number))
    return [root(number) for number in range(len(records))]


def near_hash(text: str) -> str:
    """A hash that is equal for texts that differ only in case, spacing or punctuation."""
    return normalised_hash(PromptRow(text, None, None, "", ""))


def split_by_time(groups_N: Sequence[int], heldout: int, trained: Collection[int] = ()) -> tuple[list[int], list[int]]:
    """(numbers to train on, numbers held out): all of the first are older than all of the second, and no group is on both sides.

    Held out is the latest request of each of ``heldout`` groups, searched from the end within the last fifth; groups that did not occur
    before come first. The groups ``trained``, which a draft has learned, are never held out.
    """
    start = len(groups_N) - len(groups_N) // LATEST
    before, chosen = set(groups_N[:start]), dict[int, int]()
    for avoided in (before, set[int]()):
        for number in range(len(groups_N) - 1, start - 1, -1):
            group = groups_N[number]
            if len(chosen) < heldout and group not in avoided and group not in trained:
                chosen.setdefault(group, number)
    border = min(chosen.values(), default=len(groups_N))
    return [number for number in range(border) if groups_N[number] not in chosen], sorted(chosen.values())


def capped(numbers: Sequence[int], groups_N: Sequence[int], order_N: Sequence[str]) -> list[int]:
    """The numbers that stay, in order: at most MOST_ALIKE per group, those with the smallest ``order_N``."""
    sizes, chosen = Counter[int](), list[int]()
    for number in sorted(numbers, key=order_N.__getitem__):
        if sizes[groups_N[number]] < MOST_ALIKE:
            sizes[groups_N[number]] += 1
            chosen.append(number)
    return sorted(chosen)
