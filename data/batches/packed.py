"""Several sequences in one row of a batch, without seeing each other.

Legend: B rows, T positions, R response tokens of the micro-batch.

Position ids start again at 0 with each sequence. transformers masks attention across such restarts when it is given neither an
attention mask nor a cache. Padding behind the last sequence is at position 0 throughout: every padded position is a sequence of its
own, no table of positions is too short for it, and it is never predicted from.
"""

from collections.abc import Sequence

from data.batches.collate import Batch, Example, collate_rows

# Rows are cut to their longest, rounded up to this: a nearly empty batch costs little, and few shapes occur.
WIDTH_STEP = 64


def collate_packed(
    rows: Sequence[Sequence[Example]], pad_id: int, row_tokens: int, indices: Sequence[int] = ()
) -> Batch:
    """`collate_rows` with the position ids that keep the sequences of a row apart.

    Raises:
        ValueError: the sequences of a row have more than `row_tokens` tokens.
    """
    longest = max((sum(len(example.input_ids) for example in row) for row in rows), default=1)
    if longest > row_tokens:
        raise ValueError(f"a row has {longest} tokens, more than {row_tokens}")
    width = min(row_tokens, -(-longest // WIDTH_STEP) * WIDTH_STEP)
    return collate_rows(rows, pad_id, width, indices, packed=True)
