"""Teacher signals as few bytes: what rounding costs, and how many bytes a token takes. No files here.

Legend: R response tokens (rows), K stored entries of a row, S distinct samples of a row, N entries of all rows together.

A log-probability is a 16-bit code, uniform between -32 and 0: the probability read back is off by less than RELATIVE_ERROR of
itself, at any size down to e^-32 (1.3e-14). A smaller one is read as e^-32, so that what was possible stays possible; one code
means exactly zero. Ids take 16 bits and, packed behind, the bits that a larger vocabulary needs above them. The log of the
tail mass and the entropy are kept as float32. At k = 64 and 151,936 tokens that is 276 bytes a token.
"""

from dataclasses import fields
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from data.signals.signal import SampledSignal, TopKSignal

_Stored = TypeVar("_Stored", TopKSignal, SampledSignal)

LOG_FLOOR = -32.0
ZERO_CODE = 65535  # probability 0; the codes below it are -32/65534 apart
RELATIVE_ERROR = 2.5e-4  # half a step, 16/65534 = 2.442e-4, and float32's rounding of the logarithm, 2e-6
_LOG_OF_CODE = np.append(np.arange(ZERO_CODE) * (LOG_FLOOR / (ZERO_CODE - 1)), -np.inf).astype(np.float32)
MAX_SAMPLES = 255  # counts and numbers of distinct ids are bytes


def encode_log_probs(log_probs: np.ndarray) -> np.ndarray:
    """Natural logarithms (at most 0, -inf allowed) -> 16-bit codes of the same shape."""
    bounded = np.clip(log_probs.astype(np.float64), LOG_FLOOR, 0.0)
    codes = np.rint(bounded * ((ZERO_CODE - 1) / LOG_FLOOR)).astype("<u2")
    return np.where(np.isneginf(log_probs), np.uint16(ZERO_CODE), codes).astype("<u2")


def decode_log_probs(codes: np.ndarray) -> np.ndarray:
    """16-bit codes -> float32 natural logarithms of the same shape."""
    return _LOG_OF_CODE[codes]


def high_bits(vocab_rows: int) -> int:
    """Bits of an id above the lowest 16."""
    return max(0, (vocab_rows - 1).bit_length() - 16)


def encode_ids(ids_N: np.ndarray, vocab_rows: int) -> bytes:
    """Ids below `vocab_rows` -> their lower 16 bits, then each bit above them of all ids, packed."""
    ids_N = ids_N.reshape(-1)
    planes = [np.packbits((ids_N >> bit & 1).astype(bool)) for bit in range(16, 16 + high_bits(vocab_rows))]
    return (ids_N & 0xFFFF).astype("<u2").tobytes() + b"".join(plane.tobytes() for plane in planes)


