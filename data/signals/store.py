"""The teacher's signals for the examples of a token store, in shards next to the responses, written by any number of ranks.

    signal-RANK-NNN.arrows   an Arrow stream: a schema with the settings of the signal, then rows

A row is identified by its example's key, so a store can grow: existing rows stay, and signals with other settings can share the
folder. Rows are appended in messages, and each writer uses new files of its own rank. A killed writer therefore leaves whole messages,
perhaps followed by an incomplete one, and examples without a row are computed again. Every row has a checksum over settings, key and
values, which is verified when the row is read.
"""

import contextlib
import functools
import io
import json
import os
import sys
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.progress import track

from data.files import other_key, write_all, writing
from data.signals.columns import COLUMNS, decode, encode, lists_of
from data.signals.signal import TopKSignal, joined
from speculative.errors import UserError

FORMAT = 4
SHARDS = "signal-*.arrows"
SHARD_BYTES = 64 << 20  # no rows are appended to a file above this size
MAPPED_FILES = 8  # most recently read files; the memory of others is released
_FACTS = [("key", pa.uint64()), ("tokens", pa.int32()), ("tail_sum", pa.float64()), ("tail_max", pa.float64())]
_FOUND = np.dtype([("file", "<i4"), ("message", "<i8"), ("row", "<i4"), ("tail_sum", "<f8"), ("tail_max", "<f8")])
# Errors that Arrow and numpy raise for bytes that are not a message, or a row that does not fit its schema.
_ODD = (pa.ArrowException, OSError, EOFError, ValueError, LookupError, TypeError)

SignalManifest = dict[str, str | float]


class _Damaged(UserError):
    """A damaged file."""

    def __init__(self, path: Path, fault: str, again: str) -> None:
        super().__init__(f"{path}: {fault}; run {again} to compute it again")
        self.path, self.fault = path, fault


@dataclass(frozen=True)
class SignalFacts:
    """Size of a signal. `mean`, `largest`: the tail mass of a token.

    The tail mass bounds the effect of truncation: alpha computed from the store is too low by at most its mean, plus or minus
    the rounding of the codes.
    """

    examples: int
    tokens: int
    bytes_per_token: float
    mean: float
    largest: float


@dataclass
class _File:
    """How far a file was read, and the tokens of its rows. `schema` None: made with other settings."""

    number: int
    schema: pa.Schema | None = None
    end: int = 0
    tokens: int = 0


def signal_manifest(
    k: int,
    *,
    temperature: float,
    vocab_rows: int,
    target: str,
    target_dtype: str,
    prompts: bool = False,
) -> SignalManifest:
    """The settings that identify a signal: k, the loss's temperature, target, with prompts or not.

    Raises UserError: more entries than the vocabulary has tokens.
    """
    if k > vocab_rows:
        raise UserError(
            f"signal.k = {k}: the target's vocabulary has {vocab_rows} tokens; set it to at most {vocab_rows}"
        )
    manifest: SignalManifest = {
        "format": FORMAT,
        "k": k,
        "temperature": temperature,
        "vocab_rows": vocab_rows,
        "target": target,
        "target_dtype": target_dtype,
    }
    return manifest | ({"prompt_tokens": True} if prompts else {})


