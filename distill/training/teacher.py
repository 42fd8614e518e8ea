"""The target while the draft learns: no gradient, its own dtype, logits only where they are asked for.

Legend: B sequences, T positions, R response tokens, D hidden width, V vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor
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


class RememberingTeacher(Teacher):
    """The target, asked once for each example: its hidden states stay in memory, 4 bytes x width a response token in float32.

    What it says is exactly what the target says, so runs that differ in their objective alone can share it.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__(target)
        self._hidden: dict[tuple[int, int], Tensor] = {}

    def signal(self, batch: Batch) -> DenseSignal:
        """As `Teacher.signal`; of examples of which all are known nobody is asked. Micro-batches that are not packed."""
        counts = torch.bincount(batch.rows_R // batch.input_ids_BT.shape[1], minlength=len(batch.indices)).tolist()
        # With the rows: the same example has more of them where its prompt is learnt too.
        keys = list(zip(batch.indices, counts, strict=True))
        if not all(key in self._hidden for key in keys):
            asked = super().signal(batch)
            told = zip(keys, asked.hidden_RD.split(counts), strict=True)
            self._hidden |= {key: hidden_RD.clone() for key, hidden_RD in told if key[0] >= 0}  # -1 is any sequence
            return asked
        return DenseSignal(torch.cat([self._hidden[key] for key in keys]), self.split.head)
