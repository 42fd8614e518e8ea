"""Write every drafted token of a run, with its outcome, to one parquet file.

Shapes: G drafted tokens of one block of one response.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from speculative.errors import UserError

# place: number of the token in its block, from 0. position: its position in the response. tested: whether the verifier tested
# it; False after the first rejection. Probabilities are null where none were computed (greedy rules compare ids).
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
MOST_PLACES = 128  # Limit of an int8.
FLUSH_ROWS = 16384  # Takes tens of milliseconds to write; more would delay streamed tokens.


class ProposalLog:
    """Context manager that writes one log, under a temporary name until the end of the `with` block, however it ends: an interrupted run
    leaves a readable file with the rows added so far; a killed process leaves none (an older file of that name stays). `flush_rows`:
    tokens kept in memory before they are written as one row group. Raises UserError on entering when the file cannot be written, and later
    when the disk is full.
    """

    def __init__(self, path: str | Path, flush_rows: int = FLUSH_ROWS):
        assert flush_rows > 0, flush_rows
        self.path = Path(path)
        self._flush_rows = flush_rows
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        self._writer: pq.ParquetWriter | None = None
        self._columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
        self._broken = False  # A row group was written only in part, so the file cannot be finished.

    def __enter__(self) -> ProposalLog:
        assert self._writer is None, "a log is written once"
        if self.path.is_dir():
            raise UserError(f"{self.path}: is a folder; give the proposal log a file name")
        if self.path.exists() and not self.path.is_file():
            raise UserError(f"{self.path}: is not a regular file; give the proposal log a file name")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._temporary, SCHEMA, compression="zstd")
        except OSError as error:
            raise self._unwritable(error) from error
        # pyarrow imports pandas for its first array. Do it here, not between two streamed tokens.
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
        """Log one block of one response: `drafted` ids (G,), of which the first `accepted` were kept; G may be 0. `prompt`: its key.
        `block`: number of the block in the response. `position`: response position of the first drafted token. `target_probs`,
        `draft_probs` (G,): of the drafted tokens, as the rule used them; None if it used none. `source`: name of the drafter. Raises
        UserError for more than 128 drafted tokens and when the disk is full.
        """
        assert self._writer is not None, "add() outside the with block"
        count = len(drafted)
        assert 0 <= accepted <= count, (accepted, count)
        if count > MOST_PLACES:
            raise UserError(
                f"the proposal log stores at most {MOST_PLACES} drafted tokens a block, not {count}: "
                "lower gamma or switch the log off"
            )
        rows = {
            "prompt": [prompt] * count,
            "position": range(position, position + count),
            "block": [block] * count,
            "place": range(count),
            "drafted": drafted.tolist(),
            "accepted": [place < accepted for place in range(count)],
            "tested": [place <= accepted for place in range(count)],
            "target_prob": [None] * count if target_probs is None else target_probs.tolist(),
            "draft_prob": [None] * count if draft_probs is None else draft_probs.tolist(),
            "source": [source] * count,
        }
        for name, values in rows.items():
            self._columns[name] += values
        if len(self._columns["prompt"]) >= self._flush_rows:
            self._flush()

    def add_file(self, path: Path) -> None:
        """Add a whole finished log. Raises UserError when the disk is full."""
        self._flush()
        self._write(pq.read_table(path))

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
            # The error that stopped the run has priority: Ctrl-C stays Ctrl-C.
            raised.add_note(str(mistake))
        finally:
            # The temporary file still exists only if the log could not be finished.
            self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        """Write the rows in memory as one row group. Raises ArrowInvalid if a number would overflow."""
        # Cleared before writing: an interruption may lose these rows but never writes them twice.
        columns, self._columns = self._columns, {name: [] for name in SCHEMA.names}
        if columns["prompt"]:
            self._write(pa.table(columns, schema=SCHEMA))

    def _write(self, rows: pa.Table) -> None:
        assert self._writer is not None
        try:
            self._writer.write_table(rows)
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
            f"{self.path}: the proposal log cannot be written ({error.strerror or error}); choose another path or "
            "switch the log off"
        )
