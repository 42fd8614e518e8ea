"""A set of training sequences that need not be in memory."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from data.batches.collate import Example


@dataclass(frozen=True)
class Examples:
    """Training sequences by number, each made on access, and facts about all of them.

    Shapes: N sequences. `lengths_N`: ids of each; `predicted_N`: the predicted ones; `keys_N`: 64 bits that identify a sequence
    independently of its number.
    """

    make: Callable[[int], Example]
    lengths_N: np.ndarray
    predicted_N: np.ndarray
    keys_N: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths_N)

    def __getitem__(self, number: int) -> Example:
        return self.make(number)

    def with_prompts(self, weight: float) -> "Examples":
        """The same sequences with this `Example.prompt_weight`."""
        if not weight:
            return self
        return replace(
            self,
            make=lambda number: replace(self.make(number), prompt_weight=weight),
            predicted_N=np.maximum(self.lengths_N - 1, 0),
        )


def example_key(input_ids: np.ndarray, loss_mask: np.ndarray, name: str = "") -> int:
    """64 bits of BLAKE2 over ids, mask and name."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8)
    digest.update(len(input_ids).to_bytes(8, "little"))
    digest.update(np.asarray(input_ids, dtype="<i4").tobytes())
    digest.update(np.asarray(loss_mask, dtype=bool).tobytes())
    return int.from_bytes(digest.digest(), "little")


def as_examples(sequences: Examples | Sequence[Example]) -> Examples:
    """Convert a list of sequences to `Examples`."""
    if isinstance(sequences, Examples):
        return sequences
    return Examples(
        sequences.__getitem__,
        np.array([len(one.input_ids) for one in sequences], dtype=np.int32),
        np.array([one.predicted_tokens for one in sequences], dtype=np.int32),
        np.array([example_key(one.input_ids, one.loss_mask) for one in sequences], dtype=np.uint64),
    )
