"""Immutable Arrow files of rows, each with its checksum in its name.

    KIND-LABEL-HHHHHHHHHHHHHHHH.arrow    rows; a label is optional, and the digits are the first 16 of the SHA-256 of the file

A file is written under a temporary name, renamed and never changed. So a killed writer leaves whole files only, any number of writers
share a folder, and a damaged file does not match its name.
"""

import functools
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

from data.files import write_bytes, writing
from speculative.errors import UserError

MAPPED_SHARDS = 8  # Files of the rows that were read last; older ones are unmapped to free memory.
DIGITS = 16


class MissingShard(UserError):
    """A file that is not there, or was deleted by another process."""


class DamagedShard(UserError):
    """A file that cannot be read or does not match the checksum in its name."""

    def __init__(self, path: Path, fault: str) -> None:
        self.path, self.fault = path, f"{path}: damaged shard ({fault})"
        super().__init__(f"{self.fault}; delete it, and the same command makes its rows again")


class Shards:
    """The files of one kind in a folder. Safe to use from threads."""

    def __init__(self, folder: Path, kind: str) -> None:
        """Nothing is read or written yet."""
        self.folder, self.kind = folder, kind
        self.mapped = functools.lru_cache(MAPPED_SHARDS)(self.table)

    def names(self) -> list[str]:
        """Names of all files, sorted."""
        if not self.folder.is_dir():
            return []
        start = f"{self.kind}-"
        return sorted(one for one in os.listdir(self.folder) if one.startswith(start) and one.endswith(".arrow"))

    def write(self, table: pa.Table, label: str = "") -> str:
        """Write a file atomically and return its name; UserError if the disk is full."""
        stream = pa.BufferOutputStream()
        with pa.ipc.new_file(stream, table.schema) as writer:
            writer.write_table(table)
        content = stream.getvalue().to_pybytes()
        parts = self.kind, label, hashlib.sha256(content).hexdigest()[:DIGITS]
        path = self.folder / f"{'-'.join(filter(None, parts))}.arrow"
        with writing(path, "; earlier shards stay"):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_bytes(path, content)
        return path.name

    def table(self, name: str) -> pa.Table:
        """All memory-mapped columns of a file. (Arrow would allocate memory for all of them when only some are read.)

        Its checksum is not compared. UserError if the file is missing or damaged.
        """
        path = self.folder / name
        try:
            with pa.memory_map(str(path)) as source:
                return pa.ipc.open_file(source).read_all()
        except FileNotFoundError as error:
            raise MissingShard(f"{path}: this shard is missing; the same command makes its rows again") from error
        except (OSError, pa.ArrowException) as error:
            raise DamagedShard(path, " ".join(str(error).split())[:80]) from error

    def values(self, name: str, column: str, row: int) -> np.ndarray:
        """One row's list in a file, as a view of the file (booleans are copied)."""
        lists = self.mapped(name)[column].chunk(0)
        return lists[row].values.to_numpy(zero_copy_only=False)

    def verify(self, names: Sequence[str]) -> None:
        """Compare files with their checksums; UserError for one that is missing or damaged."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._verify, names))

    def _verify(self, name: str) -> None:
        path = self.folder / name
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DamagedShard(path, str(error.strerror)) from error
        if digest[:DIGITS] != path.stem.rpartition("-")[2]:
            raise DamagedShard(path, "it does not match the checksum in its name")


def lists_of(values: Sequence[np.ndarray]) -> pa.ListArray:
    """An Arrow column with one array per row."""
    offsets = np.cumsum([0, *map(len, values)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values)))
