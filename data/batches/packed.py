"""Several sequences in one row of a batch, without seeing each other.

Legend: B rows, T positions, R response tokens of the micro-batch.

Position ids start again at 0 with each sequence. transformers masks attention across such restarts when it is given neither an
attention mask nor a cache. Padding behind the last sequence is at position 0 throughout: every padded position is a sequence of its
own, no table of positions is too short for it, and it is never predicted from.
"""

from collections.abc import Sequence

import numpy as np
import torch

from data.batches.collate import Batch, Example

# Rows are cut to their longest, rounded up to this: a nearly empty batch costs little, and few shapes occur.
WIDTH_STEP = 64


def collate_packed(
    rows: Sequence[Sequence[Example]], pad_id: int, row_tokens: int, indices: Sequence[int] = ()
) -> Batch:
    """Rows of sequences -> tensors. No position predicts the first id of the sequence behind it.

    `indices`: the examples' numbers, row by row. No rows at all give a batch of padding with R = 0.

    Raises:
        ValueError: the sequences of a row have more than `row_tokens` tokens.
    """
    longest = max((sum(len(example.input_ids) for example in row) for row in rows), default=1)
    if longest > row_tokens:
        raise ValueError(f"a row has {longest} tokens, more than {row_tokens}")
    shape = max(len(rows), 1), min(row_tokens, -(-longest // WIDTH_STEP) * WIDTH_STEP)
    input_ids_BT = np.full(shape, pad_id, dtype=np.int64)
    positions_BT = np.zeros(shape, dtype=np.int64)
    predicts_BT = np.zeros(shape, dtype=bool)
    labels_BT = np.zeros(shape, dtype=np.int64)
    weights_BT = np.ones(shape, dtype=np.float32)
    for index, row in enumerate(rows):
        start = 0
        for example in row:
            end = start + len(example.input_ids)
            input_ids_BT[index, start:end] = example.input_ids
            positions_BT[index, start:end] = np.arange(end - start)
            predicts_BT[index, start : end - 1] = example.loss_mask[1:]
            labels_BT[index, start : end - 1] = example.input_ids[1:]
            if example.weights is not None:
                weights_BT[index, start : end - 1] = example.weights[1:]
            start = end
    rows_R = np.flatnonzero(predicts_BT)
    weighted = any(example.weights is not None for row in rows for example in row)
    return Batch(
        torch.from_numpy(input_ids_BT),
        torch.from_numpy(rows_R),
        torch.from_numpy(labels_BT.reshape(-1)[rows_R]),
        position_ids_BT=torch.from_numpy(positions_BT),
        weights_R=torch.from_numpy(weights_BT.reshape(-1)[rows_R]) if weighted else None,
        indices=tuple(int(index) for index in indices),
        positions=sum(len(example.input_ids) for row in rows for example in row),
    )
