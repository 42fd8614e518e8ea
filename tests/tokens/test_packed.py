"""Packed rows are exact: no sequence sees or predicts another, loss and gradient are those of the padded batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from tiny_models import VOCAB, tiny_model
from tiny_training import examples_of

from data.batches.collate import WIDTH_STEP, Batch, Example, collate, collate_packed
from data.batches.packing import pack
from distill.loss.definitions import Objective
from distill.models.heads import SplitModel
from distill.training.batches import check_packing
from distill.training.module import DraftModule
from distill.training.teacher import Teacher
from speculative.errors import UserError

# Those whose transformers code masks across restarts of the positions; windows shorter than a sequence where there are any.
PACKING: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4},
    "mistral": {"sliding_window": 4},
    "mixtral": {},
    "qwen3_moe": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {},
    "phi3": {},
    "olmo2": {},
    "cohere": {},
    "granite": {},
}
NOT_PACKING = ("falcon", "opt", "bloom", "mamba", "gpt_oss")
LENGTHS = [9, 4, 13, 7, 2, 11, 5, 8]


def weighted_examples(vocab: int = VOCAB) -> list[Example]:
    """Every second one with weights."""
    generator = np.random.default_rng(1)
    return [
        Example(e.input_ids, e.loss_mask, generator.uniform(0.5, 2.0, len(e.input_ids)) if index % 2 else None)
        for index, e in enumerate(examples_of(LENGTHS, vocab))
    ]


def in_rows(examples: list[Example], row_tokens: int) -> tuple[Batch, list[int]]:
    """The packed batch and the examples' numbers in its order."""
    rows = pack([len(example.input_ids) for example in examples], row_tokens)
    order = [position for row in rows for position in row]
    return collate_packed([[examples[i] for i in row] for row in rows], 0, row_tokens, order), order


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 30), min_size=1, max_size=20), st.integers(30, 90))
def test_rows_and_labels_are_those_of_each_sequence_alone(lengths: list[int], row_tokens: int) -> None:
    examples = examples_of(lengths)
    batch, order = in_rows(examples, row_tokens)
    assert batch.indices == tuple(order)
    assert batch.position_ids_BT is not None
    alone = [collate([examples[i]], 0) for i in order]
    assert batch.labels_R.tolist() == torch.cat([one.labels_R for one in alone]).tolist()
    flat_ids, flat_positions = batch.input_ids_BT.reshape(-1), batch.position_ids_BT.reshape(-1)
    assert flat_ids[batch.rows_R].tolist() == torch.cat([one.input_ids_BT[0, one.rows_R] for one in alone]).tolist()
    # Unpadded, a sequence's row numbers are its positions.
    assert flat_positions[batch.rows_R].tolist() == torch.cat([one.rows_R for one in alone]).tolist()
    tokens = sum(lengths)
    assert int((flat_positions == 0).sum()) == len(lengths) + flat_ids.numel() - tokens, "padding is at 0 throughout"
    assert batch.input_ids_BT.shape[1] in (row_tokens, WIDTH_STEP)
    assert batch.weights_R is None


def test_a_small_case_by_hand() -> None:
    first = Example(np.array([5, 6, 7]), np.array([False, True, True]), np.array([9.0, 2.0, 3.0]))
    second = Example(np.array([8, 9]), np.array([True, True]))  # its first id is never predicted
    third = Example(np.array([4, 3, 2, 1]), np.array([False, False, False, True]))
    batch = collate_packed([[first, second], [third]], pad_id=0, row_tokens=6, indices=(20, 10, 30))
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8, 9, 0], [4, 3, 2, 1, 0, 0]]
    assert batch.position_ids_BT is not None
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]]
    assert batch.rows_R.tolist() == [0, 1, 3, 8]
    assert batch.labels_R.tolist() == [6, 7, 9, 1]
    assert batch.weights_R is not None
    assert batch.weights_R.tolist() == [2.0, 3.0, 1.0, 1.0]
    assert batch.indices == (20, 10, 30)


@pytest.mark.parametrize("kind", PACKING)
def test_hidden_states_are_those_of_each_sequence_alone(kind: str) -> None:
    split = SplitModel(tiny_model(kind, **PACKING[kind]))
    examples = examples_of(LENGTHS, VOCAB)
    batch, order = in_rows(examples, 24)
    assert len(batch.input_ids_BT) > 1
    with torch.no_grad():
        packed_BTD = split.hidden(batch.input_ids_BT, batch.position_ids_BT)
        alone = []
        for one in (collate([examples[i]], 0) for i in order):
            alone.append(split.hidden(one.input_ids_BT)[0, one.rows_R])
        check_packing(split)
    packed_RD = packed_BTD.reshape(-1, packed_BTD.shape[-1])[batch.rows_R]
    # float32: other shapes add in another order.
    torch.testing.assert_close(packed_RD, torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "qwen3"])
