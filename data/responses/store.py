"""The token store: responses in Arrow shards, with a manifest of the target, tokenizer and settings that made them.

    manifest.json            what all rows were made with
    shard-NNNNN.arrow        rows (prompt, sample number), written under a temporary name and renamed, never changed
    checksum-NNNNN.sha256    checksum of the shard, for `sha256sum -c`; a shard that does not match is refused
    index.arrow              the rows in use and their order
    signal-RANK-NNN.arrows   stored probabilities of the target, if wanted: see `data/signals/store.py`

A killed writer leaves only complete shards, and a resumed one makes the missing rows. The key of a row is its prompt id and sample
number, so a store can grow when prompts are added.
"""

import functools
import hashlib
import operator
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.batches.collate import Example
from data.batches.examples import Examples, example_key
from data.files import MANIFEST, Manifest, read_manifest, require_manifest, write_bytes, write_manifest, writing
from data.signals.columns import lists_of
from speculative.errors import UserError

INDEX = "index.arrow"
MAPPED_SHARDS = 8  # Shards of the rows that were read last; older ones are unmapped to free memory.
SCANNED_SHARDS = 256  # Shards mapped at once while all rows are listed.
AGAIN = "delete it and give the same command again to make it again"
# Facts of a row, then its tokens.
FACTS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("sample", pa.int32()),
        ("domain", pa.string()),
        ("finished", pa.bool_()),
        ("tokens", pa.int32()),
        ("response_tokens", pa.int32()),
        ("key", pa.uint64()),
    ]
)
TOKENS = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("log_target_probs", pa.list_(pa.float32())),
    ]
)
LISTED = pa.schema([*FACTS, ("shard", pa.string()), ("place", pa.int32())])


