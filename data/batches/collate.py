"""Sequences -> tensors of a micro-batch. Labels are shifted against inputs here and nowhere else.

Legend: B sequences, T positions, R predicted tokens of the micro-batch: response tokens, and prompt tokens if prompts are learnt.

Several sequences can share a row without attending to each other: position ids start again at 0 with each, and transformers masks
attention across such restarts if it gets neither an attention mask nor a cache. Padding after the last sequence has position 0
everywhere. Each padded position is then a sequence of its own, fits any table of positions, and is never used for a prediction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Packed rows are cut to the longest one, rounded up to this, so that nearly empty batches are cheap and few shapes occur.
WIDTH_STEP = 64
# Id of padding. Nothing attends to padding or predicts it, so any id with a row will do; a tokenizer's pad token may have none.
PADDING = 0


@dataclass(frozen=True)
class Example:
    """One training sequence: ids, and for each id whether it is a response token, which is predicted.

    `weights`, one per id if given, multiply the loss of predicting that id. A `prompt_weight` above 0 predicts all other ids
    too, with that weight. `depths`, one per id if given: the number of tokens predicted in one forward by the block
    that starts with that id. `drawn`, one per id if given: the loss counts only these ids.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    weights: np.ndarray | None = None
    prompt_weight: float = 0.0
    depths: np.ndarray | None = None
    drawn: np.ndarray | None = None

    @property
    def response_tokens(self) -> int:
        """Response tokens that are predicted: all but the first id of the sequence."""
        return int(np.count_nonzero(self.loss_mask[1:]))

    @property
    def predicted_tokens(self) -> int:
        """Ids that are predicted."""
        return max(len(self.input_ids) - 1, 0) if self.prompt_weight else self.response_tokens


@dataclass(frozen=True)
class Batch:
    """A micro-batch. `rows_R` indexes the flattened (B x T) positions whose next token is `labels_R`.

    Rows are ordered by sequence, in the order of `indices` (the examples' numbers in their set), then by position. `answers_R`
    marks response tokens, if prompts are trained on too. `drawn_R`: the rows whose loss counts; None = all.
    `position_ids_BT` is given if several sequences share a row of the batch: it starts again at 0 with each of them.
    `depths_BT`, for a parallel draft: how many tokens after each position are predicted; 0 where no block starts.
    """

    input_ids_BT: Tensor
    rows_R: Tensor
    labels_R: Tensor
    position_ids_BT: Tensor | None = None
    weights_R: Tensor | None = None
    depths_BT: Tensor | None = None
    indices: tuple[int, ...] = ()
    positions: int = 0  # tokens of all sequences, without padding
    answers_R: Tensor | None = None
    drawn_R: Tensor | None = None

    @property
    def response_tokens(self) -> int:
        """Rows that predict a response token."""
        return self.labels_R.numel() if self.answers_R is None else int(self.answers_R.sum())

    @property
    def masks(self) -> int:
        """Mask tokens in the forward of a parallel draft: one for each predicted token after a block's first."""
        return 0 if self.depths_BT is None else int((self.depths_BT - 1).clamp_min(0).sum())

    def to(self, device: torch.device) -> "Batch":
        """The same micro-batch on another device."""
        return each_tensor(self, lambda tensor: tensor.to(device, non_blocking=True))


def each_tensor(held: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A dataclass with each of its tensors changed."""
    values = {one.name: getattr(held, one.name) for one in fields(held)}
    return replace(held, **{name: change(value) for name, value in values.items() if isinstance(value, Tensor)})


def collate(examples: Sequence[Example], pad_id: int = PADDING, indices: Sequence[int] = ()) -> Batch:
    """Right-pad to a micro-batch. Attention is causal, so padded rows need no attention mask."""
    width = max(len(example.input_ids) for example in examples)
    return _collate_rows([(example,) for example in examples], pad_id, width, indices)


def collate_packed(
    rows: Sequence[Sequence[Example]], pad_id: int, row_tokens: int, indices: Sequence[int] = ()
) -> Batch:
    """Make a micro-batch with several sequences per row, separated by position ids. No row has more than `row_tokens` tokens."""
    longest = max((sum(len(example.input_ids) for example in row) for row in rows), default=1)
    width = min(row_tokens, -(-longest // WIDTH_STEP) * WIDTH_STEP)
    return _collate_rows(rows, pad_id, width, indices, packed=True)


def _collate_rows(
    rows: Sequence[Sequence[Example]], pad_id: int, width: int, indices: Sequence[int], packed: bool = False
) -> Batch:
    """Place sequences one after the other in rows of `width` and pad the rest. No position predicts the first id of a sequence.

    `indices`: the examples' numbers, row by row. Without rows the result is one row of padding with R = 0.
    """
    shape = max(len(rows), 1), width
    input_ids_BT = np.full(shape, pad_id, dtype=np.int64)
    predicts_BT, answers_BT = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    labels_BT = np.zeros(shape, dtype=np.int64)
    weights_BT = np.ones(shape, dtype=np.float32)
    drawn_BT = np.ones(shape, dtype=bool)
    positions_BT = np.zeros(shape, dtype=np.int64)
    depths_BT = np.zeros(shape, dtype=np.int64)
    for index, row in enumerate(rows):
        start = 0
        for example in row:
            end = start + len(example.input_ids)
            input_ids_BT[index, start:end] = example.input_ids
            positions_BT[index, start:end] = np.arange(end - start)
            answers_BT[index, start : end - 1] = example.loss_mask[1:]
            predicts_BT[index, start : end - 1] = True if example.prompt_weight else example.loss_mask[1:]
            labels_BT[index, start : end - 1] = example.input_ids[1:]
            if example.weights is not None:
                weights_BT[index, start : end - 1] = example.weights[1:]
            if example.drawn is not None:
                drawn_BT[index, start : end - 1] = example.drawn[1:]
            if example.prompt_weight:
                weights_BT[index, start : end - 1][~example.loss_mask[1:]] = example.prompt_weight
            if example.depths is not None:
                depths_BT[index, start : end - 1] = example.depths[1:]
            start = end
    rows_R = np.flatnonzero(predicts_BT)
    prompts = any(example.prompt_weight for row in rows for example in row)
    drawn = any(example.drawn is not None for row in rows for example in row)
    weighted = prompts or any(example.weights is not None for row in rows for example in row)
    parallel = any(example.depths is not None for row in rows for example in row)
    return Batch(
        torch.from_numpy(input_ids_BT),
        torch.from_numpy(rows_R),
        torch.from_numpy(labels_BT.reshape(-1)[rows_R]),
        torch.from_numpy(positions_BT) if packed else None,
        torch.from_numpy(weights_BT.reshape(-1)[rows_R]) if weighted else None,
        torch.from_numpy(depths_BT) if parallel else None,
        tuple(int(index) for index in indices),
        sum(len(example.input_ids) for row in rows for example in row),
        torch.from_numpy(answers_BT.reshape(-1)[rows_R]) if prompts else None,
        torch.from_numpy(drawn_BT.reshape(-1)[rows_R]) if drawn else None,
    )
