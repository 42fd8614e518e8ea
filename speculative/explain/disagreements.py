"""The most expensive disagreements: the tokens where target and draft differ, and their cost.

Shapes: N responses, T tokens of one response.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from speculative.decoder.text import UNDECODED, decoded
from speculative.explain.slices import SlicedText
from speculative.explain.token_class import token_text
from speculative.measure.record import Record, Text
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import TokenScores
from speculative.rules.rule import Rule

CONTEXT_TOKENS = 12


class Disagreement(Record):
    """A pair of tokens: the target's, and the one the draft preferred."""

    context: Text = Field(description="text before one such position")
    target_said: Text = Field(description="the target's token")
    draft_wanted: Text = Field(description="the draft's most probable token")
    count: int = Field(description="number of positions")
    prompts: int = Field(description="prompts with such a position")
    lost_share: float | None = Field(None, description="share of all rejected probability")
    tau_if_agreed: float | None = Field(None, description="tau by replay if the draft were right there")
    tokens_per_second_lost: float | None = Field(None, description="tokens/s lost there, at the measured step times")
    example: dict[str, Any] | None = Field(None, description="{key, position} of one such position")


@dataclass
class _Group:
    """One pair (said, wanted): places by response, rejected probability mass, and the place that lost most."""

    said: int
    wanted: int
    places: dict[int, list[int]] = field(default_factory=dict)
    lost: float = 0.0
    worst: tuple[float, int, int] = (-1.0, 0, 0)  # rejected mass, response, position

    def add(self, response: int, place: int, lost: float) -> None:
        self.places.setdefault(response, []).append(place)
        self.lost += lost
        if lost > self.worst[0]:
            self.worst = (lost, response, place)


def disagreements(
    texts: Sequence[SlicedText],
    scores: Sequence[TokenScores],
    *,
    rule: Rule,
    gamma: int,
    tokenizer: PreTrainedTokenizerBase,
    seconds_per_block: float | None = None,
    count: int = 40,
) -> list[Disagreement]:
    """Places where the draft's most probable token is not the one the target said, grouped by these two tokens: the `count` groups that
    reject the most probability mass sum (1 - a), the most expensive at `gamma` first. tau_if_agreed is of the whole text, with only this
    group corrected. Costs do not add up: a position after another rejection costs less than it seems. The example and its context are of
    the position that rejects most.

    Under rule `block` a is that of `sample`, and being right means giving the token the target's own probability.
    """
    if [len(text.response_ids) for text in texts] != [len(scored) for scored in scores]:
        raise ValueError("scores are not of these texts: their numbers of tokens differ")
    lost_NT = [1.0 - scored.accept_probs(rule) for scored in scores]
    lost = float(sum(values.sum() for values in lost_NT))
    groups = [group for group in _grouped(texts, scores, lost_NT) if group.lost > 0]
    groups = sorted(groups, key=lambda group: (-group.lost, group.said, group.wanted))[:count]
    if not groups:
        return []
    tokens = sum(len(scored) for scored in scores)
    blocks_N = expected_blocks_of(scores, rule, (gamma,))[:, 0]
    saved = _saved_blocks(groups, scores, blocks_N, rule, gamma)
    tau = tokens / blocks_N.sum()
    rows = []
    for group, blocks_saved in zip(groups, saved, strict=True):
        tau_if_agreed = float(tokens / (blocks_N.sum() - blocks_saved))
        _, response, place = group.worst
        text = texts[response]
        rows.append(
            Disagreement(
                context=_context(tokenizer, [*text.prompt_ids, *text.response_ids[:place]][-CONTEXT_TOKENS:]),
                target_said=token_text(tokenizer, group.said),
                draft_wanted=token_text(tokenizer, group.wanted),
                count=sum(len(places) for places in group.places.values()),
                prompts=len({texts[index].prompt for index in group.places}),
                lost_share=group.lost / lost,
                tau_if_agreed=tau_if_agreed,
                tokens_per_second_lost=float((tau_if_agreed - tau) / seconds_per_block) if seconds_per_block else None,
                example={"key": text.key, "position": place},
            )
        )
    order = sorted(range(len(rows)), key=lambda row: (-saved[row], -groups[row].lost, row))
    return [rows[row] for row in order]


def _grouped(texts: Sequence[SlicedText], scores: Sequence[TokenScores], lost_NT: Sequence[np.ndarray]) -> list[_Group]:
    groups: dict[tuple[int, int], _Group] = {}
    for index, (text, own, lost_T) in enumerate(zip(texts, scores, lost_NT, strict=True)):
        for place in np.flatnonzero(~own.matches).tolist():
            said, wanted = int(text.response_ids[place]), int(own.choice_ids[place])
            groups.setdefault((said, wanted), _Group(said, wanted)).add(index, place, float(lost_T[place]))
    return list(groups.values())


def _saved_blocks(
    groups: Sequence[_Group], scores: Sequence[TokenScores], blocks_N: np.ndarray, rule: Rule, gamma: int
) -> list[float]:
    """Expected target calls saved, for each group, if the draft had been right at its positions."""
    saved = []
    for group in groups:
        settled = [_as_if_agreed(scores[index], places) for index, places in group.places.items()]
        saved.append(float((blocks_N[list(group.places)] - expected_blocks_of(settled, rule, (gamma,))[:, 0]).sum()))
    return saved


def _as_if_agreed(scores: TokenScores, places: Sequence[int]) -> TokenScores:
    """The same scores with a draft that is always accepted at these positions, under every rule."""
    right = np.zeros(len(scores), dtype=bool)
    right[places] = True
    by_start = scores.by_start
    if by_start is not None:
        offsets = by_start.matches.shape[1]
        padded = np.append(right, np.zeros(offsets, dtype=bool))
        by_start = _kept_where(by_start, padded[np.arange(len(scores))[:, None] + np.arange(offsets)])
    return replace(_kept_where(scores, right), by_start=by_start)


def _kept_where(scores: TokenScores, right: np.ndarray) -> TokenScores:
    def likelier(log_probs: np.ndarray) -> np.ndarray:
        return np.where(right, np.maximum(log_probs, scores.log_target_probs), log_probs)

    whole = None if scores.log_whole_probs is None else likelier(scores.log_whole_probs)
    return replace(
        scores, log_draft_probs=likelier(scores.log_draft_probs), matches=scores.matches | right, log_whole_probs=whole
    )


def _context(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return decoded(tokenizer, ids).lstrip(UNDECODED)  # The cut may split a character.
