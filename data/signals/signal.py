"""The teacher's distributions at the response tokens of a micro-batch: dense or top-k.

Legend: R response tokens (rows), K stored entries of a row, C rows of a chunk, D hidden width, V vocabulary.
Both kinds describe the teacher's distribution at one softening temperature, which is 1 by default.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from data.batches.collate import each_tensor


@dataclass(frozen=True)
class _Rows:
    """Base class: tensors have one entry per row, other fields belong to all rows."""

    def rows(self, chosen: slice | Tensor) -> Self:
        """A subset of the rows."""
        return each_tensor(self, lambda tensor: tensor[chosen])

    def to(self, device: torch.device) -> Self:
        """The same signal on another device; a head is not moved."""
        return each_tensor(self, lambda tensor: tensor.to(device))


@dataclass(frozen=True)
class DenseSignal(_Rows):
    """The teacher's hidden states and its head: logits are computed chunk by chunk and not kept."""

    hidden_RD: Tensor
    head: Callable[[Tensor], Tensor]  # (C, D) -> (C, V)


@dataclass(frozen=True)
class TopKSignal(_Rows):
    """The K most probable tokens of each row with their raw log-probabilities, and the log of the remaining mass.

    Nothing is renormalised: exp(log_probs).sum + exp(log_tail) = 1 up to the store's rounding. An empty entry has
    log-probability -inf and any id; a row without tail has log_tail -inf.
    """

    ids_RK: Tensor  # int64, distinct within a row where the log-probability is finite
    log_probs_RK: Tensor  # float32, natural logarithm
    log_tail_R: Tensor  # float32


Signal = DenseSignal | TopKSignal


def joined(signals: Sequence[TopKSignal]) -> TopKSignal:
    """Concatenate the rows of one or more examples."""
    return TopKSignal(*(torch.cat([getattr(signal, one.name) for signal in signals]) for one in fields(TopKSignal)))
