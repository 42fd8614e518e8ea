"""What the teacher said about each example, on disk: written once by any number of ranks, read where it lies.

    manifest.json          whose signal, in which form
    index.bin              entries of 64 bytes: whose record is where, its checksum; all zero = free
    shard-RANK-NNN.bin     records behind each other, nothing else

An example is known by its key, so a store grows: opened for other examples it still has what it knows of them, and of those
that are not asked for now.

A record is appended and handed to the system before its entry is written, and each opening writes into new files of its own
rank. So a killed writer leaves whole records, and an example without an entry is simply made again. Files are written in
place, not renamed: they would be copied for every record otherwise. Instead every record and every entry has a checksum that
is looked at whenever it is read; it begins with the manifest and the example's number, so that the record of another store or
of another example does not fit.
"""

import json
import os
import sys
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from data.files import MANIFEST, require_manifest, write_all, write_manifest, writing
from data.signals import codec
from data.signals.signal import SampledSignal, TopKSignal
from speculative.errors import UserError

FORMAT = 2
INDEX = "index.bin"
SHARD_BYTES = 256 << 20  # a file that has grown beyond this gets no more records
OPEN_FILES = 64
# 64 bytes divide a page: a killed process leaves no half of an entry. `figure`: tail mass (topk), distinct ids (sampled).
ENTRY = np.dtype(
    [("rank", "<u4"), ("shard", "<u4"), ("offset", "<u8"), ("nbytes", "<u8"), ("tokens", "<u8"), ("figure_sum", "<f8"),
     ("figure_max", "<f8"), ("key", "<u8"), ("record_crc", "<u4"), ("entry_crc", "<u4")]
)  # fmt: skip

StoredSignal = TopKSignal | SampledSignal


class _Damaged(Exception):
    """A file and what is wrong in it."""


def signal_manifest(
    kind: str,
    entries: int,
    *,
    temperature: float,
    vocab_rows: int,
    target: str,
    target_dtype: str,
    seed: int,
    prompts: bool = False,
) -> dict[str, Any]:
    """What sets one store apart from another: kind, k or samples, the loss's temperature, target, seed of draws, prompts or not.

    Raises:
        UserError: more entries than the vocabulary has tokens, more samples than a record can count.
    """
    if kind == "topk" and entries > vocab_rows:
        raise UserError(f"signal.k = {entries}: the target's vocabulary has {vocab_rows} tokens; give at most that")
    if kind == "sampled" and not 1 <= entries <= codec.MAX_SAMPLES:
        raise UserError(f"signal.samples = {entries}: from 1 to {codec.MAX_SAMPLES}")
    manifest = {
        "format": FORMAT, "kind": kind, "k" if kind == "topk" else "samples": entries, "temperature": temperature,
        "vocab_rows": vocab_rows, "target": target, "target_dtype": target_dtype,
    }  # fmt: skip
    manifest |= {"prompt_tokens": True} if prompts else {}
    return manifest | ({"seed": seed} if kind == "sampled" else {})


