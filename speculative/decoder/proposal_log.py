"""Every drafted token of a run and what became of it, as one parquet file.

Shapes: G drafted tokens of one block of one response.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from speculative.errors import UserError

# place: number of the token in its block, from 0. position: its place in the response. tested: the verifier looked at it;
# False behind the first rejection. Probabilities are null where none were computed (greedy rules compare ids).
SCHEMA = pa.schema(
    [
        ("prompt", pa.string()),
        ("position", pa.int32()),
        ("block", pa.int32()),
        ("place", pa.int8()),
        ("drafted", pa.int32()),
        ("accepted", pa.bool_()),
        ("tested", pa.bool_()),
        ("target_prob", pa.float32()),
        ("draft_prob", pa.float32()),
        ("source", pa.dictionary(pa.int32(), pa.string())),
    ]
)
MOST_PLACES = 128  # What an int8 can count.
FLUSH_ROWS = 16384  # Tens of milliseconds to write: more would show between two streamed tokens.


class _Block(NamedTuple):
    prompt: str
    block: int
    position: int
    drafted_G: np.ndarray
    accepted: int
    target_probs_G: np.ndarray | None
    draft_probs_G: np.ndarray | None
    source: str


class ProposalLog:
    """Context manager around the writing of one log.

    The file has a temporary name until the end of the `with` block, however that is left: a run that is interrupted
    leaves a readable file with what was added, and a killed process leaves none (an older file of that name stays).
    `flush_rows`: tokens kept in memory before they are written as one row group.

    Raises UserError on entering when the file cannot be written, and later when the disk is full.
    """

    def __init__(self, path: str | Path, flush_rows: int = FLUSH_ROWS):
        assert flush_rows > 0, flush_rows
        self.path = Path(path)
        self._flush_rows = flush_rows
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        self._writer: pq.ParquetWriter | None = None
        self._blocks: list[_Block] = []
        self._rows = 0
        self._broken = False  # A row group was written in part: the file is not worth finishing.

    def __enter__(self) -> ProposalLog:
        assert self._writer is None, "a log is written once"
        if self.path.is_dir():
            raise UserError(f"{self.path}: is a folder; give the proposal log a file name")
        if self.path.exists() and not self.path.is_file():
            raise UserError(f"{self.path}: is not an ordinary file; give the proposal log a file name")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._temporary, SCHEMA, compression="zstd")
        except OSError as error:
            raise self._unwritable(error) from error
        # pyarrow imports pandas, if there is one, for its first array: now, not between two streamed tokens.
        pa.array(np.zeros(0))
        return self

    def add(
        self,
        prompt: str,
        block: int,
        position: int,
        drafted: np.ndarray,
        accepted: int,
        target_probs: np.ndarray | None,
        draft_probs: np.ndarray | None,
        source: str,
    ) -> None:
        """Log one block of one response: `drafted` ids (G,), of which the first `accepted` were kept.

        `prompt`: its key. `block`: number of the block in the response. `position`: response position of the first
        drafted token. `target_probs`, `draft_probs` (G,): of the drafted tokens, as the rule used them; None where it used
        none. `source`: who proposed. The arrays are copied. G may be 0.

        Raises UserError for more than 128 drafted tokens and when the disk is full.
        """
        assert self._writer is not None, "add() outside the with block"
        drafted_G = np.array(drafted, dtype=np.int32)
        count = len(drafted_G)
        assert 0 <= accepted <= count, (accepted, count)
        if count > MOST_PLACES:
            raise UserError(
                f"the proposal log takes at most {MOST_PLACES} drafted tokens a block, not {count}: "
                "lower gamma or switch the log off"
            )
        if count == 0:
            return
        target_probs_G, draft_probs_G = _copied(target_probs, count), _copied(draft_probs, count)
        self._blocks.append(_Block(prompt, block, position, drafted_G, accepted, target_probs_G, draft_probs_G, source))
        self._rows += count
        if self._rows >= self._flush_rows:
            self._flush()

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._writer is not None
        try:
            if not self._broken:
                self._flush()
            self._close(self._writer)
        except UserError as mistake:
            if raised is None:
                raise
            # What stopped the run comes first: Ctrl-C stays Ctrl-C.
            raised.add_note(str(mistake))
        finally:
            # Nothing is there any more unless the file could not be finished.
            self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        """Write what is in memory as one row group."""
        if not self._blocks:
            return
        assert self._writer is not None
        # Forgotten first: an interruption in between loses these rows, and never writes them twice.
        blocks, self._blocks, self._rows = self._blocks, [], 0
        try:
            self._writer.write_table(_table(blocks))
        except OSError as error:
            self._broken = True
            raise self._unwritable(error) from error

    def _close(self, writer: pq.ParquetWriter) -> None:
        try:
            writer.close()
            if not self._broken:
                os.replace(self._temporary, self.path)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"{self.path}: the proposal log cannot be written ({error.strerror or error}); choose another place or "
            "switch the log off"
        )


def _copied(probs: np.ndarray | None, count: int) -> np.ndarray | None:
    if probs is None:
        return None
    copy = np.array(probs, dtype=np.float32)
    assert copy.shape == (count,), (copy.shape, count)
    return copy


def _table(blocks: list[_Block]) -> pa.Table:
    """One row for each drafted token, in the order of the blocks."""
    counts = np.array([len(block.drafted_G) for block in blocks])
    owner = np.repeat(np.arange(len(blocks)), counts)
    place = np.arange(len(owner)) - (counts.cumsum() - counts)[owner]
    accepted = np.array([block.accepted for block in blocks])[owner]
    columns = {
        "prompt": pc.take(pa.array([block.prompt for block in blocks], pa.string()), pa.array(owner)),
        "position": np.array([block.position for block in blocks])[owner] + place,
        "block": np.array([block.block for block in blocks])[owner],
        "place": place,
        "drafted": np.concatenate([block.drafted_G for block in blocks]),
        "accepted": place < accepted,
        "tested": place <= accepted,
        "target_prob": _floats([block.target_probs_G for block in blocks], counts),
        "draft_prob": _floats([block.draft_probs_G for block in blocks], counts),
        "source": pc.take(pa.array([block.source for block in blocks]).dictionary_encode(), pa.array(owner)),
    }
    return pa.table({name: _typed(column, SCHEMA.field(name).type) for name, column in columns.items()}, schema=SCHEMA)


def _floats(pieces: list[np.ndarray | None], counts: np.ndarray) -> pa.Array:
    """The arrays end to end; nulls, as many as said, where there is none. NaN stays NaN."""
    values = [
        np.zeros(count, np.float32) if piece is None else piece for piece, count in zip(pieces, counts, strict=True)
    ]
    return pa.array(np.concatenate(values), mask=np.repeat([piece is None for piece in pieces], counts))


def _typed(column: np.ndarray | pa.Array, kind: pa.DataType) -> pa.Array:
    """Raises ArrowInvalid rather than let a number overflow."""
    return column if isinstance(column, pa.Array) else pa.array(column).cast(kind)
