"""The teacher paid once: signals against their dense definition, unbiased draws, and capture = store, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import perturbed, tiny_model
from tiny_training import TOKENS, examples_of, run_config
from torch import Tensor

from data.batches.collate import Batch, collate, collate_packed
from data.batches.examples import as_examples
from data.signals.columns import RELATIVE_ERROR
from data.signals.signal import DenseSignal, TopKSignal
from data.signals.store import SignalStore, signal_manifest
from distill.training import teacher as teacher_module
from distill.training.signal import require_signal
from distill.training.teacher import (
    CapturingTeacher,
    StoredTeacher,
    Teacher,
    topk_signal,
)
from speculative.errors import UserError

LENGTHS = [9, 12, 7, 15, 10, 8, 11, 14]
EXAMPLES = examples_of(LENGTHS)
LENGTHS_OF_RESPONSES = [example.response_tokens for example in EXAMPLES]
K = 12


def logits_of(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def itself(hidden_CD: Tensor) -> Tensor:
    return hidden_CD


# --- top-k -------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(1, 40),
    st.integers(0, 99),
    st.sampled_from([None, 1, 2, 5]),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_topk_is_the_dense_distribution_cut(rows: int, k: int, seed: int, chunk: Any, temperature: float) -> None:
    logits_RV = logits_of(rows, 40, seed)
    signal = topk_signal(itself, logits_RV, k, temperature, chunk)
    probs_RV = (logits_RV.double() / temperature).softmax(-1)
    ordered_RV, ids_RV = probs_RV.sort(-1, descending=True)
    assert torch.equal(signal.ids_RK, ids_RV[:, :k])
    # Both are float32 logarithms of what float64 says.
    torch.testing.assert_close(signal.log_probs_RK.exp().double(), ordered_RV[:, :k], rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(signal.log_tail_R.exp().double(), ordered_RV[:, k:].sum(-1), rtol=1e-5, atol=1e-12)


def test_a_small_tail_keeps_its_digits() -> None:
    logits_RV = torch.tensor([[60.0, 30.0, 1.0, 0.0, -5.0]])
    tail = topk_signal(itself, logits_RV, 2).log_tail_R
    exact = logits_RV.double().log_softmax(-1)[0, 2:].logsumexp(0)
    assert float(tail.double()) == pytest.approx(float(exact), rel=1e-6)  # 1 - sum in float32 would be exactly 0


def test_the_logits_of_all_rows_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def head(hidden_CD: Tensor) -> Tensor:
        seen.append(len(hidden_CD))
        return hidden_CD

    logits_RV = logits_of(100, 50)
    monkeypatch.setattr(teacher_module, "CHUNK_BYTES", 20 * 50 * 4)
    signal = topk_signal(head, logits_RV, 5)
    assert sum(seen) == 100
    assert max(seen) <= 20
    whole = topk_signal(head, logits_RV, 5, chunk=100)
    for name, value in vars(whole).items():
        assert torch.equal(value, getattr(signal, name)), "rows do not see each other"


# --- teachers ----------------------------------------------------------------------------------------------------------


def open_store(folder: Path, k: int = K) -> SignalStore:
    store = SignalStore(folder / "responses" / "train")
    manifest = signal_manifest(k, temperature=1.5, vocab_rows=TOKENS, target="abc", target_dtype="float32")
    store.open(manifest, LENGTHS_OF_RESPONSES, repair=True)
    return store


class Counting:
    """A teacher that notes what it was asked."""

    def __init__(self, teacher: Any) -> None:
        self.teacher, self.asked = teacher, []

    def signal(self, batch: Batch) -> Any:
        self.asked.append(batch.indices)
        return self.teacher.signal(batch)


def batch_of(*indices: int) -> Batch:
    return collate([EXAMPLES[index] for index in indices], 0, indices)


def capturing(folder: Path) -> tuple[CapturingTeacher, Counting]:
    online = Counting(Teacher(tiny_model(vocab_size=TOKENS)))
    return CapturingTeacher(online, open_store(folder)), online


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(value, getattr(right, name)) for name, value in vars(left).items())


def test_captured_now_read_later_and_read_from_the_store_are_bit_equal(tmp_path: Path) -> None:
    teacher, online = capturing(tmp_path)
    batch = batch_of(3, 0, 5)
    first = teacher.signal(batch)
    assert len(online.asked) == 1
    assert same(teacher.signal(batch), first)
    assert same(StoredTeacher(open_store(tmp_path)).signal(batch), first)
    assert len(online.asked) == 1, "paid once"
    assert len(first.rows(slice(None)).to(torch.device("cpu")).__dict__) == len(vars(first))


def test_only_what_is_missing_is_asked_and_kept(tmp_path: Path) -> None:
    teacher, online = capturing(tmp_path)
    first = teacher.signal(batch_of(1, 2))
    mixed = teacher.signal(batch_of(2, 4, 1))
    assert online.asked == [(1, 2), (2, 4, 1)], "the whole micro-batch, so that the result depends on it alone"
    assert teacher.store.missing() == [0, 3, 5, 6, 7]
    again = teacher.store.read([1, 2])
    assert same(again, first), "what was kept is not made again"
    rows = EXAMPLES[2].response_tokens + EXAMPLES[4].response_tokens
    tail = teacher.store.read([2, 4, 1]).rows(slice(rows, None))
    assert same(mixed.rows(slice(rows, None)), tail)


def packed(*rows: tuple[int, ...]) -> Batch:
    """The examples of each tuple behind each other in one row."""
    return collate_packed(
        [[EXAMPLES[index] for index in row] for row in rows], 0, 40, [index for row in rows for index in row]
    )


def test_packed_micro_batches(tmp_path: Path) -> None:
    row_wise, _ = capturing(tmp_path / "rows")
    one_row, online = capturing(tmp_path / "packed")
    expected, found = row_wise.signal(batch_of(4, 1, 6)), one_row.signal(packed((4, 1), (6,)))
    assert same(one_row.signal(packed((4, 1), (6,))), found)
    assert len(online.asked) == 1
    assert torch.equal(found.ids_RK, expected.ids_RK)
    # Another order of sums in the forward may move a code by one.
    torch.testing.assert_close(found.log_probs_RK, expected.log_probs_RK, rtol=0, atol=5e-4)


def test_a_killed_and_resumed_capture_stores_the_same_bits(tmp_path: Path) -> None:
    """One of the micro-batch's examples was written before the kill: the others come out as if all had been."""
    whole, _ = capturing(tmp_path / "whole")
    expected = whole.signal(batch_of(3, 0, 5, 1))
    killed, _ = capturing(tmp_path / "killed")
    killed.store.write({3: expected.rows(slice(EXAMPLES[3].response_tokens))})
    assert same(killed.signal(batch_of(3, 0, 5, 1)), expected)