class SignalStore:
    """A folder of teacher signals, one record per example."""

    def __init__(self, folder: Path) -> None:
        """Nothing is read or written yet."""
        self.folder = folder

    def open(
        self,
        manifest: Mapping[str, Any],
        lengths: Sequence[int] | np.ndarray,
        keys: Sequence[int] | np.ndarray | None = None,
        *,
        rank: int = 0,
        repair: bool = False,
    ) -> None:
        """Creates the store, or accepts the one that is there.

        Args:
            manifest: see `signal_manifest`.
            lengths: response tokens of each example.
            keys: 64 bits that each example is known by, whatever its number; by default its number.
            rank: whose files this opening writes.
            repair: what is damaged counts as missing, with a line on stderr, instead of being refused.

        Raises:
            UserError: made from something else (the first differing key is named), damaged, or not writable.
        """
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._keys = np.asarray(np.arange(len(self._lengths)) if keys is None else keys, dtype="<u8")
        self._rank, self._repair = rank, repair
        self.kind, self._vocab_rows = str(manifest["kind"]), int(manifest["vocab_rows"])
        self._entries = int(manifest["k" if self.kind == "topk" else "samples"])
        self._seed = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
        self._files: dict[Path, int] = {}  # descriptors of those that were read last
        self._reading = threading.Lock()
        self._writer: tuple[int, int] | None = None  # file descriptor and number of the file
        if (self.folder / MANIFEST).exists():
            remedy = "give the run another name, or delete that folder to make its signal again"
            require_manifest(self.folder, manifest, remedy)
        else:
            self._create(manifest)
        path = self.folder / INDEX
        try:
            # A store that is only read may lie where nobody can write.
            self._index = os.open(path, os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read ({error.strerror}); delete the folder and {self._again}"
            ) from error
        self._slots = self._find_slots()

    def _find_slots(self) -> np.ndarray:
        """The place in the index of each example: where its entry is, or a free one.

        Free places go out in order to what is missing, in order: ranks that look while others write agree on the rest.
        """
        content = self._whole_index()
        if len(content) % ENTRY.itemsize:
            path = self.folder / INDEX
            raise UserError(f"{path}: damaged, {len(content)} bytes; delete the folder and {self._again}")
        entries = np.frombuffer(content, ENTRY)
        used = np.frombuffer(content, np.uint8).reshape(-1, ENTRY.itemsize).max(axis=1) > 0
        places = np.flatnonzero(used)
        places = places[np.argsort(entries["key"][places], kind="stable")]
        known = entries["key"][places]
        slots = np.full(len(self._keys), -1)
        if len(known):
            nearest = np.minimum(np.searchsorted(known, self._keys), len(known) - 1)
            slots = np.where(known[nearest] == self._keys, places[nearest], -1)
        missing, free = np.flatnonzero(slots < 0), np.flatnonzero(~used)
        more = np.arange(len(used), len(used) + max(0, len(missing) - len(free)))
        slots[missing] = np.concatenate([free, more])[: len(missing)]
        return slots

    def _whole_index(self) -> bytes:
        return os.pread(self._index, os.fstat(self._index).st_size, 0)

    @property
    def _again(self) -> str:
        return f"run `understudy respond {self.folder.parent / 'config.yaml'} --signal {self.kind}` again"

    def _create(self, manifest: Mapping[str, Any]) -> None:
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            # The manifest comes last: where it is, the index is too. Two ranks may do this at the same time.
            os.close(os.open(self.folder / INDEX, os.O_RDWR | os.O_CREAT, 0o644))
            write_manifest(self.folder, manifest)

    def close(self) -> None:
        """Gives the files back. What was written is there already."""
        if self._writer is not None:
            os.close(self._writer[0])
            self._writer = None
        os.close(self._index)
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Response tokens of these examples."""
        return self._lengths[list(indices)].tolist()

    def keys(self, indices: Sequence[int]) -> list[int]:
        """What these examples are known by."""
        return self._keys[list(indices)].tolist()

    def present(self) -> np.ndarray:
        """Which examples have a record, bool; records themselves are not looked at.

        Raises:
            UserError: a damaged entry, unless opened to repair.
        """
        content, size = self._whole_index(), ENTRY.itemsize
        starts = (self._slots * size).tolist()
        return np.array(
            [
                self._sound(index, lambda i=index, at=start: self._parsed(i, content[at : at + size]))
                for index, start in enumerate(starts)
            ],
            dtype=bool,
        )

    def missing(self) -> list[int]:
        """Numbers of the examples without a record."""
        return np.flatnonzero(~self.present()).tolist()

    def lacking(self, indices: Sequence[int]) -> list[int]:
        """Which of these examples have to be made: no record, or, when opened to repair, a damaged one. Each once."""
        check = self._load if self._repair else self._entry
        return [index for index in dict.fromkeys(indices) if not self._sound(index, lambda i=index: check(i))]

    def write(self, index: int, signal: StoredSignal) -> None:
        """Stores one example's rows (on the CPU); what was stored of it before is forgotten.

        Raises:
            UserError: disk full or folder not writable.
        """
        rows = signal.ids_RK if isinstance(signal, TopKSignal) else signal.ids_RS
        if len(rows) != self._lengths[index] or isinstance(signal, TopKSignal) != (self.kind == "topk"):
            raise ValueError(f"example {index} has {self._lengths[index]} tokens of kind {self.kind}, not these")
        if isinstance(signal, TopKSignal):
            record, figures = codec.encode_topk(signal, self._vocab_rows), signal.log_tail_R.double().exp()
        else:
            record = codec.encode_sampled(signal, self._entries, self._vocab_rows)
            figures = (signal.weights_RS > 0).sum(-1).double()
        with writing(self.folder, "; what was there before is whole"):
            file, shard = self._file()
            key = int(self._keys[index])
            offset = os.lseek(file, 0, os.SEEK_END)
            write_all(file, record)
            entry = np.zeros((), ENTRY)
            entry["rank"], entry["shard"], entry["offset"], entry["nbytes"] = self._rank, shard, offset, len(record)
            entry["tokens"], entry["key"], entry["record_crc"] = len(rows), key, self._crc(record, key)
            entry["figure_sum"], entry["figure_max"] = float(figures.sum()), float(max(figures.tolist(), default=0.0))
            entry["entry_crc"] = self._crc(entry.tobytes()[:-4], key)
            os.pwrite(self._index, entry.tobytes(), int(self._slots[index]) * ENTRY.itemsize)

    def read(self, indices: Sequence[int]) -> StoredSignal:
        """Rows of these examples behind each other, in this order, on the CPU. Every record's checksum is checked.

        Safe to call from several threads.

        Raises:
            UserError: an example that is missing or damaged; file and number are named.
        """
        signals: list[Any] = []
        for index in indices:
            try:
                signal = self._load(index)
            except _Damaged as damage:
                raise self._refusal(index, damage) from damage
            if signal is None:
                raise UserError(f"{self.folder / INDEX}: there is no signal of example {index} yet; {self._again}")
            signals.append(signal)
        return codec.join_topk(signals, self._entries) if self.kind == "topk" else codec.join_sampled(signals)

    def check_files(self) -> None:
        """Looks at names and sizes alone: a record itself is checked when it is read.

        Raises:
            UserError: a file that an entry points into is missing or ends early.
        """
        entries = self._present_entries()
        files, place = np.unique(entries[["rank", "shard"]], return_inverse=True)
        ends = np.zeros(len(files), dtype=np.uint64)
        np.maximum.at(ends, place.reshape(-1), entries["offset"] + entries["nbytes"])
        for file, end in zip(files, ends.tolist(), strict=True):
            path = self._shard_path(int(file["rank"]), int(file["shard"]))
            if not path.exists() or path.stat().st_size < end:
                fault = "ends early" if path.exists() else "missing"
                raise UserError(f"{path}: {fault}; delete the folder and {self._again}")

    def verify(self, *, rank: int = 0, ranks: int = 1, show: bool = False) -> None:
        """Reads every record there is, once; of several ranks each its share.

        Raises:
            UserError: a damaged one, unless opened to repair: then it is forgotten, with a line on stderr.
        """
        numbers = range(rank, len(self._lengths), ranks)
        # On stderr: stdout may be JSON for a script.
        for index in track(numbers, "checking the signal", console=Console(stderr=True), disable=not show):
            self._sound(index, lambda i=index: self._load(i))

    def facts(self) -> dict[str, Any]:
        """{kind, examples, tokens, bytes_per_token, and of each token tail_mean, tail_max (topk) or distinct_mean, distinct_max}.

        The tail mass bounds what truncation does to acceptance: alpha from the store is low by at most `tail_mean`, and either
        side of that by the codec's rounding.
        """
        entries = self._present_entries()
        tokens = int(entries["tokens"].sum())
        what = "tail" if self.kind == "topk" else "distinct"
        return {
            "kind": self.kind,
            "examples": len(entries),
            "tokens": tokens,
            "bytes_per_token": (int(entries["nbytes"].sum()) + entries.nbytes) / max(tokens, 1),
            f"{what}_mean": float(entries["figure_sum"].sum()) / max(tokens, 1),
            f"{what}_max": float(entries["figure_max"].max(initial=0.0)),
        }

    def _present_entries(self) -> np.ndarray:
        places = self._slots[self.present()]
        return np.frombuffer(self._whole_index(), ENTRY)[places]

    def _crc(self, content: bytes, key: int) -> int:
        return zlib.crc32(content, zlib.crc32(key.to_bytes(8, "little"), self._seed))

    def _file(self) -> tuple[int, int]:
        """The file that this opening appends to: nobody else ever writes into it."""
        if self._writer is not None and os.fstat(self._writer[0]).st_size >= SHARD_BYTES:
            os.close(self._writer[0])
            self._writer = None
        # Counted when a file is begun, not at every record.
        number = 0 if self._writer else len(list(self.folder.glob(f"shard-{self._rank:03d}-*.bin")))
        while self._writer is None:
            try:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
                self._writer = os.open(self._shard_path(self._rank, number), flags, 0o644), number
            except FileExistsError:
                number += 1
        return self._writer

    def _shard_path(self, rank: int, shard: int) -> Path:
        return self.folder / f"shard-{rank:03d}-{shard:03d}.bin"

    def _entry(self, index: int) -> np.ndarray | None:
        return self._parsed(index, os.pread(self._index, ENTRY.itemsize, int(self._slots[index]) * ENTRY.itemsize))

    def _parsed(self, index: int, raw: bytes) -> np.ndarray | None:
        """An entry, None when it is blank. Raises _Damaged."""
        if not any(raw):
            return None
        if len(raw) != ENTRY.itemsize:
            raise _Damaged(f"{self.folder / INDEX}: ends early")
        entry = np.frombuffer(raw, ENTRY)[0]
        if entry["key"] != self._keys[index] or entry["entry_crc"] != self._crc(raw[:-4], int(entry["key"])):
            raise _Damaged(f"{self.folder / INDEX}: the entry has another checksum")
        return entry

    def _load(self, index: int) -> StoredSignal | None:
        """An example's signal, None when it is not there. Raises _Damaged."""
        entry = self._entry(index)
        if entry is None:
            return None
        path = self._shard_path(int(entry["rank"]), int(entry["shard"]))
        content = self._content(path, int(entry["offset"]), int(entry["nbytes"]))
        if self._crc(content, int(entry["key"])) != entry["record_crc"]:
            raise _Damaged(f"{path}: the record has another checksum")
        record, tokens = np.frombuffer(content, np.uint8), int(self._lengths[index])
        try:
            if self.kind == "topk":
                return codec.decode_topk(record, tokens, self._entries, self._vocab_rows)
            return codec.decode_sampled(record, tokens, self._entries, self._vocab_rows)
        except ValueError as error:
            raise _Damaged(f"{path}: {error}") from error

    def _content(self, path: Path, offset: int, size: int) -> bytes:
        """Bytes of a file. Read, not mapped: what was looked at once would stay in memory. Raises _Damaged."""
        with self._reading:
            if path not in self._files:
                while len(self._files) >= OPEN_FILES:
                    os.close(self._files.pop(next(iter(self._files))))
                try:
                    self._files[path] = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise _Damaged(f"{path}: {error.strerror}") from error
            content = os.pread(self._files[path], size, offset)
        if len(content) != size:
            raise _Damaged(f"{path}: ends early")
        return content

    def _sound(self, index: int, look: Any) -> bool:
        """Whether looking finds something. Damage is refused, or, when opened to repair, told and forgotten."""
        try:
            return look() is not None
        except _Damaged as damage:
            if not self._repair:
                raise self._refusal(index, damage) from damage
            print(f"understudy: {damage} (example {index}); it is made again", file=sys.stderr)
            os.pwrite(self._index, bytes(ENTRY.itemsize), int(self._slots[index]) * ENTRY.itemsize)
            return False

    def _refusal(self, index: int, damage: _Damaged) -> UserError:
        return UserError(f"{damage} (example {index}); {self._again}, which makes it anew, or delete the folder first")