class _Reader:
    """Takes arrays off a record, front to back."""

    def __init__(self, record: np.ndarray) -> None:
        self.record, self.position = record, 0

    def take(self, dtype: str, count: int) -> np.ndarray:
        size = np.dtype(dtype).itemsize * count
        part = self.record[self.position : self.position + size]
        if len(part) != size:
            raise ValueError(f"record of {len(self.record)} bytes ends early")
        self.position += size
        return part.view(dtype)

    def take_ids(self, count: int, vocab_rows: int) -> np.ndarray:
        ids_N = self.take("<u2", count).astype(np.int64)
        for bit in range(16, 16 + high_bits(vocab_rows)):
            plane = self.take("u1", (count + 7) // 8)
            ids_N |= np.unpackbits(plane, count=count).astype(np.int64) << bit
        return ids_N

    def end(self) -> None:
        if self.position != len(self.record):
            raise ValueError(f"record of {len(self.record)} bytes is longer than its content, {self.position}")


def encode_topk(signal: TopKSignal, vocab_rows: int) -> bytes:
    """The record of one example: ids, codes, logs of the tail mass."""
    codes_RK = encode_log_probs(signal.log_probs_RK.numpy())
    tails_R = signal.log_tail_R.numpy().astype("<f4")
    return encode_ids(signal.ids_RK.numpy(), vocab_rows) + codes_RK.tobytes() + tails_R.tobytes()


def decode_topk(record: np.ndarray, tokens: int, k: int, vocab_rows: int) -> TopKSignal:
    """The signal in a record (uint8).

    Raises:
        ValueError: a record of another length.
    """
    reader = _Reader(record)
    ids_RK = reader.take_ids(tokens * k, vocab_rows).reshape(tokens, k)
    log_probs_RK = decode_log_probs(reader.take("<u2", tokens * k)).reshape(tokens, k)
    tails_R = reader.take("<f4", tokens).astype(np.float32)
    reader.end()
    return TopKSignal(torch.from_numpy(ids_RK), torch.from_numpy(log_probs_RK), torch.from_numpy(tails_R))


def encode_sampled(signal: SampledSignal, samples: int, vocab_rows: int) -> bytes:
    """The record of one example: distinct ids of each token, their ids, counts and codes, entropies. Padding is left out."""
    counts_RS = np.rint(signal.weights_RS.numpy().astype(np.float64) * samples).astype(np.int64)
    drawn_RS = counts_RS > 0
    distinct_R, ids_N = drawn_RS.sum(-1).astype(np.uint8), signal.ids_RS.numpy()[drawn_RS]
    codes_N = encode_log_probs(signal.log_probs_RS.numpy()[drawn_RS])
    parts = [distinct_R.tobytes(), encode_ids(ids_N, vocab_rows), counts_RS[drawn_RS].astype(np.uint8).tobytes()]
    return b"".join(parts) + codes_N.tobytes() + signal.entropy_R.numpy().astype("<f4").tobytes()


def decode_sampled(record: np.ndarray, tokens: int, samples: int, vocab_rows: int) -> SampledSignal:
    """The signal in a record (uint8), as wide as its most varied token.

    Raises:
        ValueError: a record of another length.
    """
    reader = _Reader(record)
    distinct_R = reader.take("u1", tokens).astype(np.int64)
    total = int(distinct_R.sum())
    ids_N = reader.take_ids(total, vocab_rows)
    weights_N = reader.take("u1", total).astype(np.float32) / np.float32(samples)
    log_probs_N = decode_log_probs(reader.take("<u2", total))
    entropies_R = reader.take("<f4", tokens).astype(np.float32)
    reader.end()
    drawn_RS = np.arange(distinct_R.max(initial=1)) < distinct_R[:, None]
    ids_RS, weights_RS = np.zeros(drawn_RS.shape, np.int64), np.zeros(drawn_RS.shape, np.float32)
    log_probs_RS = np.full(drawn_RS.shape, -np.inf, np.float32)
    places_N = np.flatnonzero(drawn_RS)
    ids_RS.reshape(-1)[places_N], weights_RS.reshape(-1)[places_N] = ids_N, weights_N
    log_probs_RS.reshape(-1)[places_N] = log_probs_N
    return SampledSignal(*map(torch.from_numpy, (ids_RS, weights_RS, log_probs_RS, entropies_R)))


def join_topk(signals: list[TopKSignal], k: int) -> TopKSignal:
    """Rows of several examples, or of none, behind each other."""
    nothing = torch.zeros((0, k))
    return _joined(signals or [TopKSignal(nothing.long(), nothing, nothing[:, 0])])


def join_sampled(signals: list[SampledSignal]) -> SampledSignal:
    """Rows of several examples, or of none, behind each other, padded to the widest with weight 0 and probability 0."""
    nothing = torch.zeros((0, 1))
    return _joined(signals or [SampledSignal(nothing.long(), nothing, nothing, nothing[:, 0])])


def _joined(signals: list[_Stored]) -> _Stored:
    def joined(name: str) -> Tensor:
        parts = [getattr(signal, name) for signal in signals]
        if parts[0].dim() > 1:
            width, filler = max(part.shape[1] for part in parts), -torch.inf if name.startswith("log_probs") else 0.0
            parts = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=filler) for part in parts]
        return torch.cat(parts)

    return type(signals[0])(*(joined(one.name) for one in fields(signals[0])))
