"""`understudy traffic forget`: requests removed from a log and from its exports, and their text wherever it is repeated.

The prompt of a later turn holds the earlier turns. So every other request of the conversation loses its text, and so does every request
whose ids begin with a forgotten prompt. Its numbers and keyed hashes stay.
"""

import functools
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from data.files import write_bytes, writing
from data.responses.rendered import StoredPrompts
from distill.live.options import ForgetOptions
from distill.live.traffic.exported import PROMPT_FILES, forget_exported, list_exports, partial_of, row_id
from distill.live.traffic.record import (
    CONVERSATION,
    FORGOTTEN,
    TrafficRecord,
    forgotten_hashes,
    keyed_hash,
    log_files,
    read_salt,
    to_line,
)
from distill.live.traffic.retention import record_in, rewrite, write_lock

_FEWEST_IDS = 2  # of a prompt whose repetition is looked for: a single id begins every text


@dataclass(frozen=True)
class Forgotten:
    """removed: lines of the log. scrubbed: other requests there that lost their text. rows: removed from each export that is still in its
    folder. unknown: ids that were found nowhere.
    """

    removed: int
    scrubbed: int
    rows: dict[Path, int]
    unknown: list[str]


@dataclass
class _Repeated:
    """What the forgotten requests say, to find it elsewhere. rows: ids of exported rows; prompts: token ids."""

    conversations: set[str] = field(default_factory=set)
    prompts: set[tuple[int, ...]] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)

    def add(self, prompt_ids: tuple[int, ...] | None) -> None:
        if prompt_ids and len(prompt_ids) >= _FEWEST_IDS:
            self.prompts.add(prompt_ids)

    def begins(self, ids: Sequence[int]) -> bool:
        return any(tuple(ids[: len(prompt)]) == prompt for prompt in self.prompts)

    @functools.cached_property
    def marks(self) -> list[bytes]:
        """One of these is in each line that repeats what they say."""
        prompts = (",".join(map(str, prompt)) for prompt in self.prompts)
        return [one.encode() for one in (*self.conversations, *(f'"prompt_ids":[{prompt}' for prompt in prompts))]

    def record(self, line: bytes) -> TrafficRecord | None:
        """The record of a line, if it repeats what they say."""
        record = record_in(line) if any(mark in line for mark in self.marks) else None
        if record is None or record.conversation in self.conversations or self.begins(record.prompt_ids or ()):
            return record
        return None

    def is_in_export(self, row: str, ids: Sequence[int]) -> bool:
        return row in self.rows or self.begins(ids)


def forget_command(options: ForgetOptions, console: Console) -> int:
    """Forgets, says what stays and where else text may lie; exit status 1 where an id was found nowhere.

    Raises:
        UserError: no log there; a file that is damaged or cannot be written.
    """
    done = forget(options.log, options.ids)
    lines = [
        f"{options.log}: {done.removed:,} lines removed; {done.scrubbed:,} other requests of the same conversation, or that begin with the same "
        "tokens, lost their text",
        "what stays there: numbers, times and keyed hashes of those others; of each id and conversation a keyed hash, which keeps them out",
    ]
    for export in list_exports(options.log):
        folder = Path(export.folder)
        lines.append(f"{folder}: an export that is no longer there: if it was moved or copied, delete it there")
        if folder in done.rows:
            found = done.rows[folder]
            what = f"{found} rows removed, prompts and responses" if found else "held nothing of it"
            lines[-1] = f"{folder}: {what}"
        for run in filter(Path.exists, map(Path, export.uses)):
            lines.append(
                f"{run}: was trained from it and may hold copies: delete its prompts/, responses/ and rollouts/, and with held-out "
                "prompts also report.*, result.json and proposals.parquet; its drafts work without"
            )
    lines += [f"{one}: found in no line of the log and in no export" for one in done.unknown]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return int(bool(done.unknown))


def forget(directory: Path, ids: Sequence[str]) -> Forgotten:
    """Removes requests from a log and its exports, what repeats them too, and keeps both out of it.

    The log is last: until then a call that was killed finds everything again.

    Raises:
        UserError: the directory cannot be read or written; a file of an export is damaged.
    """
    salt, folders = read_salt(directory), [Path(export.folder) for export in list_exports(directory)]
    with writing(directory):
        repeated, unknown = _find(directory, salt, ids, folders)
    hashes = {keyed_hash(salt, FORGOTTEN, one) for one in ids}
    hashes |= {keyed_hash(salt, CONVERSATION, one) for one in repeated.conversations}
    # First, so that no reader sees them from here on, whatever happens to this process.
    with writing(directory), write_lock(directory):
        known = sorted(forgotten_hashes(directory) | hashes)
        write_bytes(directory / FORGOTTEN, "".join(f"{one}\n" for one in known).encode(), 0o600, synced=True)
    rows = {}
    for folder in folders:
        shutil.rmtree(partial_of(folder), ignore_errors=True)  # of an export that was killed
        if folder.is_dir():
            rows[folder] = forget_exported(folder, repeated.is_in_export)
    removed = rewrite(directory, lambda line: b"" if _named(line, ids) else line)

    def without_text(line: bytes) -> bytes:
        record = repeated.record(line)
        return line if record is None else to_line(record.without_text())

    return Forgotten(removed, rewrite(directory, without_text), rows, unknown)


def _find(directory: Path, salt: bytes, ids: Sequence[str], folders: Sequence[Path]) -> tuple[_Repeated, list[str]]:
    """(what the requests say, in the log and in its exports; the ids that are in neither)."""
    own, found, repeated = {row_id(salt, one): one for one in ids}, set[str](), _Repeated()
    for line in _lines(directory):
        if named := _named(line, ids):
            found.update(named)
            if (record := record_in(line)) is not None:
                repeated.conversations.update(filter(None, [record.conversation]))
                repeated.add(record.prompt_ids)
    for path in (folder / name for folder in folders for name in PROMPT_FILES):
        for prompt in StoredPrompts(path) if path.exists() else ():
            if prompt.prompt_id in own:
                found.add(own[prompt.prompt_id])
                repeated.add(prompt.prompt_ids)
    others = (repeated.record(line) for line in _lines(directory))
    repeated.rows = {*own, *(row_id(salt, one.id) for one in others if one is not None)}
    return repeated, [one for one in ids if one not in found]


def _lines(directory: Path) -> Iterator[bytes]:
    for path in log_files(directory):
        with path.open("rb") as file:
            yield from file


def _named(line: bytes, ids: Sequence[str]) -> list[str]:
    """The id of a line's record, if it is one of these; of a damaged line all of them that are in it."""
    named = [one for one in ids if json.dumps(one)[1:-1].encode() in line]
    record = record_in(line) if named else None
    return named if record is None else [one for one in named if one == record.id]
