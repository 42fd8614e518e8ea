"""Responses that no shard holds yet: one JSON line each in a file of each rank, so that a killed run keeps them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from data.files import writing
from data.prompts.template import loss_mask
from data.responses.store import Row

_START = "unwritten-"


class Journal:
    """The file of a rank inside a `with`, and those that ranks of earlier starts left."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        """Nothing is read or written yet."""
        self.folder, self.rank, self.ranks = folder, rank, ranks
        self.path = folder / f"{_START}{rank}.jsonl"

    def __enter__(self) -> "Journal":
        with writing(self.path):
            self._file = self.path.open("ab")
            self._file.write(b"\n")  # After a line that a kill broke off.
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, row: Row) -> None:
        """Keep a response; UserError if the disk is full."""
        start = len(row.input_ids) - len(row.log_target_probs)
        facts = row.prompt_id, row.sample, row.domain, [*row.input_ids], start, [*row.log_target_probs], row.finished
        with writing(self.path):
            self._file.write(json.dumps(facts).encode() + b"\n")
            self._file.flush()

    def rows(self) -> Iterator[Row]:
        """All kept responses, of any rank."""
        for path in sorted(self.folder.glob(f"{_START}*.jsonl")):
            for line in path.read_bytes().splitlines():
                with contextlib.suppress(ValueError, TypeError):  # A line that a kill broke off.
                    prompt_id, sample, domain, ids, start, log_probs, finished = json.loads(line)
                    yield Row(prompt_id, sample, domain, ids, loss_mask(start, len(ids)), log_probs, finished)

    def delete(self) -> None:
        """Delete this rank's file, which shards replace; the first rank also deletes those of starts with more ranks."""
        for path in self.folder.glob(f"{_START}*.jsonl"):
            number = int(path.stem.removeprefix(_START))
            if number == self.rank or (self.rank == 0 and number >= self.ranks):
                path.unlink(missing_ok=True)
