"""Prompts as token ids: single prompts, and files of prompts that stay on disk."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.files import replacing, writing
from data.prompts.prompt import PromptRow, row_before
from speculative.errors import UserError

WRITTEN_AT_ONCE = 4096  # Prompts in memory while a file is written.
SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("domain", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("turns", pa.string()),
        ("group", pa.string()),
        ("reference", pa.string()),
        ("logged", pa.string()),
    ]
)


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as the target sees it.

    `turns`: JSON of {messages, tools} of a conversation, for a server that applies the chat template itself.
    `group`: equal for prompts that must be on the same side of a split. `reference`: the right answer, for a scorer.
    `logged`: the answer of a log, see `data/prompts/logs.py`.
    """

    prompt_id: str
    domain: str
    prompt_ids: tuple[int, ...]
    text: str = ""
    turns: str = ""
    group: str = ""
    reference: str | None = None
    logged: str = ""

    def row(self) -> PromptRow:
        """The prompt before it was rendered."""
        return row_before(self.text, self.turns, self.domain, self.prompt_id)


class StoredPrompts(Sequence[RenderedPrompt]):
    """The prompts of a memory-mapped file; each is read on access."""

    def __init__(self, path: Path) -> None:
        """Raises UserError when the file cannot be read."""
        try:
            with pa.memory_map(str(path)) as source:
                self._table = pa.ipc.open_file(source).read_all()
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{path}: cannot be read ({error}); delete its folder to make it again") from error

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, number: int) -> RenderedPrompt: ...
    @overload
    def __getitem__(self, number: slice) -> list[RenderedPrompt]: ...
    def __getitem__(self, number: int | slice) -> RenderedPrompt | list[RenderedPrompt]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        (row,) = self._table.slice(range(len(self))[number], 1).to_pylist()
        found: dict[str, Any] = {name: tuple(of) if isinstance(of, list) else of for name, of in row.items()}
        return RenderedPrompt(**found)

    def write(self, path: Path, chosen_N: np.ndarray) -> None:
        """Write the prompts for which ``chosen_N`` (bool) is true to another file, atomically; UserError if the disk is full."""
        batches = self._table.to_batches()
        ends = np.cumsum([len(batch) for batch in batches])
        masks = np.split(chosen_N, ends[:-1]) if batches else []
        tables = (pa.table(batch.filter(pa.array(mask))) for batch, mask in zip(batches, masks, strict=True))
        _write(path, tables, self._table.schema)

    def column(self, name: str) -> pa.ChunkedArray:
        """A column of SCHEMA."""
        return self._table[name]


def write_prompts(path: Path, prompts: Iterable[RenderedPrompt]) -> str:
    """Write prompts to a file atomically, with few of them in memory, and return their fingerprint.

    Raises UserError: disk full or folder not writable; also errors of the iterable.
    """
    digest = hashlib.sha256()

    def tables() -> Iterator[pa.Table]:
        coming = iter(prompts)
        while some := list(itertools.islice(coming, WRITTEN_AT_ONCE)):
            for prompt in some:
                digest.update(_identity(prompt))
            yield pa.Table.from_pylist(list(map(vars, some)), SCHEMA)

    _write(path, tables(), SCHEMA)
    return digest.hexdigest()[:16]


def _write(path: Path, tables: Iterable[pa.Table], schema: pa.Schema) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(path) as temporary,
            pa.OSFile(str(temporary), "wb") as sink,
            pa.ipc.new_file(sink, schema) as writer,
        ):
            for table in tables:
                writer.write_table(table)


def prompts_fingerprint(prompts: Iterable[RenderedPrompt]) -> str:
    """16 hex digits of SHA-256 over ids, domains and tokens of all prompts, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(_identity(prompt))
    return digest.hexdigest()[:16]


def texts_of(prompts: Sequence[RenderedPrompt], name: Literal["prompt_id", "domain", "logged"]) -> pa.Array:
    """A text column of all prompts, in order."""
    if isinstance(prompts, StoredPrompts):
        return prompts.column(name).combine_chunks()
    return pa.array([getattr(prompt, name) for prompt in prompts], pa.string())


def prompt_lengths(prompts: Sequence[RenderedPrompt]) -> np.ndarray:
    """Number of tokens of each prompt, in order."""
    if isinstance(prompts, StoredPrompts):
        return pc.list_value_length(prompts.column("prompt_ids")).to_numpy()
    return np.array([len(prompt.prompt_ids) for prompt in prompts], dtype=np.int64)


def _identity(prompt: RenderedPrompt) -> bytes:
    content = (prompt.prompt_id, prompt.domain, prompt.prompt_ids)
    return json.dumps(content).encode() + b"\n"
