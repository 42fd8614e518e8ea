"""Counts of a serving engine compared with replay under the engine's convention: the prefill produces the first token of a
response, so blocks start at the second one. A block that reaches the end of a response counts in full, its tokens after the end
do not count.

Shapes: N responses, B blocks of one response, J = 1..gamma places in a block.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from speculative.measure.intervals import Interval, ratio_interval, sum_by_prompt
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import StoredText, TokenScores
from speculative.rules.rule import Rule


class Decoded(NamedTuple):
    """A response as its blocks see it: the token of the prefill belongs to the prompt. A `token_scores.StoredText`."""

    prompt_ids: list[int]
    response_ids: list[int]
    log_target_probs: list[float]


@dataclass(frozen=True)
class ServedBlocks:
    """Blocks of one served response. tokens: after the prefill's. accepted_B, drafted_B: empty if an engine gives sums only."""

    tokens: int
    blocks: int
    accepted_B: tuple[int, ...] = ()
    drafted_B: tuple[int, ...] = ()

    def inside(self) -> list[tuple[int, int, int]]:
        """(start, drafted, accepted) of each block, without tokens after the end; a start counts tokens after the prefill's."""
        start, blocks = 0, []
        for accepted, drafted in zip(self.accepted_B, self.drafted_B, strict=True):
            left = max(0, self.tokens - start)
            blocks.append((start, min(drafted, left), min(accepted, left)))
            start += accepted + 1
        return blocks

    def sums(self, gamma: int) -> tuple[np.ndarray, np.ndarray]:
        """(blocks that drafted, blocks that accepted, at least the first j tokens), each (J,), without tokens after the end."""
        blocks_J, kept_J = np.zeros(gamma), np.zeros(gamma)
        for _, drafted, accepted in self.inside():
            blocks_J[: min(drafted, gamma)] += 1
            kept_J[: min(accepted, gamma)] += 1
        return blocks_J, kept_J

    @property
    def whole(self) -> bool:
        """Whether the blocks explain the response: the last one reaches its end, and none begins after it."""
        starts = [start for start, _, _ in self.inside()]
        end = sum(self.accepted_B) + len(self.accepted_B)
        return not starts or (starts[-1] < self.tokens <= end)


def after_prefill(text: StoredText) -> Decoded:
    """A response from its second token on: the first one comes from the prefill."""
    return Decoded([*text.prompt_ids, *text.response_ids[:1]], [*text.response_ids[1:]], [*text.log_target_probs[1:]])


def tau_of(scores: Sequence[TokenScores], rule: Rule, gamma: int) -> tuple[float, np.ndarray]:
    """(tokens per target call by replay of `after_prefill` text, expected blocks (N,) of each response)."""
    blocks_N = expected_blocks_of(scores, rule, (gamma,))[:, 0]
    return float(sum(len(score) for score in scores) / max(blocks_N.sum(), 1e-9)), blocks_N


def survival_intervals(blocks_NJ: np.ndarray, kept_NJ: np.ndarray, prompt_keys: Sequence[Hashable]) -> list[Interval]:
    """95 % intervals of survival by place over prompts, from responses' `ServedBlocks.sums`; [0, 1] where nothing was drafted."""
    sums_JP = zip(
        *([sum_by_prompt(prompt_keys, of_N) for of_N in of_NJ.T] for of_NJ in (blocks_NJ, kept_NJ)), strict=True
    )
    return [
        ratio_interval(kept_P[blocks_P > 0], blocks_P[blocks_P > 0]) if blocks_P.any() else (0.0, 1.0)
        for blocks_P, kept_P in sums_JP
    ]
