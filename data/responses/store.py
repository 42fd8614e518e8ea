"""The token store: responses in Arrow shards beside a manifest that says which target, tokenizer and settings made them.

    manifest.json            what every row was made with
    shard-NNNNN.arrow        rows (prompt, sample number), written under a temporary name and renamed, never changed
    checksum-NNNNN.sha256    of the shard beside it, as `sha256sum -c` reads it; a shard whose bytes have another one is refused
    index.arrow              which rows are in use, in which order
    signal-RANK-NNN.arrows   what the teacher said about rows, where that was asked for: see `data/signals/store.py`

A killed writer leaves whole shards, and whoever resumes makes the missing rows: nothing lost, nothing twice. A row is known by
its prompt's id and its sample number, so a store grows: what is there stays, whatever prompts stand beside it.
"""

import functools
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.batches.collate import Example
from data.batches.examples import Examples, example_key
from data.files import (
    MANIFEST,
    Manifest,
    _checksum_line,
    _checksum_path,
    read_manifest,
    require_manifest,
    write_bytes,
    write_manifest,
    writing,
)
from data.signals.columns import lists_of
from speculative.errors import UserError

INDEX = "index.arrow"
MAPPED_SHARDS = 8  # of the rows that were looked at last; what they touched goes back with them
SCANNED_SHARDS = 256  # mapped at once while the rows of all shards are listed
# What is known of a row without its tokens; then the tokens.
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

    `loss_mask` is true on response tokens; `log_target_probs` holds one natural logarithm per response token: the target's
    probability of it under the manifest's sampling settings (0 under greedy), nothing where the target did not write it.
    `finished`: it ended by itself, not by budget.
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

    @property
    def key(self) -> int:
        """64 bits that the row is known by."""
        example = self.example()
        return example_key(example.input_ids, example.loss_mask, f"{self.prompt_id}:{self.sample}")

    def example(self) -> Example:
        """The training sequence of this row."""
        return Example(np.asarray(self.input_ids, dtype=np.int32), np.asarray(self.loss_mask, dtype=bool))


class StoredRows(Sequence[Row]):
    """Rows of a store in an order: their tokens stay on disk, mapped while they are looked at. Safe to use from threads.

    Shapes: N rows. `tokens_N`: ids of prompt and response; `response_tokens_N`: those that are predicted.
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
        """The training sequence of a row; its ids are those of the file."""
        return Example(self._values("input_ids", number), self._values("loss_mask", number))

    def _values(self, name: str, number: int) -> np.ndarray:
        column = self._mapped(int(self._shards_N[number]))[name].chunk(0)
        return column[int(self._places_N[number])].values.to_numpy(zero_copy_only=name != "loss_mask")

    def _map(self, shard: int) -> pa.Table:
        return _mapped_table(self.folder / self._names[shard])


class Store:
    """A folder of shards with one manifest."""

    def __init__(self, folder: Path) -> None:
        """Nothing is read or written yet."""
        self.folder = folder

    def open(self, manifest: Manifest) -> None:
        """Creates the store, or accepts the one that is there when its manifest is the same.

        Raises:
            UserError: the store was made with something else; the first differing key and both values are named. Or the
                folder cannot be written.
        """
        if (self.folder / MANIFEST).exists():
            remedy = "give the run another name, or delete that folder to make its responses again"
            return require_manifest(self.folder, manifest, remedy)
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_manifest(self.folder, manifest)

    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            UserError: missing or damaged.
        """
        return read_manifest(self.folder)

    def shard_path(self, shard: int) -> Path:
        """File of a shard."""
        return self.folder / f"shard-{shard:05d}.arrow"

    def write_shard(self, shard: int, rows: Sequence[Row]) -> None:
        """Writes one shard, whole or not at all; where one of that number is, under a name made of these rows' keys.

        Raises:
            UserError: disk full or folder not writable.
        """
        path, table = self.shard_path(shard), _table_of(rows)
        if path.exists():
            names = "".join(f"{row.prompt_id}:{row.sample}\n" for row in rows)
            path = path.with_stem(
                f"{path.stem}-{hashlib.sha256(names.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"
            )
        try:
            stream = pa.BufferOutputStream()
            with pa.ipc.new_file(stream, table.schema) as writer:
                writer.write_table(table)
            content = stream.getvalue().to_pybytes()
            # First the checksum: a shard is there when its own file is, and then this one is too.
            write_bytes(_checksum_path(path), _checksum_line(path, hashlib.sha256(content).hexdigest()))
            write_bytes(path, content)
        except OSError as error:
            if not path.exists():
                _checksum_path(path).unlink(missing_ok=True)
            raise UserError(
                f"{path}: cannot be written ({error.strerror or error}); what was there before is whole"
            ) from error

    def adopt(self, other: "Store") -> None:
        """Links, or copies, the shards of another store made with the same; what is here already stays.

        Raises:
            UserError: the other was made with something else, or one of its shards is damaged; disk full.
        """
        self.open(other.manifest())
        other.verify()
        for shard in other.shards():
            digest = _checksum_path(shard).read_text(encoding="ascii").split()[0]
            # By its content: two stores may both have a first shard, and one may be adopted twice.
            path = self.folder / f"shard-{digest[:16]}.arrow"
            with writing(path):
                if not path.exists():
                    write_bytes(_checksum_path(path), _checksum_line(path, digest))
                    try:
                        os.link(shard, path)
                    except OSError:  # another disk
                        write_bytes(path, shard.read_bytes())

    def shards(self) -> list[Path]:
        """Files of all shards, by name."""
        return sorted(self.folder.glob("shard-*.arrow"))

    def present(self, keys: pa.Array) -> np.ndarray:
        """Which of these rows (see `row_keys`) are there, bool; shards are not checked.

        Raises:
            UserError: a shard that cannot be read.
        """
        there = self._listed()
        found = pc.is_in(keys, value_set=row_keys(there["prompt_id"], there["sample"]))
        return found.to_numpy(zero_copy_only=False)

    def chosen(self, keys: pa.Array, domains: Sequence[str]) -> StoredRows:
        """These rows (see `row_keys`), in this order, with these labels; nothing is written. Shards are checked.

        Raises:
            UserError: a row that is missing, a shard that is damaged.
        """
        self.verify()
        there = self._listed()
        places = pc.index_in(keys, value_set=row_keys(there["prompt_id"], there["sample"]))
        if places.null_count:
            raise UserError(
                f"{self.folder}: {places.null_count} of {len(keys)} responses are missing; run again to make them"
            )
        listed = there.take(places)
        listed = listed.set_column(FACTS.get_field_index("domain"), "domain", pa.array(domains, pa.string()))
        return StoredRows(self.folder, listed.combine_chunks())

    def select(self, keys: pa.Array, domains: Sequence[str]) -> None:
        """Makes `chosen` rows the ones that `rows` reads from now on.

        Raises:
            UserError: see `chosen`; disk full.
        """
        listed, stream = self.chosen(keys, domains).listed, pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, LISTED) as writer:
            writer.write_table(listed)
        content = stream.getvalue().to_pybytes()
        with writing(self.folder / INDEX):
            write_bytes(self.folder / INDEX, content + hashlib.sha256(content).digest())

    def rows(self) -> StoredRows:
        """The selected rows, or, where none were, all rows in the order of the shards' names; shards are not checked.

        Raises:
            UserError: the index is damaged, a shard cannot be read.
        """
        path = self.folder / INDEX
        pa.default_memory_pool().release_unused()  # what listing the shards took
        if not path.exists():
            return StoredRows(self.folder, self._listed())
        with pa.memory_map(str(path)) as source:
            content = source.read_buffer()
        if len(content) < 32 or hashlib.sha256(content[:-32]).digest() != content[-32:].to_pybytes():
            raise UserError(f"{path}: damaged; delete it and run again to make it again")
        return StoredRows(self.folder, pa.ipc.open_stream(content).read_all())

    def read(self) -> list[Row]:
        """`rows`, every shard's checksum checked, in memory.

        Raises:
            UserError: a shard that is damaged or cannot be read, or has no checksum.
        """
        self.verify()
        return list(self.rows())

    def verify(self) -> None:
        """Compares every shard with its checksum.

        Raises:
            UserError: a shard that is damaged or cannot be read, or has no checksum.
        """
        with ThreadPoolExecutor() as pool:
            list(pool.map(_verify, self.shards()))

    def _listed(self) -> pa.Table:
        """What is known of all rows, shard by shard."""
        paths, parts = self.shards(), [LISTED.empty_table()]
        for start in range(0, len(paths), SCANNED_SHARDS):
            some = pa.concat_tables([_facts_of(path) for path in paths[start : start + SCANNED_SHARDS]])
            # Copied, so that the files behind it are unmapped.
            parts.append(some.take(np.arange(len(some))))
        return pa.concat_tables(parts).combine_chunks()


