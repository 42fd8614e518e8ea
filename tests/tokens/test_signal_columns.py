"""Signals as columns: the stated error bound, the stated size, and nothing lost but what is said to be."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_signals import random_topk

from data.signals import columns
from data.signals.columns import RELATIVE_ERROR, decode, encode
from data.signals.signal import TopKSignal

LAW = settings(max_examples=100, deadline=None)


def test_a_probability_is_off_by_less_than_the_bound_and_the_bound_is_not_generous() -> None:
    exact = np.linspace(-32, 0, 1_000_003).astype(np.float32)
    read = columns.decode_log_probs(columns.encode_log_probs(exact))
    assert 2.4e-4 < np.abs(np.expm1(read.astype(np.float64) - exact)).max() <= RELATIVE_ERROR
    assert read.max() <= 0


def test_ends_of_the_scale_and_every_code() -> None:
    logs = np.array([0.0, -0.0, -32.0, -40.0, -1e30, -np.inf, 1e-7], np.float32)
    read = columns.decode_log_probs(columns.encode_log_probs(logs))
    assert read.tolist() == [0.0, 0.0, -32.0, -32.0, -32.0, -math.inf, 0.0]
    codes = np.arange(65536).astype(np.uint16)
    assert (columns.encode_log_probs(columns.decode_log_probs(codes)) == codes).all(), (
        "a second rounding changes nothing"
    )


@LAW
@given(
    st.sampled_from([(2, 0), (300, 0), (65536, 0), (65537, 1), (131072, 1), (151936, 2), (262144, 2), (262145, 3)]),
    st.integers(0, 30),
    st.integers(0, 2**31),
)
def test_ids_come_back(vocab_bits: tuple[int, int], count: int, seed: int) -> None:
    vocab, bits = vocab_bits
    ids = np.random.default_rng(seed).integers(0, vocab, count)
    ids[:2] = (vocab - 1, 0)[: len(ids[:2])]
    encoded = columns.encode_ids(ids, vocab)
    assert columns.decode_ids(encoded, vocab).tolist() == ids.tolist()
    assert sum(part.nbytes for part in encoded.values()) == 2 * count + math.ceil(count / 8) * bits


@pytest.mark.parametrize(("vocab", "k", "tokens"), [(40, 40, 3), (300, 7, 5), (70_000, 9, 2), (300, 5, 0)])
def test_topk_comes_back_within_the_bound(vocab: int, k: int, tokens: int) -> None:
    signal = random_topk(tokens, k, vocab)
    read = decode(encode(signal, vocab), tokens, k, vocab)
    assert isinstance(read, TopKSignal)
    assert torch.equal(read.ids_RK, signal.ids_RK)
    assert torch.equal(read.log_tail_R, signal.log_tail_R), "the tail is kept as it is"
    assert (read.ids_RK.dtype, read.log_probs_RK.dtype) == (torch.int64, torch.float32)
    inside = signal.log_probs_RK > columns.LOG_FLOOR
    error = torch.expm1(read.log_probs_RK.double() - signal.log_probs_RK.double())[inside].abs()
    assert (error <= RELATIVE_ERROR).all()


def test_bytes_a_token() -> None:
    encoded = encode(random_topk(4, 64, 151_936), 151_936)
    assert sum(part.nbytes for part in encoded.values()) / 4 == 276, "as the docstring says"
