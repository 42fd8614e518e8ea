"""Generate prompts for the target to answer: sampled from the target, or joined from training prompts.

`magpie`: the target continues where the chat template opens the user turn (Magpie, arXiv 2406.08464), after what a training prompt
has before its last question: its system message and earlier turns. `mix`: the start of one question is joined to the end of another
at two words that both contain, after the turns of the first.

Prompts near a held-out prompt and repeats are left out by the rules of `data/prompts/split.py`.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from data.prompts.prompt import PromptRow, Template, last_question
from data.prompts.split import content_hash, normalised_hash, split_groups
from data.prompts.template import render_opening
from data.responses.rendered import RenderedPrompt
from speculative.errors import UserError

# (openings, samples of each) -> (prompt id, response ids) of each sample. A larger request contains a smaller one.
Sampler = Callable[[Sequence[RenderedPrompt], int], Iterable[tuple[str, Sequence[int]]]]
# Candidates per wanted prompt: at first, and at most.
FIRST, MOST = 1.25, 8


def synthetic_rows(
    own: Sequence[PromptRow],
    heldout: Sequence[PromptRow],
    count: int,
    candidates: Callable[[int], tuple[Sequence[PromptRow], Counter[str]]],
    fits: Callable[[PromptRow], bool],
) -> tuple[list[PromptRow], dict[str, int]]:
    """(at most `count` new prompts, counts of candidates made, kept and left out by reason).

    Args:
        own: the training prompts.
        heldout: prompts whose first or last question is near-equal to the first question of one of these are left out.
        candidates: number -> (that many candidates, counts of those already left out). More candidates contain fewer.
        fits: whether a prompt leaves space for its response.
    """
    wanted = round(FIRST * count)
    while True:
        made, left_out = candidates(wanted)
        kept: list[PromptRow] = []
        known = {normalised_hash(row) for row in own}
        held = {_key(text) for row in heldout for text in _questions(row)[:1]}
        groups = split_groups([*heldout, *made], normalised=True)
        held_groups = set(groups[: len(heldout)])
        for row, group in zip(made, groups[len(heldout) :], strict=True):
            key, question = normalised_hash(row), _questions(row)[-1]
            fault = (
                "empty"
                if not question.strip()
                else "held out"
                if group in held_groups or _key(question) in held
                else "duplicates"
                if key in known
                else ""
                if fits(row)
                else "too long"
            )
            left_out.update([fault] if fault else [])
            known.add(key)
            kept += [] if fault else [row]
        if len(kept) >= count or wanted >= MOST * count:
            return kept[:count], {"made": len(made), "kept": min(len(kept), count), **left_out}
        wanted = min(2 * wanted, MOST * count)


def sampled_rows(
    own: Sequence[PromptRow],
    tokenizer: Any,
    sampler: Sampler,
    end_ids: Collection[int],
    seed: int,
    template: Template,
) -> Callable[[int], tuple[list[PromptRow], Counter[str]]]:
    """Candidates by `magpie`. A turn that does not end with one of `end_ids` is too long. UserError without a chat template."""
    rows = random.Random(seed).sample(list(own), len(own))
    openings: dict[tuple[int, ...], PromptRow] = {}
    for row in rows:
        openings.setdefault(tuple(render_opening(row, tokenizer, template)), row)

    def candidates(wanted: int) -> tuple[list[PromptRow], Counter[str]]:
        chosen = list(openings.items())[:wanted]
        prompts = [RenderedPrompt(content_hash(row), row.domain, ids) for ids, row in chosen]
        of_id = {prompt.prompt_id: row for prompt, (_, row) in zip(prompts, chosen, strict=True)}
        found: list[PromptRow] = []
        left_out: Counter[str] = Counter()
        for prompt_id, ids in sampler(prompts, -(-wanted // len(prompts))):
            if not ids or ids[-1] not in end_ids:
                left_out["too long"] += 1
                continue
            text = tokenizer.decode([token for token in ids if token not in end_ids], skip_special_tokens=True)
            found.append(_asking(of_id[prompt_id], text.strip()))
        return found, left_out

    return candidates


def mixed_rows(own: Sequence[PromptRow], seed: int) -> Callable[[int], tuple[list[PromptRow], Counter[str]]]:
    """Candidates by `mix`; UserError if no two prompts share two neighbouring words."""
    words = [re.findall(r"\S+\s*", "".join(_questions(row)[-1:])) for row in own]
    places: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for number, text in enumerate(words):
        for place in range(len(text) - 1):
            places[text[place].strip(), text[place + 1].strip()].append((number, place))
    shared = {pair: found for pair, found in places.items() if len({number for number, _ in found}) > 1}
    starts = [start for found in shared.values() for start in found]
    if not starts:
        raise UserError("data.synthetic.method: mix: no two training prompts share two neighbouring words; use magpie")

    def candidates(wanted: int) -> tuple[list[PromptRow], Counter[str]]:
        draw, found = random.Random(seed), []
        for _ in range(wanted):
            first, place = draw.choice(starts)
            pair = words[first][place].strip(), words[first][place + 1].strip()
            second, other = draw.choice([one for one in shared[pair] if one[0] != first])
            text = "".join([*words[first][: place + 1], *words[second][other + 1 :]])
            found.append(_asking(own[first], text.strip()))
        return found, Counter()

    return candidates


def _questions(row: PromptRow) -> list[str]:
    if row.text is not None:
        return [row.text]
    return [str(turn.get("content", "")) for turn in row.messages or () if turn["role"] == "user"]


def _key(question: str) -> str:
    return normalised_hash(PromptRow(question, None, None, "", ""))


def _asking(row: PromptRow, question: str) -> PromptRow:
    """The row with another last question and nothing after it."""
    row = replace(row, reference=None, origin="synthetic")
    if row.messages is None:
        return replace(row, text=question)
    return replace(row, messages=(*row.messages[: last_question(row.messages)], {"role": "user", "content": question}))
