"""Responses that no shard holds yet: one JSON line each in a file of each rank, so that a killed run keeps them."""

import contextlib
import json
from pathlib import Path

import pyarrow as pa

from data.files import writing
from data.prompts.template import loss_mask
from data.responses.store import Row, Store

_FILES = "unwritten-{}.jsonl"


class Journal:
    """The file of a rank, inside a `with`; deleted where that ends without an error."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Nothing is written yet."""
        self.path = folder / _FILES.format(rank)

    def __enter__(self) -> "Journal":
        with writing(self.path):
            self._file = self.path.open("ab")
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._file.close()
        if error is None:
            self.path.unlink(missing_ok=True)

    def add(self, row: Row) -> None:
        """Keep a response; UserError if the disk is full."""
        start = len(row.input_ids) - len(row.log_target_probs)
        facts = row.prompt_id, row.sample, row.domain, [*row.input_ids], start, [*row.log_target_probs], row.finished
        with writing(self.path):
            self._file.write(json.dumps(facts).encode() + b"\n")
            self._file.flush()


def settle(store: Store) -> None:
    """Write what the journals of killed starts kept into a shard of an opened store, and delete them.

    One process calls it, before any rank begins, and only where no other start can answer. Raises UserError: disk full.
    """
    files, by_key = sorted(store.folder.glob(_FILES.format("*"))), dict[str, Row]()
    for path in files:
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError):  # A line that a kill broke off.
                prompt_id, sample, domain, ids, start, log_probs, finished = json.loads(line)
                row = Row(prompt_id, sample, domain, ids, loss_mask(start, len(ids)), log_probs, finished)
                by_key[f"{prompt_id}:{sample}"] = row
    present = store.present(pa.array([*by_key], pa.string()))
    if rows := [row for row, there in zip(by_key.values(), present, strict=True) if not there]:
        store.write_shard(0, rows)
    for path in files:
        path.unlink(missing_ok=True)