@dataclass(frozen=True)
class Row:
    """One response with its prompt.

    `loss_mask` is true on response tokens. `log_target_probs` has the natural logarithm of the target's probability of each response
    token under the manifest's sampling settings (0 under greedy); it is empty if the target did not write the response.
    `finished`: it ended by itself, not by max_tokens.
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
        return [int(token) for token in compress(self.input_ids, map(operator.not_, self.loss_mask))]

    @property
    def response_ids(self) -> list[int]:
        return [int(token) for token in compress(self.input_ids, self.loss_mask)]

    @property
    def key(self) -> int:
        """64-bit key of the row."""
        example = self.example()
        return example_key(example.input_ids, example.loss_mask, f"{self.prompt_id}:{self.sample}")

    def example(self) -> Example:
        """The training sequence of this row."""
        return Example(np.asarray(self.input_ids, dtype=np.int32), np.asarray(self.loss_mask, dtype=bool))


class StoredRows(Sequence[Row]):
    """Rows of a store in a given order. Tokens stay on disk and are memory-mapped on access. Safe to use from threads.

    Shapes: N rows. `tokens_N`: number of ids of prompt and response; `response_tokens_N`: number of response ids.
    """

    def __init__(self, folder: Path, listed: pa.Table) -> None:
        """``listed``: the columns of `LISTED`."""
        self.folder, self.listed = folder, listed
        self.tokens_N, self.response_tokens_N, keys_N, self._places_N = (
            listed[name].to_numpy() for name in ("tokens", "response_tokens", "key", "place")
        )
        shards = listed["shard"].combine_chunks().dictionary_encode()
        self._names, self._shards_N = shards.dictionary.to_pylist(), shards.indices.to_numpy()
        self._mapped = functools.lru_cache(MAPPED_SHARDS)(self._map)
        self.examples = Examples(self.example, self.tokens_N, self.response_tokens_N, keys_N)

    def __len__(self) -> int:
        return len(self.tokens_N)

    @property
    def files(self) -> list[Path]:
        """The shards that hold the rows."""
        return [self.folder / name for name in self._names]

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...
    def __getitem__(self, number: int | slice) -> Row | list[Row]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        facts = {name: self.listed[name][number].as_py() for name in ("prompt_id", "sample", "domain", "finished")}
        return Row(**facts, **{name: self._values(name, number).tolist() for name in TOKENS.names})

    def example(self, number: int) -> Example:
        """The training sequence of a row; its ids are a view of the file."""
        return Example(self._values("input_ids", number), self._values("loss_mask", number))

    def _values(self, name: str, number: int) -> np.ndarray:
        column = self._mapped(int(self._shards_N[number]))[name].chunk(0)
        return column[int(self._places_N[number])].values.to_numpy(zero_copy_only=name != "loss_mask")

    def _map(self, shard: int) -> pa.Table:
        return _mapped_table(self.folder / self._names[shard])


class Store:
    """A folder of shards with a manifest."""

    def __init__(self, folder: Path) -> None:
        """Nothing is read or written yet."""
        self.folder = folder

    def open(self, manifest: Manifest) -> None:
        """Create the store or accept one with this manifest; UserError with the first key that differs, or for a disk that is full."""
        if (self.folder / MANIFEST).exists():
            remedy = "give the run another name, or delete that folder to make its responses again"
            return require_manifest(self.folder, manifest, remedy)
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_manifest(self.folder, manifest)

    def manifest(self) -> Manifest:
        """The manifest; UserError if it is missing or damaged."""
        return read_manifest(self.folder)

    def shard_path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.arrow"

    def write_shard(self, shard: int, rows: Sequence[Row]) -> None:
        """Write a shard atomically; if its number is taken, named with a hash of the rows' keys too. UserError if the disk is full."""
        path, table = self.shard_path(shard), _table_of(rows)
        if path.exists():
            names = "".join(f"{row.prompt_id}:{row.sample}\n" for row in rows)
            digest = hashlib.sha256(names.encode("utf-8", "surrogatepass")).hexdigest()
            path = path.with_stem(f"{path.stem}-{digest[:12]}")
        try:
            stream = pa.BufferOutputStream()
            with pa.ipc.new_file(stream, table.schema) as writer:
                writer.write_table(table)
            content = stream.getvalue().to_pybytes()
            # The checksum comes first, so that every existing shard has one.
            write_bytes(_checksum_path(path), _checksum_line(path, hashlib.sha256(content).hexdigest()))
            write_bytes(path, content)
        except OSError as error:
            if not path.exists():
                _checksum_path(path).unlink(missing_ok=True)
            raise UserError(f"{path}: cannot be written ({error.strerror or error}); earlier shards stay") from error

    def adopt(self, other: "Store") -> None:
        """Link or copy the shards of another store with the same manifest; keep what is here.

        Raises UserError: the manifests differ, a shard of the other store is damaged, or the disk is full.
        """
        self.open(other.manifest())
        other.verify()
        for shard in other.shards():
            digest = _checksum_path(shard).read_text(encoding="ascii").split()[0]
            # Named by content, because two stores may both have a first shard, and one may be adopted twice.
            path = self.folder / f"shard-{digest[:16]}.arrow"
            with writing(path):
                if not path.exists():
                    write_bytes(_checksum_path(path), _checksum_line(path, digest))
                    try:
                        os.link(shard, path)
                    except OSError:  # On another disk.
                        write_bytes(path, shard.read_bytes())

    def shards(self) -> list[Path]:
        """Files of all shards, by name."""
        return sorted(self.folder.glob("shard-*.arrow"))

    def present(self, keys: pa.Array) -> np.ndarray:
        """Which of these rows (see `row_keys`) exist, bool; UserError for an unreadable shard; checksums are not checked."""
        there = self._listed()
        found = pc.is_in(keys, value_set=row_keys(there["prompt_id"], there["sample"]))
        return found.to_numpy(zero_copy_only=False)

    def chosen(self, keys: pa.Array, domains: Sequence[str]) -> StoredRows:
        """These rows (see `row_keys`), in this order and with these domains. Writes nothing; checksums are checked.

        Raises UserError: a row that is missing, a shard that is damaged.
        """
        self.verify()
        there = self._listed()
        places = pc.index_in(keys, value_set=row_keys(there["prompt_id"], there["sample"]))
        if places.null_count:
            raise UserError(f"{self.folder}: {places.null_count} of {len(keys)} responses are missing; run again")
        listed = there.take(places)
        listed = listed.set_column(FACTS.get_field_index("domain"), "domain", pa.array(domains, pa.string()))
        return StoredRows(self.folder, listed.combine_chunks())

    def select(self, keys: pa.Array, domains: Sequence[str]) -> None:
        """Store the `chosen` rows as those that `rows` reads; UserError as there, or if the disk is full."""
        listed, stream = self.chosen(keys, domains).listed, pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, LISTED) as writer:
            writer.write_table(listed)
        content = stream.getvalue().to_pybytes()
        with writing(self.folder / INDEX):
            write_bytes(self.folder / INDEX, content + hashlib.sha256(content).digest())

    def rows(self) -> StoredRows:
        """The selected rows, or without a selection all rows, by name of the shard; checksums are not checked.

        Raises UserError: the index is damaged, a shard cannot be read.
        """
        path = self.folder / INDEX
        pa.default_memory_pool().release_unused()  # Free the memory that listing the shards used.
        if not path.exists():
            return StoredRows(self.folder, self._listed())
        with pa.memory_map(str(path)) as source:
            content = source.read_buffer()
        if len(content) < 32 or hashlib.sha256(content[:-32]).digest() != content[-32:].to_pybytes():
            raise UserError(f"{path}: damaged; {AGAIN}")
        return StoredRows(self.folder, pa.ipc.open_stream(content).read_all())

    def read(self) -> list[Row]:
        """Like `rows`, in memory and with all checksums checked; UserError for a shard that is damaged or has no checksum."""
        self.verify()
        return list(self.rows())

    def verify(self) -> None:
        """Compare every shard with its checksum; UserError for one that is damaged, cannot be read or has none."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(_verify, self.shards()))

    def _listed(self) -> pa.Table:
        """Facts of all rows, shard by shard."""
        paths, parts = self.shards(), [LISTED.empty_table()]
        for start in range(0, len(paths), SCANNED_SHARDS):
            some = pa.concat_tables([_facts_of(path) for path in paths[start : start + SCANNED_SHARDS]])
            # Copied, so that the files can be unmapped.
            parts.append(some.take(np.arange(len(some))))
        return pa.concat_tables(parts).combine_chunks()


def row_keys(prompt_ids: Any, samples: Any) -> pa.Array:
    """Keys of rows (prompt id and sample number), from their columns."""
    keys = pc.binary_join_element_wise(prompt_ids, pc.cast(samples, pa.string()), ":")
    return keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys


def _table_of(rows: Sequence[Row]) -> pa.Table:
    examples = [row.example() for row in rows]
    facts = [
        [row.prompt_id for row in rows],
        [row.sample for row in rows],
        [row.domain for row in rows],
        [row.finished for row in rows],
        [len(example.input_ids) for example in examples],
        [example.response_tokens for example in examples],
        [row.key for row in rows],
    ]
    lists = [
        [example.input_ids for example in examples],
        [example.loss_mask for example in examples],
        [np.asarray(row.log_target_probs, dtype=np.float32) for row in rows],
    ]
    columns = [pa.array(values, field.type) for values, field in zip(facts, FACTS, strict=True)]
    columns += map(lists_of, lists)
    return pa.Table.from_arrays(columns, schema=pa.schema([*FACTS, *TOKENS]))


def _mapped_table(path: Path) -> pa.Table:
    """All memory-mapped columns of a shard. (Arrow would allocate memory for all of them when only some are read.)"""
    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_file(source).read_all()
    except FileNotFoundError as error:
        raise UserError(f"{path}: this shard is missing; the same command makes its responses again") from error
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: damaged shard ({error}); {AGAIN}") from error


def _facts_of(path: Path) -> pa.Table:
    facts = _mapped_table(path).select(FACTS.names)
    names = pa.array([path.name]).take(np.zeros(len(facts), dtype=np.int32))
    return facts.append_column("shard", names).append_column("place", pa.array(np.arange(len(facts), dtype=np.int32)))


def _verify(path: Path) -> None:
    checksum = _checksum_path(path)
    try:
        if not checksum.exists():
            raise UserError(f"{path}: this shard has no checksum ({checksum.name}); {AGAIN}")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        damaged = checksum.read_bytes() != _checksum_line(path, digest)
    except OSError as error:
        raise UserError(f"{path}: damaged shard ({error}); {AGAIN}") from error
    if damaged:
        raise UserError(f"{path}: damaged shard (it does not match {checksum.name}); {AGAIN}")


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.stem.replace('shard', 'checksum')}.sha256")


def _checksum_line(path: Path, digest: str) -> bytes:
    return f"{digest}  {path.name}\n".encode()
