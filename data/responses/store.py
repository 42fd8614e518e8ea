"""The token store: responses in Arrow shards, with a manifest of the target, tokenizer and settings that made them.

    manifest.json          what all rows were made with
    shard-NNNNN-H.arrow    rows (prompt, sample number); see `data/shards.py`
    index.arrow            the rows in use and their order
    topk-H.arrow           stored probabilities of the target, if wanted; see `data/signals/store.py`

A killed writer leaves only complete shards, and a resumed one makes the missing rows. The key of a row is its prompt id and sample
number, so a store can grow when prompts are added.
"""

import hashlib
import json
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.batches.collate import Example
from data.batches.examples import Examples, example_key
from data.files import MANIFEST, Manifest, other_key, read_manifest, write_bytes, write_manifest, writing
from data.shards import Shards, lists_of
from speculative.errors import UserError

INDEX = "index.arrow"
SCANNED_SHARDS = 256  # Shards mapped at once while all rows are listed.
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
TOKENS = {"input_ids": np.int32, "loss_mask": bool, "log_target_probs": np.float32, "rejected": bool}
TOKEN_BYTES = 9  # of a token of a shard: its id, its flag and its log-probability
LISTED = pa.schema([*FACTS, ("shard", pa.string()), ("place", pa.int32())])


@dataclass(frozen=True)
class Row:
    """One response with its prompt.

    `loss_mask` is true on response tokens. `log_target_probs` has the natural logarithm of the target's probability of each response
    token under the manifest's sampling settings (0 under greedy); it is empty if the target did not write the response.
    `finished`: it ended by itself, not by max_tokens. `rejected`, of a response decoded with a draft: the response tokens that replaced
    a rejected draft token; otherwise empty.
    """

    prompt_id: str
    sample: int
    domain: str
    input_ids: Sequence[int]
    loss_mask: Sequence[bool]
    log_target_probs: Sequence[float]
    finished: bool
    rejected: Sequence[bool] = field(default_factory=list)

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

    def __init__(self, shards: Shards, listed: pa.Table) -> None:
        """``listed``: the columns of `LISTED`."""
        self.shards, self.listed = shards, listed
        self.tokens_N, self.response_tokens_N, keys_N, self._places_N = (
            listed[name].to_numpy() for name in ("tokens", "response_tokens", "key", "place")
        )
        names = listed["shard"].combine_chunks().dictionary_encode()
        self._names, self._shards_N = names.dictionary.to_pylist(), names.indices.to_numpy()
        self.examples = Examples(self.example, self.tokens_N, self.response_tokens_N, keys_N)

    def __len__(self) -> int:
        return len(self.tokens_N)

    @property
    def files(self) -> list[Path]:
        """The shards that hold the rows."""
        return [self.shards.folder / name for name in self._names]

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...
    def __getitem__(self, number: int | slice) -> Row | list[Row]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        facts = {name: self.listed[name][number].as_py() for name in ("prompt_id", "sample", "domain", "finished")}
        return Row(**facts, **{name: self._values(name, number).tolist() for name in TOKENS})

    def example(self, number: int) -> Example:
        """The training sequence of a row; its ids are a view of the file."""
        return Example(self._values("input_ids", number), self._values("loss_mask", number))

    def _values(self, name: str, number: int) -> np.ndarray:
        return self.shards.values(self._names[self._shards_N[number]], name, int(self._places_N[number]))


class Store:
    """A folder of shards with a manifest."""

    def __init__(self, folder: Path) -> None:
        """Nothing is read or written yet."""
        self.folder, self.shards = folder, Shards(folder, "shard")

    def open(self, manifest: Manifest) -> None:
        """Create the store or accept one with this manifest; UserError with the first key that differs, or for a disk that is full."""
        if (self.folder / MANIFEST).exists():
            if said := other_key(self.manifest(), json.loads(json.dumps(manifest))):
                remedy = "give the run another name, or delete that folder to make its responses again"
                raise UserError(f"{self.folder}: {said}; {remedy}")
            return
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_manifest(self.folder, manifest)

    def manifest(self) -> Manifest:
        """The manifest; UserError if it is missing or damaged."""
        return read_manifest(self.folder)

    def write_shard(self, shard: int, rows: Sequence[Row]) -> None:
        """Write a shard atomically, beside others of its number; UserError if the disk is full."""
        self.shards.write(_table_of(rows), f"{shard:05d}")

    def adopt(self, other: "Store") -> None:
        """Link or copy the shards of another store with the same manifest; keep what is here.

        Raises UserError: the manifests differ, a shard of the other store is damaged, or the disk is full.
        """
        self.open(other.manifest())
        other.verify()
        for name in other.shards.names():
            shard, path = other.folder / name, self.folder / name
            with writing(path):
                if not path.exists():
                    try:
                        os.link(shard, path)
                    except OSError:  # On another disk.
                        write_bytes(path, shard.read_bytes())

    def present(self, keys: pa.Array) -> np.ndarray:
        """Which of these rows (see `row_keys`) exist, bool; UserError for an unreadable shard; checksums are not checked."""
        there = self._listed()
        return pc.is_in(keys, value_set=row_keys(there["prompt_id"], there["sample"])).to_numpy(zero_copy_only=False)

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
        return StoredRows(self.shards, listed.combine_chunks())

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
            return StoredRows(self.shards, self._listed())
        with pa.memory_map(str(path)) as source:
            content = source.read_buffer()
        if len(content) < 32 or hashlib.sha256(content[:-32]).digest() != content[-32:].to_pybytes():
            raise UserError(f"{path}: damaged; delete it, and the same command makes it again")
        return StoredRows(self.shards, pa.ipc.open_stream(content).read_all())

    def read(self) -> list[Row]:
        """Like `rows`, in memory and with all checksums checked; UserError for a shard that is damaged."""
        self.verify()
        return list(self.rows())

    def verify(self) -> None:
        """Compare every shard with its checksum; UserError for one that is damaged or cannot be read."""
        self.shards.verify(self.shards.names())

    def _listed(self) -> pa.Table:
        """Facts of all rows, shard by shard."""
        names, parts = self.shards.names(), [LISTED.empty_table()]
        for start in range(0, len(names), SCANNED_SHARDS):
            some = pa.concat_tables([self._facts(name) for name in names[start : start + SCANNED_SHARDS]])
            # Copied, so that the files can be unmapped.
            parts.append(some.take(np.arange(len(some))))
        return pa.concat_tables(parts).combine_chunks()

    def _facts(self, name: str) -> pa.Table:
        facts = self.shards.table(name).select(FACTS.names)
        names = pa.array([name]).take(np.zeros(len(facts), dtype=np.int32))
        places = pa.array(np.arange(len(facts), dtype=np.int32))
        return facts.append_column("shard", names).append_column("place", places)


def row_keys(prompt_ids: Any, samples: Any) -> pa.Array:
    """Keys of rows (prompt id and sample number), from their columns."""
    keys = pc.binary_join_element_wise(prompt_ids, pc.cast(samples, pa.string()), ":")
    return keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys


def _table_of(rows: Sequence[Row]) -> pa.Table:
    lengths = {
        "tokens": [len(row.input_ids) for row in rows],
        "response_tokens": [row.example().response_tokens for row in rows],
    }
    facts = {one.name: lengths.get(one.name) or [getattr(row, one.name) for row in rows] for one in FACTS}
    columns = [pa.array(facts[one.name], one.type) for one in FACTS]
    columns += [lists_of([np.asarray(getattr(row, name), kind) for row in rows]) for name, kind in TOKENS.items()]
    return pa.Table.from_arrays(columns, names=[*FACTS.names, *TOKENS])