def test_a_damaged_record_is_captured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher, online = capturing(tmp_path)
    expected = teacher.signal(batch_of(0, 1))
    path = next(teacher.store.folder.glob("topk-*"))
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(bytes(content))
    teacher, online = capturing(tmp_path)
    assert same(teacher.signal(batch_of(0, 1)), expected)
    assert len(online.asked) == 1
    assert path.name in capsys.readouterr().err


def test_a_store_is_read_ahead_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, _ = capturing(tmp_path)
    batches = [batch_of(0, 3), batch_of(1), batch_of(5, 2)]
    for batch in batches:
        teacher.fill(batch)
    stored, asked = StoredTeacher(teacher.store), list[tuple[int, ...]]()
    read = teacher.store.read
    expected = [read(batch.indices) for batch in batches]
    monkeypatch.setattr(teacher.store, "read", lambda indices: (asked.append(tuple(indices)), read(indices))[1])
    stored.read_ahead(batches[:2])
    assert asked == [(0, 3), (1,)]
    for batch, signal in zip(batches, expected, strict=True):
        assert same(stored.signal(batch), signal)
    assert asked == [(0, 3), (1,), (5, 2)], "what was not read before is read now"
    assert same(stored.signal(batches[0]), expected[0])
    assert len(asked) == 4, "nothing is kept"
    stored.read_ahead(batches[:2])
    stored.signal(batches[0])
    stored.read_ahead(batches[2:])  # of the next step, while this one goes on
    assert same(stored.signal(batches[1]), expected[1])
    assert same(stored.signal(batches[2]), expected[2])
    assert len(asked) == 7, "each was read once"


