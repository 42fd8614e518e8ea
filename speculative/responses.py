"""What one decoding run is asked for and what comes back: plain values, no models.

Shapes: R rows of the batch, G1 = gamma + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from speculative.errors import UserError
from speculative.sampling import SamplingSettings
from speculative.verify import Rule, draft_settings_for

Prompt = tuple[str, Sequence[int]]  # key, token ids


@dataclass(frozen=True)
class DecodeSettings:
    """How to decode. `gamma` 0 is plain decoding; `eos_ids` end a response and are part of it.

    Raises UserError for a value outside its range and for a rule that contradicts the temperature.
    """

    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    gamma: int = 0
    rule: Rule = "sample"
    max_tokens: int = 256
    eos_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise UserError(f"gamma = {self.gamma}: must be 0 (plain decoding) or a positive number of drafted tokens")
        if self.max_tokens < 1:
            raise UserError(f"max_tokens = {self.max_tokens}: must be at least 1")
        draft_settings_for(self.rule, self.sampling)


@dataclass
class Response:
    """One decoded response and what happened to the drafted tokens in it.

    log_target_probs: log target probability of each token under the sampling settings (0.0 when greedy).
    accepted_counts: drafted tokens accepted in each block, *before* the end token or the budget cut the last block.
    proposed_mask: per response token, 1 for an accepted drafted token, 0 for the target's own.
    tested, overlap_sum: positions at which a drafted token was tried, and sum_v min(target, draft) over them.
    """

    key: str
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    log_target_probs: list[float] = field(default_factory=list)
    finished: bool = False
    blocks: int = 0
    accepted_counts: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    tested: int = 0
    overlap_sum: float = 0.0
    proposed_mask: list[int] = field(default_factory=list)


@dataclass
class Timing:
    """Seconds by stage, summed over batches. Draft and verify include their share of sampling and acceptance.

    On an asynchronous device the draft's work is partly waited for in the verify stage: only the total is exact there.
    """

    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0
    draft_steps: int = 0
    target_calls: int = 0


class BlockOutcome(NamedTuple):
    """One block on the host. Only the first accepted + 1 entries of a row of `ids_RG1` and `log_probs_RG1` count."""

    accepted_R: np.ndarray
    ids_RG1: np.ndarray
    log_probs_RG1: np.ndarray
    overlap_sums_R: np.ndarray


def record_block(response: Response, outcome: BlockOutcome, row: int, settings: DecodeSettings) -> list[int]:
    """Append one block to a response, cut right after an end token or at the budget; returns the appended ids."""
    accepted = int(outcome.accepted_R[row])
    room = settings.max_tokens - len(response.response_ids)
    ids = outcome.ids_RG1[row, : min(accepted + 1, room)].tolist()
    for position, token_id in enumerate(ids):
        if token_id in settings.eos_ids:
            ids = ids[: position + 1]
            response.finished = True
            break
    response.response_ids += ids
    response.log_target_probs += outcome.log_probs_RG1[row, : len(ids)].tolist()
    response.proposed_mask += [int(position < accepted) for position in range(len(ids))]
    response.blocks += 1
    response.drafted += settings.gamma
    response.accepted += accepted
    response.accepted_counts.append(accepted)
    response.tested += min(accepted + 1, settings.gamma)
    response.overlap_sum += float(outcome.overlap_sums_R[row])
    return ids
