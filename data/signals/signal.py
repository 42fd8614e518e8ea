"""The teacher's distributions at the response tokens of a micro-batch: dense, top-k or sampled.

Legend: R response tokens (rows), K stored entries of a row, S samples of a row, C rows of a chunk, D hidden width, V vocabulary.
All three kinds describe the teacher's distribution at one softening temperature, which is 1 by default.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

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


@dataclass(frozen=True)
class SampledSignal(_Rows):
    """Importance samples of each row: distinct ids with weights whose expectation is the teacher's probability (arXiv 2503.16870).

    `weights_RS` sums to 1 per row and is 0 for padding; `log_probs_RS` is the teacher's log-probability
    of the same ids; `entropy_R` is that of the whole distribution, in nats.
    """

    ids_RS: Tensor  # int64
    weights_RS: Tensor  # float32
    log_probs_RS: Tensor  # float32
    entropy_R: Tensor  # float32


StoredSignal = TopKSignal | SampledSignal
Signal = DenseSignal | StoredSignal
_Stored = TypeVar("_Stored", bound=StoredSignal)


def joined(signals: Sequence[_Stored]) -> _Stored:
    """Concatenate the rows of one or more examples. Samples are padded to the widest with weight and probability 0."""

    def column(name: str) -> Tensor:
        parts = [getattr(signal, name) for signal in signals]
        if parts[0].dim() > 1:
            width, filler = max(part.shape[1] for part in parts), -torch.inf if name.startswith("log_probs") else 0.0
            parts = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=filler) for part in parts]
        return torch.cat(parts)

    columns: Any = {one.name: column(one.name) for one in fields(signals[0])}
    return replace(signals[0], **columns)