def test_loss_and_gradient_are_those_of_the_padded_batch(kind: str) -> None:
    options: dict[str, Any] = {"dtype": torch.float64, **PACKING[kind]}
    teacher = Teacher(tiny_model(kind, **options))
    module = DraftModule(tiny_model(kind, seed=1, **options), Objective({"lk_hybrid": 1.0, "ce": 0.5}, chunk_tokens=5))
    examples = weighted_examples()
    padded, (packed, _) = collate(examples, 0), in_rows(examples, 24)
    results = []
    for batch in (padded, packed):
        module.zero_grad()
        loss, overlap, _ = module(batch, teacher.signal(batch))
        loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
        results.append((loss.detach().double(), overlap.double(), gradients))
    (loss, overlap, gradients), (packed_loss, packed_overlap, packed_gradients) = results
    assert loss > 1
    # The summed loss is handed over in float32.
    torch.testing.assert_close(packed_loss, loss, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(packed_overlap, overlap, rtol=1e-6, atol=0.0)
    # float64 but for rotary embeddings and gemma's norms, which transformers computes in float32; gradients are of size 1.
    torch.testing.assert_close(packed_gradients, gradients, rtol=1e-4, atol=1e-6)


def test_a_micro_batch_without_sequences_runs_forward_and_backward() -> None:
    teacher, student = Teacher(tiny_model()), tiny_model(seed=1)
    module = DraftModule(student.train(), Objective({"forward_kl": 1.0}))
    batch = collate_packed([], 0, 512)
    assert batch.input_ids_BT.shape == (1, WIDTH_STEP)
    assert batch.labels_R.numel() == batch.rows_R.numel() == 0
    loss, overlap, _ = module(batch, teacher.signal(batch))
    loss.backward()
    assert float(loss.detach()) == float(overlap) == 0.0
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name}: the other ranks would wait for it"
        assert not parameter.grad.any()


@pytest.mark.parametrize("kind", NOT_PACKING)
def test_an_architecture_that_mixes_sequences_is_refused_by_name(kind: str) -> None:
    model = tiny_model(kind)
    with pytest.raises(UserError, match=rf"train\.packing: {type(model).__name__} .*set train\.packing to null"):
        check_packing(SplitModel(model))


@pytest.mark.parametrize("spread", [0.2, 0.02])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral", "qwen3_moe", "bloom", "opt"])
def test_the_check_tells_in_half_precision_too(kind: str, spread: float) -> None:
    split = SplitModel(tiny_model(kind, dtype=torch.bfloat16, **PACKING.get(kind, {}) | {"initializer_range": spread}))
    if kind in PACKING:
        check_packing(split)
    else:
        assert "attend to each other" in refused(check_packing, split)


def leaky(right: Any, ids_BT: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
    """Flash attention packs a batch of one row only: the probe must not be satisfied with one."""
    first = right(ids_BT[:1], positions_BT[:1])
    return first if len(ids_BT) == 1 else torch.cat([first, right(ids_BT[1:])])


def without_positions(*_: Any) -> torch.Tensor:
    raise TypeError("unexpected keyword 'position_ids'")


@pytest.mark.parametrize(
    ("kind", "wrong", "words"),
    [
        ("llama", leaky, "attend to each other"),
        ("gpt2", lambda right, ids_BT, positions_BT: right(ids_BT, positions_BT + 3), "packed sequences"),
        ("llama", lambda right, ids_BT, positions_BT: right(ids_BT, positions_BT) * torch.nan, "packed sequences"),
        ("llama", without_positions, "does not support packed sequences"),
    ],
)
def test_the_check_sees_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, kind: str, wrong: Callable[..., torch.Tensor], words: str
) -> None:
    split = SplitModel(tiny_model(kind))
    right = split.hidden

    def hidden(ids_BT: torch.Tensor, positions_BT: torch.Tensor | None = None) -> torch.Tensor:
        return right(ids_BT) if positions_BT is None else wrong(right, ids_BT, positions_BT)

    monkeypatch.setattr(split, "hidden", hidden)
    assert words in refused(check_packing, split)