def test_a_broken_target_is_reported(tmp_path: Path) -> None:
    teacher, online = capturing(tmp_path)
    dense = online.teacher.signal(batch_of(2))
    dense.hidden_RD[-1] = torch.nan
    online.teacher.signal = lambda batch: DenseSignal(dense.hidden_RD, dense.head)
    with pytest.raises(UserError, match="example 2: the target's logits are not finite"):
        teacher.signal(batch_of(2))
    assert teacher.store.missing() == list(range(8))


@pytest.mark.parametrize("k", [1, 4, 12, 64, TOKENS])
def test_truncation_costs_acceptance_at_most_the_tail(tmp_path: Path, k: int) -> None:
    """alpha of a real pair from the store: never above the dense one, and low by at most min(target tail, draft tail)."""
    target = tiny_model(vocab_size=TOKENS)
    online, draft = Teacher(target), Teacher(perturbed(target, scale=0.1))
    teacher = CapturingTeacher(online, open_store(tmp_path, k))
    batch = batch_of(*range(8))
    signal, dense, drafted = teacher.signal(batch), online.signal(batch), draft.signal(batch)
    assert isinstance(signal, TopKSignal)
    target_RV = (dense.head(dense.hidden_RD).double() / 1.5).softmax(-1)
    draft_RV = (drafted.head(drafted.hidden_RD).double() / 1.5).softmax(-1)
    alpha_R = torch.minimum(target_RV, draft_RV).sum(-1)
    stored_R = torch.minimum(signal.log_probs_RK.exp(), draft_RV.gather(-1, signal.ids_RK)).sum(-1)
    lost_R, tail_R = alpha_R - stored_R, signal.log_tail_R.exp()
    assert (lost_R <= tail_R + RELATIVE_ERROR).all()
    assert (lost_R >= -RELATIVE_ERROR).all()
    facts = teacher.store.facts()
    assert abs(float(lost_R.mean())) <= facts.mean + RELATIVE_ERROR
    assert facts.mean == pytest.approx(float(tail_R.double().mean()), rel=1e-6)
    if k == TOKENS:
        assert facts.mean == 0.0


def test_prompts_are_captured_beside_the_responses(tmp_path: Path) -> None:
    whole = as_examples(EXAMPLES).with_prompts(0.5)
    store = SignalStore(tmp_path / "responses" / "train")
    manifest = signal_manifest(K, temperature=1.5, vocab_rows=TOKENS, target="t", target_dtype="float32", prompts=True)
    store.open(manifest, whole.predicted_N)
    both = CapturingTeacher(Teacher(tiny_model(vocab_size=TOKENS)), store)
    batch = collate([whole[index] for index in (3, 0, 5)], 0, (3, 0, 5))
    assert batch.answers_R is not None
    assert not batch.answers_R.all()
    captured, _ = capturing(tmp_path / "answers")
    assert same(both.signal(batch).rows(batch.answers_R), captured.signal(batch_of(3, 0, 5)))


def test_only_an_objective_that_reads_the_signal_requires_a_stored_one(tmp_path: Path) -> None:
    def required(loss: str) -> None:
        require_signal(run_config(tmp_path, signal={"source": "store"}, loss={"name": loss}))

    required("ce")
    with pytest.raises(UserError, match="is store, but none is there"):
        required("forward_kl")