class SignalStore:
    """The teacher's signals for N examples with U distinct keys, in the folder of their token store.

    `lengths_N`, `keys_N`: response tokens and key of each example, once it is open.
    """

    def __init__(self, folder: Path) -> None:
        """Nothing is read or written here."""
        self.folder = folder

    def open(
        self,
        manifest: SignalManifest,
        lengths: Sequence[int] | np.ndarray,
        keys: Sequence[int] | np.ndarray | None = None,
        *,
        rank: int = 0,
        repair: bool = False,
    ) -> None:
        """Read the index of the existing files. The folder may be empty or missing.

        Args:
            manifest: see `signal_manifest`.
            lengths: response tokens of each example.
            keys: 64 bits that identify each example; by default its number.
            rank: rank of the files that this process writes.
            repair: delete damaged files, with a line on stderr, and count their examples as missing, instead of raising an error.
        """
        self.lengths_N = np.asarray(lengths, dtype=np.int64)
        self.keys_N = np.asarray(np.arange(len(self.lengths_N)) if keys is None else keys, dtype=np.uint64)
        self._known_U, self._place_N = np.unique(self.keys_N, return_inverse=True)
        self._found_U = np.zeros(len(self._known_U), _FOUND)
        self._found_U["file"] = -1
        self.manifest = manifest
        self._k, self._vocab_rows = int(manifest["k"]), int(manifest["vocab_rows"])
        settings = json.dumps(self.manifest, sort_keys=True)
        lists = [(name, pa.list_(kind)) for name, kind in COLUMNS.items()]
        self._schema = pa.schema([*_FACTS, ("crc", pa.uint32()), *lists], metadata={"signal": settings})
        self._seed = zlib.crc32(settings.encode())
        self._rank, self._repair = rank, repair
        self._paths: list[Path] = []  # all files seen so far, by number
        self._files: dict[Path, _File] = {}
        self._other: dict[str, Any] | None = None  # settings of files made with other settings
        self._reading = threading.Lock()
        self._mapped = functools.lru_cache(MAPPED_FILES)(lambda number, _: pa.memory_map(str(self._paths[number])))
        self._writer: io.FileIO | None = None  # only this process writes to it
        self._look()

    @property
    def again(self) -> str:
        """The command that makes the signal."""
        return f"`understudy respond {self.folder.parents[1] / 'config.yaml'} --signal topk`"

    def faults(self) -> list[str]:
        """Possible reasons for missing rows: incomplete files, or a signal made with other settings."""
        cut = [path for path, file in self._files.items() if file.schema is not None and path.stat().st_size > file.end]
        other = [] if self._other is None else [f"the existing signal was {other_key(self._other, self.manifest)}"]
        return [f"{path.name} ends in the middle of a row or is damaged" for path in cut] + other

    def close(self) -> None:
        """Close the files. Written rows are already on disk."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._mapped.cache_clear()

    def present(self) -> np.ndarray:
        """Which examples have a row, bool. The rows are not read."""
        self._look()
        return self._found_U["file"][self._place_N] >= 0

    def missing(self) -> list[int]:
        """Numbers of the examples without a row."""
        return np.flatnonzero(~self.present()).tolist()

    def lacking(self, indices: Sequence[int]) -> list[int]:
        """Which of these examples must be computed: those without a row and, with repair, those with a damaged row. Each once."""
        if self._without(indices):
            self._look()  # another rank may have written it
        for index in indices:
            self._sound(index)
        return self._without(indices)

    def write(self, signals: Mapping[int, TopKSignal]) -> None:
        """Store rows of examples (CPU tensors) in one message, instead of their earlier rows; UserError if the disk is full."""
        parts = [self._row(index, signal) for index, signal in signals.items()]
        arrays = [pa.array([part[name] for part in parts], kind) for name, kind in [*_FACTS, ("crc", pa.uint32())]]
        arrays += [lists_of([part[name] for part in parts]) for name in COLUMNS]
        message = pa.RecordBatch.from_arrays(arrays, schema=self._schema).serialize()
        with writing(self.folder, "; earlier records are intact"):
            file = self._file()
            self._writer = None  # a failed write leaves a partial message, and nothing after it could be read
            write_all(file.fileno(), memoryview(message))
        self._writer = file
        self._take_in(Path(file.name))

    def read(self, indices: Sequence[int]) -> TopKSignal:
        """Rows of these examples, concatenated in this order, on the CPU; safe to call from several threads.

        Every checksum is verified; UserError, with file and number, for an example that is missing or damaged.
        """
        signals = [self._load(index) for index in indices]
        return joined(signals or [decode(self._nothing, 0, self._k, self._vocab_rows)])

    def verify(self, *, rank: int = 0, ranks: int = 1, show: bool = False) -> None:
        """Read every existing row once, each rank its share. A damaged row is a UserError; with repair its file is deleted, with a line."""
        numbers = range(rank, len(self.lengths_N), ranks)
        # On stderr, because stdout can be JSON for a script.
        for index in track(numbers, "checking the signal", console=Console(stderr=True), disable=not show):
            self._sound(index, read=True)

    def facts(self) -> SignalFacts:
        """Facts about the examples that have a row."""
        present = self.present()
        rows, tokens = self._found_U[self._place_N[present]], int(self.lengths_N[present].sum())
        own = [file for file in self._files.values() if file.schema is not None]
        return SignalFacts(
            len(rows),
            tokens,
            sum(file.end for file in own) / max(1, sum(file.tokens for file in own)),
            float(rows["tail_sum"].sum()) / max(tokens, 1),
            float(rows["tail_max"].max(initial=0.0)),
        )

    @property
    def _nothing(self) -> dict[str, np.ndarray]:
        return {name: np.zeros(0, kind.to_pandas_dtype()) for name, kind in COLUMNS.items()}

    def _row(self, index: int, signal: TopKSignal) -> Mapping[str, Any]:
        if len(signal.ids_RK) != self.lengths_N[index]:
            raise ValueError(f"example {index} has {self.lengths_N[index]} tokens, not {len(signal.ids_RK)}")
        tails = signal.log_tail_R.double().exp()
        row: dict[str, Any] = {
            "key": int(self.keys_N[index]),
            "tokens": len(signal.ids_RK),
            "tail_sum": float(tails.sum()),
            "tail_max": float(max(tails.tolist(), default=0.0)),
            **encode(signal, self._vocab_rows),
        }
        return {**row, "crc": self._crc(row)}

    def _crc(self, row: Mapping[str, Any]) -> int:
        facts = np.array([tuple(row[name] for name, _ in _FACTS)], "<u8,<i4,<f8,<f8")
        crc = zlib.crc32(facts.tobytes(), self._seed)
        for name in COLUMNS:
            crc = zlib.crc32(row[name].tobytes(), crc)
        return crc

    def _file(self) -> io.FileIO:
        """The file that this process appends to."""
        if self._writer is not None:
            state = os.fstat(self._writer.fileno())
            if state.st_size < SHARD_BYTES and state.st_nlink:  # not deleted by a rank that found damage in it
                return self._writer
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        number = len(list(self.folder.glob(f"signal-{self._rank:03d}-*.arrows")))
        while True:
            with contextlib.suppress(FileExistsError):
                file = io.FileIO(self.folder / f"signal-{self._rank:03d}-{number:03d}.arrows", "x")
                write_all(file.fileno(), memoryview(self._schema.serialize()))
                return file
            number += 1

    def _look(self) -> None:
        """Index rows written since the last call, by any rank, and drop deleted files."""
        there = sorted(self.folder.glob(SHARDS))
        for path in there:
            self._take_in(path)
        for path in self._files.keys() - set(there):
            self._forget(path)

    def _take_in(self, path: Path) -> None:
        """Index the new messages of a file, up to the first incomplete one: its writer was killed or is still writing."""
        if path not in self._files:
            self._files[path] = _File(len(self._paths))
            self._paths.append(path)
        file = self._files[path]
        try:
            if path.stat().st_size <= file.end or (file.schema is None and file.end):
                return
            with pa.memory_map(str(path)) as source:
                source.seek(file.end)
                if not file.end:
                    schema = pa.ipc.read_schema(source)
                    if schema == self._schema and schema.metadata == self._schema.metadata:
                        file.schema = schema
                    else:
                        self._other = json.loads((schema.metadata or {}).get(b"signal", b"{}"))
                    file.end = source.tell()
                while file.schema is not None and file.end < source.size():
                    batch = _message(source, file.schema)
                    self._note(file, batch)
                    file.end = source.tell()
        except _ODD:
            return

    def _note(self, file: _File, batch: pa.RecordBatch) -> None:
        """Record where the rows of a message are."""
        keys = batch["key"].to_numpy()
        file.tokens += int(batch["tokens"].to_numpy().sum())
        places = np.searchsorted(self._known_U, keys)
        asked = places < len(self._known_U)
        asked[asked] = self._known_U[places[asked]] == keys[asked]
        found = np.zeros(int(asked.sum()), _FOUND)
        found["file"], found["message"], found["row"] = file.number, file.end, np.flatnonzero(asked)
        for name in ("tail_sum", "tail_max"):
            found[name] = batch[name].to_numpy()[asked]
        self._found_U[places[asked]] = found

    def _forget(self, path: Path) -> None:
        self._found_U["file"][self._found_U["file"] == self._files.pop(path).number] = -1

    def _found(self, index: int) -> Any:
        return self._found_U[self._place_N[index]]

    def _without(self, indices: Sequence[int]) -> list[int]:
        return [index for index in dict.fromkeys(indices) if self._found(index)["file"] < 0]

    def _load(self, index: int) -> TopKSignal:
        """An example's signal. Raises UserError if it is missing or damaged."""
        found = self._found(index)
        if found["file"] < 0:
            raise UserError(f"{self.folder}: example {index} has no signal; run {self.again}")
        path = self._paths[found["file"]]
        try:
            with self._reading:
                source = self._mapped(int(found["file"]), self._files[path].end)
                source.seek(int(found["message"]))
                batch = _message(source, self._schema)
            place = int(found["row"])
            row = {name: batch[name][place].as_py() for name in (*dict(_FACTS), "crc")}
            row |= {name: _values(batch[name], place) for name in COLUMNS}
            if row["crc"] != self._crc(row) or row["key"] != self.keys_N[index]:
                raise ValueError("another checksum")
            return decode(row, int(self.lengths_N[index]), self._k, self._vocab_rows)
        except _ODD as error:
            fault = f"a row cannot be read ({' '.join(str(error).split())[:80]}) (example {index})"
            raise _Damaged(path, fault, self.again) from error

    def _sound(self, index: int, read: bool = False) -> None:
        """Verify an example's row, if `read` or with repair. Damage raises an error; with repair the file is deleted."""
        try:
            if (read or self._repair) and self._found(index)["file"] >= 0:
                self._load(index)
        except _Damaged as damage:
            if not self._repair:
                raise
            if damage.path.exists():
                print(f"understudy: {damage.path}: {damage.fault}; its signals are computed again", file=sys.stderr)
                damage.path.unlink(missing_ok=True)
            self._forget(damage.path)


def _message(source: Any, schema: pa.Schema) -> pa.RecordBatch:
    """The rows of the message at the current position of a mapped file."""
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)
    batch.validate()
    return batch


def _values(lists: pa.ListArray, row: int) -> np.ndarray:
    """One row's list in a file. Damaged offsets give another list, which fails the checksum."""
    start, stop = (lists.offsets[place].as_py() for place in (row, row + 1))
    return lists.values[start:stop].to_numpy()
