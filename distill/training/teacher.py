"""The target while the draft learns: no gradient, its own dtype, logits only where they are asked for.

Legend: B sequences, T positions, R response tokens, D hidden width, V vocabulary.
"""

from typing import Protocol

import torch
from transformers import PreTrainedModel

from data.batches.collate import Batch
from data.signals.signal import DenseSignal, Signal
from distill.models.heads import SplitModel


class TeacherSource(Protocol):
    """Whoever knows what the target says of a micro-batch."""

    def signal(self, batch: Batch) -> Signal:
        """The target's distributions at the rows of a micro-batch, on the micro-batch's device."""
        ...


class Teacher:
    """The target itself: its hidden states at response positions, and its head."""

    def __init__(self, target: PreTrainedModel) -> None:
        """The target is frozen and put into eval mode."""
        self.split = SplitModel(target.requires_grad_(False).eval())

    @torch.no_grad()
    def signal(self, batch: Batch) -> DenseSignal:
        """Hidden states (R, D) that predict the response tokens of the micro-batch, and the head over them."""
        hidden_BTD = self.split.hidden(batch.input_ids_BT, batch.position_ids_BT)
        return DenseSignal(hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[batch.rows_R], self.split.head)
