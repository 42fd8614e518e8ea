"""The token store: responses in parquet shards beside a manifest that says which target, tokenizer and settings made them.

A shard holds a fixed list of jobs (prompt, sample number), is written under a temporary name and renamed, and is never
changed. So a killed writer leaves whole shards, and whoever resumes makes the missing ones: nothing lost, nothing twice.
Beside each shard lies its checksum, as `sha256sum -c` reads it; a shard whose bytes have another one is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.batches.collate import Example
from data.files import (
    MANIFEST,
    _checksum_line,
    _checksum_path,
    read_manifest,
    require_manifest,
    write_bytes,
    write_manifest,
)
from speculative.errors import UserError

SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("sample", pa.int32()),
        ("domain", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("log_target_probs", pa.list_(pa.float32())),
        ("finished", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class Row:
    """One response with its prompt.

    `loss_mask` is true on response tokens; `log_target_probs` holds one natural logarithm per response token: the target's
    probability of it under the manifest's sampling settings (0 under greedy). `finished`: it ended by itself, not by budget.
    """

    prompt_id: str
    sample: int
    domain: str
    input_ids: Sequence[int]
    loss_mask: Sequence[bool]
    log_target_probs: Sequence[float]
    finished: bool

    @property
    def prompt_ids(self) -> list[int]:
        """Ids before the first response token."""
        return [
            int(token) for token, is_response in zip(self.input_ids, self.loss_mask, strict=True) if not is_response
        ]

    @property
    def response_ids(self) -> list[int]:
        """Ids of the response."""
        return [int(token) for token, is_response in zip(self.input_ids, self.loss_mask, strict=True) if is_response]

    def example(self) -> Example:
        """The training sequence of this row."""
        return Example(np.asarray(self.input_ids, dtype=np.int32), np.asarray(self.loss_mask, dtype=bool))


class Store:
    """A folder of shards with one manifest."""

    def __init__(self, folder: Path) -> None:
        """Nothing is read or written yet."""
        self.folder = folder

    def open(self, manifest: Mapping[str, Any]) -> None:
        """Creates the store, or accepts the one that is there when its manifest is the same.

        Raises:
            UserError: the store was made with something else; the first differing key and both values are named. Or the
                folder cannot be written.
        """
        if (self.folder / MANIFEST).exists():
            return self._require(manifest)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_manifest(self.folder, manifest)
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written ({error.strerror or error})") from error

    def _require(self, manifest: Mapping[str, Any]) -> None:
        remedy = "give the run another name, or delete that folder to make its responses again"
        require_manifest(self.folder, manifest, remedy)

    def manifest(self) -> dict[str, Any]:
        """The manifest.

        Raises:
            UserError: missing or damaged.
        """
        return read_manifest(self.folder)

    def shard_path(self, shard: int) -> Path:
        """File of a shard."""
        return self.folder / f"shard-{shard:05d}.parquet"

    def missing(self, shards: int) -> list[int]:
        """Numbers of the shards 0 .. shards-1 that are not there."""
        return [shard for shard in range(shards) if not self.shard_path(shard).exists()]

    def has_all(self, shards: int, manifest: Mapping[str, Any]) -> bool:
        """Whether the store is there with all its shards, so that nobody need answer; it is not created.

        Raises:
            UserError: the store was made with something else.
        """
        if not (self.folder / MANIFEST).exists():
            return False
        self._require(manifest)
        return not self.missing(shards)

    def write_shard(self, shard: int, rows: Sequence[Row]) -> None:
        """Writes one shard, whole or not at all.

        Raises:
            UserError: disk full or folder not writable.
        """
        path = self.shard_path(shard)
        try:
            stream = pa.BufferOutputStream()
            pq.write_table(
                pa.Table.from_pylist([asdict(row) for row in rows], schema=SCHEMA), stream, compression="zstd"
            )
            content = stream.getvalue().to_pybytes()
            # First the checksum: a shard is there when its own file is, and then this one is too.
            write_bytes(_checksum_path(path), _checksum_line(path, content))
            write_bytes(path, content)
        except OSError as error:
            if not path.exists():
                _checksum_path(path).unlink(missing_ok=True)
            raise UserError(
                f"{path}: cannot be written ({error.strerror or error}); what was there before is whole"
            ) from error

    def read(self) -> list[Row]:
        """All rows in shard order, every shard's checksum checked.

        Raises:
            UserError: a shard that is damaged or cannot be read, or has no checksum.
        """
        rows: list[Row] = []
        for path in sorted(self.folder.glob("shard-*.parquet")):
            try:
                content = path.read_bytes()
                checksum = _checksum_path(path).read_bytes() if _checksum_path(path).exists() else None
                if checksum is None:
                    raise UserError(
                        f"{path}: its checksum {_checksum_path(path).name} is missing; delete the shard and run again "
                        "to make it anew"
                    )
                if checksum != _checksum_line(path, content):
                    raise UserError(
                        f"{path}: damaged shard (another checksum than {_checksum_path(path).name} says); delete it and run "
                        "again to make it anew"
                    )
                table = pq.read_table(pa.BufferReader(content))
            except (OSError, pa.ArrowException) as error:
                raise UserError(f"{path}: damaged shard ({error}); delete it and run again to make it anew") from error
            rows.extend(Row(**row) for row in table.to_pylist())
        return rows
