"""The token store: responses in parquet shards beside a manifest that says which target, tokenizer and settings made them.

A shard holds a fixed list of jobs (prompt, sample number), is written under a temporary name and renamed, and is never
changed. So a killed writer leaves whole shards, and whoever resumes makes the missing ones: nothing lost, nothing twice.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.collate import Example
from speculative.errors import UserError

MANIFEST = "manifest.json"
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


def write_json(path: Path, value: Any) -> None:
    """Writes JSON under a temporary name, then renames."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


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
        wanted = json.loads(json.dumps(manifest))
        path = self.folder / MANIFEST
        if not path.exists():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_json(path, wanted)
            except OSError as error:
                raise UserError(f"{self.folder}: cannot be written ({error.strerror or error})") from error
            return
        found = self.manifest()
        for key in sorted(set(wanted) | set(found)):
            if wanted.get(key) != found.get(key):
                raise UserError(
                    f"{self.folder}: made with another {key} ({_short(found.get(key))}, now {_short(wanted.get(key))}); "
                    "give the run another name, or delete that folder to make its responses again"
                )

    def manifest(self) -> dict[str, Any]:
        """The manifest.

        Raises:
            UserError: missing or damaged.
        """
        try:
            return json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.folder / MANIFEST}: not a readable manifest; delete the folder to make it again"
            ) from error

    def shard_path(self, shard: int) -> Path:
        """File of a shard."""
        return self.folder / f"shard-{shard:05d}.parquet"

    def missing(self, shards: int) -> list[int]:
        """Numbers of the shards 0 .. shards-1 that are not there."""
        return [shard for shard in range(shards) if not self.shard_path(shard).exists()]

    def write_shard(self, shard: int, rows: Sequence[Row]) -> None:
        """Writes one shard, whole or not at all.

        Raises:
            UserError: disk full or folder not writable.
        """
        path = self.shard_path(shard)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            pq.write_table(
                pa.Table.from_pylist([asdict(row) for row in rows], schema=SCHEMA), temporary, compression="zstd"
            )
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(
                f"{path}: cannot be written ({error.strerror or error}); what was there before is whole"
            ) from error

    def read(self) -> list[Row]:
        """All rows in shard order.

        Raises:
            UserError: a shard that cannot be read.
        """
        rows: list[Row] = []
        for path in sorted(self.folder.glob("shard-*.parquet")):
            try:
                table = pq.read_table(path)
            except (OSError, pa.ArrowException) as error:
                raise UserError(f"{path}: damaged shard ({error}); delete it and run again to make it anew") from error
            rows.extend(Row(**row) for row in table.to_pylist())
        return rows


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