def row_keys(prompt_ids: Any, samples: Any) -> pa.Array:
    """What rows are known by, from their columns."""
    keys = pc.binary_join_element_wise(prompt_ids, pc.cast(samples, pa.string()), ":")
    return keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys


def _table_of(rows: Sequence[Row]) -> pa.Table:
    examples = [row.example() for row in rows]
    facts = [
        [row.prompt_id for row in rows], [row.sample for row in rows], [row.domain for row in rows],
        [row.finished for row in rows], [len(example.input_ids) for example in examples],
        [example.response_tokens for example in examples],
        [row.key for row in rows],
    ]  # fmt: skip
    lists = [
        [example.input_ids for example in examples], [example.loss_mask for example in examples],
        [np.asarray(row.log_target_probs, dtype=np.float32) for row in rows],
    ]  # fmt: skip
    columns = [pa.array(values, field.type) for values, field in zip(facts, FACTS, strict=True)]
    columns += map(lists_of, lists)
    return pa.Table.from_arrays(columns, schema=pa.schema([*FACTS, *TOKENS]))


def _mapped_table(path: Path) -> pa.Table:
    """A shard's columns as they lie in its file. (Arrow allocates for all of them when it is asked for some.)"""
    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_file(source).read_all()
    except FileNotFoundError as error:
        raise UserError(f"{path}: this shard is missing; run again to make its responses again") from error
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: damaged shard ({error}); delete it and run again to make it again") from error


def _facts_of(path: Path) -> pa.Table:
    facts = _mapped_table(path).select(FACTS.names)
    names = pa.array([path.name]).take(np.zeros(len(facts), dtype=np.int32))
    return facts.append_column("shard", names).append_column("place", pa.array(np.arange(len(facts), dtype=np.int32)))


def _verify(path: Path) -> None:
    try:
        if not _checksum_path(path).exists():
            raise UserError(
                f"{path}: its checksum {_checksum_path(path).name} is missing; delete the shard and run again to make it again"
            )
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        damaged = _checksum_path(path).read_bytes() != _checksum_line(path, digest)
    except OSError as error:
        raise UserError(f"{path}: damaged shard ({error}); delete it and run again to make it again") from error
    if damaged:
        raise UserError(
            f"{path}: damaged shard (another checksum than {_checksum_path(path).name} says); delete it and run again to "
            "make it again"
        )
