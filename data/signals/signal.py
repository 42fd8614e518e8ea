"""What the teacher said about the response tokens of a micro-batch: dense, or in few numbers.

Legend: R response tokens (rows), K stored entries of a row, S samples of a row, C rows of a chunk, D hidden width, V vocabulary.
All three kinds describe the teacher's distribution at one softening temperature, 1 unless the caller says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DenseSignal:
    """The teacher's hidden states and its head: logits are made chunk by chunk and never kept."""

    hidden_RD: Tensor
    head: Callable[[Tensor], Tensor]  # (C, D) -> (C, V)

    def rows(self, chosen: slice) -> DenseSignal:
        """Some of the rows."""
        return DenseSignal(self.hidden_RD[chosen], self.head)

    def to(self, device: torch.device) -> DenseSignal:
        """The same on another device; the head stays where it is."""
        return DenseSignal(self.hidden_RD.to(device), self.head)


@dataclass(frozen=True)
class TopKSignal:
    """The K most probable tokens of each row with their raw log-probabilities, and the log of all other mass.

    Nothing is renormalised: exp(log_probs).sum + exp(log_tail) = 1 up to the store's rounding. An entry that holds nothing has
    log-probability -inf (and an id that may be any); a row without tail has log_tail -inf.
    """

    ids_RK: Tensor  # int64, distinct within a row where the log-probability is finite
    log_probs_RK: Tensor  # float32, natural logarithm
    log_tail_R: Tensor  # float32

    def rows(self, chosen: slice) -> TopKSignal:
        """Some of the rows."""
        return TopKSignal(self.ids_RK[chosen], self.log_probs_RK[chosen], self.log_tail_R[chosen])

    def to(self, device: torch.device) -> TopKSignal:
        """The same on another device."""
        return TopKSignal(self.ids_RK.to(device), self.log_probs_RK.to(device), self.log_tail_R.to(device))


@dataclass(frozen=True)
class SampledSignal:
    """Importance samples of each row: distinct ids with weights whose expectation is the teacher's probability (arXiv 2503.16870).

    `weights_RS` sums to 1 a row and is 0 where a row has fewer distinct samples; `log_probs_RS` is the teacher's log-probability
    of the same ids; `entropy_R` is that of the whole distribution, in nats.
    """

    ids_RS: Tensor  # int64
    weights_RS: Tensor  # float32
    log_probs_RS: Tensor  # float32
    entropy_R: Tensor  # float32

    def rows(self, chosen: slice) -> SampledSignal:
        """Some of the rows."""
        return SampledSignal(
            self.ids_RS[chosen], self.weights_RS[chosen], self.log_probs_RS[chosen], self.entropy_R[chosen]
        )

    def to(self, device: torch.device) -> SampledSignal:
        """The same on another device."""
        return SampledSignal(
            self.ids_RS.to(device), self.weights_RS.to(device), self.log_probs_RS.to(device), self.entropy_R.to(device)
        )


Signal = DenseSignal | TopKSignal | SampledSignal
