"""Signals as bytes: the stated error bound, the stated size, and nothing lost but what is said to be."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_signals import random_topk

from data.signals import codec
from data.signals.signal import SampledSignal

LAW = settings(max_examples=100, deadline=None)


def array_of(record: bytes) -> np.ndarray:
    return np.frombuffer(record, np.uint8)


@LAW
@given(st.lists(st.floats(min_value=-32, max_value=0, width=32), min_size=1, max_size=50))
def test_a_probability_is_off_by_less_than_the_bound(logs: list[float]) -> None:
    exact = np.array(logs, np.float32)
    read = codec.decode_log_probs(codec.encode_log_probs(exact))
    error = np.abs(np.expm1(read.astype(np.float64) - exact.astype(np.float64)))
    assert error.max() <= codec.RELATIVE_ERROR
    assert read.max() <= 0


def test_the_bound_is_not_generous() -> None:
    exact = np.linspace(-32, 0, 1_000_003).astype(np.float32)
    read = codec.decode_log_probs(codec.encode_log_probs(exact))
    assert 2.4e-4 < np.abs(np.expm1(read.astype(np.float64) - exact)).max() <= codec.RELATIVE_ERROR


def test_ends_of_the_scale() -> None:
    logs = np.array([0.0, -0.0, -32.0, -40.0, -1e30, -np.inf, 1e-7], np.float32)
    read = codec.decode_log_probs(codec.encode_log_probs(logs))
    assert read.tolist() == [0.0, 0.0, -32.0, -32.0, -32.0, -math.inf, 0.0]


@LAW
@given(st.integers(0, 65534))
def test_what_was_read_is_written_the_same_again(code: int) -> None:
    read = codec.decode_log_probs(np.array([code], np.uint16))
    assert codec.encode_log_probs(read)[0] == code


@LAW
@given(
    st.sampled_from([2, 300, 65535, 65536, 65537, 131072, 151936, 262144, 262145, 2**20]), st.integers(0, 30),
    st.integers(0, 2**31),
)  # fmt: skip
def test_ids_come_back(vocab: int, count: int, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, vocab, count)
    ids[:2] = (vocab - 1, 0)[: len(ids[:2])]
    record = codec.encode_ids(ids, vocab)
    reader = codec._Reader(array_of(record))
    assert reader.take_ids(count, vocab).tolist() == ids.tolist()
    reader.end()
    assert len(record) == 2 * count + math.ceil(count / 8) * codec.high_bits(vocab)


@pytest.mark.parametrize(("vocab", "bits"), [(2, 0), (65536, 0), (65537, 1), (131072, 1), (151936, 2), (262145, 3)])
def test_bits_above_sixteen(vocab: int, bits: int) -> None:
    assert codec.high_bits(vocab) == bits


@pytest.mark.parametrize(("vocab", "k", "tokens"), [(40, 40, 3), (300, 7, 5), (70_000, 9, 2), (300, 5, 0)])
def test_topk_comes_back_within_the_bound(vocab: int, k: int, tokens: int) -> None:
    signal = random_topk(tokens, k, vocab)
    read = codec.decode_topk(array_of(codec.encode_topk(signal, vocab)), tokens, k, vocab)
    assert torch.equal(read.ids_RK, signal.ids_RK)
    assert torch.equal(read.log_tail_R, signal.log_tail_R), "the tail is kept as it is"
    assert (read.ids_RK.dtype, read.log_probs_RK.dtype) == (torch.int64, torch.float32)
    inside = signal.log_probs_RK > codec.LOG_FLOOR
    error = torch.expm1(read.log_probs_RK.double() - signal.log_probs_RK.double())[inside].abs()
    assert (error <= codec.RELATIVE_ERROR).all()
    again = codec.decode_topk(array_of(codec.encode_topk(read, vocab)), tokens, k, vocab)
    assert torch.equal(again.log_probs_RK, read.log_probs_RK), "a second rounding changes nothing"


def test_bytes_a_token() -> None:
    """The promise is 400 at k = 64 and a vocabulary of 151,936; the docstring says 276."""
    signal = random_topk(4, 64, 151_936)
    assert len(codec.encode_topk(signal, 151_936)) / 4 == 276


def test_the_samples_come_back() -> None:
    ids_RS = torch.tensor([[3, 5, 250], [7, 0, 0]])
    weights_RS = torch.tensor([[10 / 50, 35 / 50, 5 / 50], [1.0, 0.0, 0.0]])
    log_probs_RS = torch.tensor([[-1.5, -0.4, -3.0], [0.0, -torch.inf, -torch.inf]])
    signal = SampledSignal(ids_RS, weights_RS, log_probs_RS, torch.tensor([0.9, 0.0]))
    record = codec.encode_sampled(signal, 50, 300)
    assert len(record) == 2 + 4 * (2 + 1 + 2) + 2 * 4
    read = codec.decode_sampled(array_of(record), 2, 50, 300)
    assert torch.equal(read.ids_RS, ids_RS)
    assert torch.equal(read.weights_RS, weights_RS)
    assert torch.equal(read.entropy_R, signal.entropy_R)
    torch.testing.assert_close(read.log_probs_RS.exp(), log_probs_RS.exp(), rtol=codec.RELATIVE_ERROR, atol=0)


def test_joined_samples_are_padded_with_nothing() -> None:
    narrow = SampledSignal(
        torch.tensor([[4]]), torch.tensor([[1.0]]), torch.tensor([[-0.1]]), torch.tensor([0.3])
    )  # fmt: skip
    wide = SampledSignal(
        torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]]), torch.tensor([[-0.7, -0.7]]), torch.tensor([0.7])
    )
    joined = codec.join_sampled([narrow, wide])
    assert joined.ids_RS.tolist() == [[4, 0], [1, 2]]
    assert joined.weights_RS.tolist() == [[1.0, 0.0], [0.5, 0.5]]
    assert joined.log_probs_RS[0, 1] == -torch.inf
    assert joined.entropy_R.tolist() == torch.tensor([0.3, 0.7]).tolist()


@pytest.mark.parametrize("change", ["shorter", "longer"])
@pytest.mark.parametrize("kind", ["topk", "sampled"])
def test_a_record_of_another_length_is_refused(change: str, kind: str) -> None:
    signal = random_topk(3, 5, 300)
    if kind == "topk":
        record = codec.encode_topk(signal, 300)
    else:
        weights_RS = torch.full((3, 5), 10 / 50)
        record = codec.encode_sampled(
            SampledSignal(signal.ids_RK, weights_RS, signal.log_probs_RK, signal.log_tail_R), 50, 300
        )
    odd = array_of(record[:-1] if change == "shorter" else record + b"\0")
    with pytest.raises(ValueError, match="record of"):
        codec.decode_topk(odd, 3, 5, 300) if kind == "topk" else codec.decode_sampled(odd, 3, 50, 300)
