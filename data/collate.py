"""Sequences -> tensors of a micro-batch. The one place where labels are shifted against inputs.

Legend: B sequences, T positions, R response tokens of the micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """One training sequence: ids and, for each of them, whether it is a response token (is to be predicted)."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class Batch:
    """A micro-batch. `rows_R` indexes the flattened (B x T) positions whose next token is `labels_R`."""

    input_ids_BT: Tensor
    rows_R: Tensor
    labels_R: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same micro-batch on another device."""
        return Batch(self.input_ids_BT.to(device), self.rows_R.to(device), self.labels_R.to(device))


def collate(examples: Sequence[Example], pad_id: int) -> Batch:
    """Right-pads. Causal attention never looks to the right, so padded rows need no attention mask."""
    width = max(len(example.input_ids) for example in examples)
    input_ids_BT = np.full((len(examples), width), pad_id, dtype=np.int64)
    predicts_BT = np.zeros((len(examples), width), dtype=bool)
    labels_BT = np.zeros((len(examples), width), dtype=np.int64)
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        input_ids_BT[row, :length] = example.input_ids
        predicts_BT[row, : length - 1] = example.loss_mask[1:]
        labels_BT[row, : length - 1] = example.input_ids[1:]
    rows_R = np.flatnonzero(predicts_BT)
    return Batch(
        torch.from_numpy(input_ids_BT), torch.from_numpy(rows_R), torch.from_numpy(labels_BT.reshape(-1)[rows_R])
    )
