"""Labels against inputs: which position predicts which token."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches.collate import Batch, Example, collate


def example(ids: list[int], mask: list[int]) -> Example:
    return Example(np.array(ids, dtype=np.int32), np.array(mask, dtype=bool))


def naive(examples: list[Example]) -> list[tuple[int, int, int]]:
    """(sequence, position, next token) of every response token, by loops."""
    found = []
    for row, one in enumerate(examples):
        for position in range(1, len(one.input_ids)):
            if one.loss_mask[position]:
                found.append((row, position - 1, int(one.input_ids[position])))
    return found


def as_triples(batch: Batch) -> list[tuple[int, int, int]]:
    width = batch.input_ids_BT.shape[1]
    return [
        (int(r) // width, int(r) % width, int(label)) for r, label in zip(batch.rows_R, batch.labels_R, strict=True)
    ]


def test_by_hand() -> None:
    batch = collate([example([5, 6, 7, 8], [0, 0, 1, 1]), example([9, 4], [0, 1])], pad_id=0)
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8], [9, 4, 0, 0]]
    # The last prompt token (6, at position 1) predicts the first response token (7); position 3 predicts nothing.
    assert as_triples(batch) == [(0, 1, 7), (0, 2, 8), (1, 0, 4)]
    assert {batch.input_ids_BT.dtype, batch.rows_R.dtype, batch.labels_R.dtype} == {torch.int64}


sequences = st.lists(
    st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=12), min_size=1, max_size=6
)


@settings(max_examples=150, deadline=None)
@given(sequences, st.sampled_from([0, 7]))
def test_as_the_naive_twin(sequences: list[list[tuple[int, bool]]], pad_id: int) -> None:
    examples = [example([token for token, _ in pairs], [on for _, on in pairs]) for pairs in sequences]
    batch = collate(examples, pad_id)
    assert as_triples(batch) == naive(examples)
    for row, one in enumerate(examples):
        length = len(one.input_ids)
        assert batch.input_ids_BT[row, :length].tolist() == one.input_ids.tolist()
        assert (batch.input_ids_BT[row, length:] == pad_id).all()


def test_a_prompt_with_a_weight_is_predicted_too() -> None:
    learnt = Example(np.array([5, 6, 7, 8]), np.array([False, False, True, True]), np.array([1, 1, 2, 3]), 0.25)
    batch = collate([learnt, example([9, 4, 3], [0, 0, 1])], pad_id=0)
    assert as_triples(batch) == [(0, 0, 6), (0, 1, 7), (0, 2, 8), (1, 1, 3)]
    assert batch.weights_R is not None
    assert batch.weights_R.tolist() == [0.25, 2, 3, 1]
    assert batch.answers_R is not None
    assert batch.answers_R.tolist() == [False, True, True, True]
    assert batch.response_tokens == 3
    assert collate([example([9, 4, 3], [0, 0, 1])], 0).answers_R is None
