"""Encode teacher signals as columns of a shard: rounding error and bytes per token. Files are in `store.py`.

Legend: R response tokens, K stored entries of a token, N entries of all tokens together.

A log-probability is a 16-bit code, uniform between -32 and 0. The decoded probability has a relative error below RELATIVE_ERROR,
down to e^-32 (1.3e-14). A smaller probability is read as e^-32, so that it stays above zero; one code means exactly zero. Ids take
16 bits, and a second, packed column has the higher bits for a larger vocabulary. The log of the tail mass is float32.
With k = 64 and 151,936 tokens this is 276 bytes per token.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import torch

from data.signals.signal import TopKSignal

LOG_FLOOR = -32.0
ZERO_CODE = 65535  # probability 0; lower codes are -32/65534 apart
RELATIVE_ERROR = 2.5e-4  # half a step, 16/65534 = 2.442e-4, and float32's rounding of the logarithm, 2e-6
_LOG_OF_CODE = np.append(np.arange(ZERO_CODE) * (LOG_FLOOR / (ZERO_CODE - 1)), -np.inf).astype(np.float32)
# Columns of a row, which holds one example; each value is a list.
COLUMNS = {"ids": pa.uint16(), "ids_above": pa.uint8(), "log_probs": pa.uint16(), "log_tail": pa.float32()}


def encode_log_probs(log_probs: np.ndarray) -> np.ndarray:
    """Natural logarithms (at most 0, -inf allowed) -> 16-bit codes of the same shape."""
    bounded = np.clip(log_probs.astype(np.float64), LOG_FLOOR, 0.0)
    codes = np.rint(bounded * ((ZERO_CODE - 1) / LOG_FLOOR)).astype(np.uint16)
    return np.where(np.isneginf(log_probs), np.uint16(ZERO_CODE), codes)


def decode_log_probs(codes: np.ndarray) -> np.ndarray:
    """16-bit codes -> float32 natural logarithms of the same shape."""
    return _LOG_OF_CODE[codes]


def _bits_above(vocab_rows: int) -> range:
    """The bits of an id above the lowest 16."""
    return range(16, max(16, (vocab_rows - 1).bit_length()))


def bytes_per_token(k: int, vocab_rows: int) -> float:
    """Of k stored entries and the tail."""
    return k * (4 + len(_bits_above(vocab_rows)) / 8) + 4


def encode_ids(ids_N: np.ndarray, vocab_rows: int) -> dict[str, np.ndarray]:
    """Ids below `vocab_rows` -> their lower 16 bits, and the higher bits of all ids, packed bit by bit."""
    planes = [np.packbits((ids_N >> bit & 1).astype(bool)) for bit in _bits_above(vocab_rows)]
    return {"ids": (ids_N & 0xFFFF).astype(np.uint16), "ids_above": np.concatenate([np.zeros(0, np.uint8), *planes])}


def decode_ids(columns: Mapping[str, np.ndarray], vocab_rows: int) -> np.ndarray:
    """Inverse of `encode_ids`, int64."""
    ids_N, above = columns["ids"].astype(np.int64), _bits_above(vocab_rows)
    for bit, plane in zip(above, columns["ids_above"].reshape(len(above), -(-len(ids_N) // 8)), strict=True):
        ids_N |= np.unpackbits(plane, count=len(ids_N)).astype(np.int64) << bit
    return ids_N


def encode(signal: TopKSignal, vocab_rows: int) -> dict[str, np.ndarray]:
    """The columns of one example's signal, on the CPU."""
    return {
        **encode_ids(signal.ids_RK.numpy().reshape(-1), vocab_rows),
        "log_probs": encode_log_probs(signal.log_probs_RK.numpy().reshape(-1)),
        "log_tail": signal.log_tail_R.numpy(),
    }


def decode(columns: Mapping[str, np.ndarray], tokens: int, k: int, vocab_rows: int) -> TopKSignal:
    """The signal in the columns of one example. Raises ValueError: columns have the wrong length."""
    ids_RK = decode_ids(columns, vocab_rows).reshape(tokens, k)
    log_probs_RK = decode_log_probs(columns["log_probs"]).reshape(tokens, k)
    return TopKSignal(*map(torch.from_numpy, (ids_RK, log_probs_RK, columns["log_tail"].copy())))
