"""`understudy traffic forget`: removes requests from a log and its exports, and their text where it is repeated.

The prompt of a later turn contains the earlier turns. So every other request of the conversation loses its text, and so does every request
whose ids begin with a forgotten prompt. Counts and keyed hashes stay.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from data.files import writing
from data.responses.rendered import StoredPrompts
from distill.live.options import ForgetOptions
from distill.live.traffic.exported import PROMPT_FILES, Export, forget_exported, list_exports, partial_of, row_id
from distill.live.traffic.record import (
    CONVERSATION,
    FORGOTTEN,
    add_forgotten,
    keyed_hash,
    log_files,
    read_salt,
    to_line,
)
from distill.live.traffic.retention import record_in, rewrite, write_lock

_FEWEST_IDS = 2  # shorter prompts are not searched for, because every text may begin with one id


def forget_command(options: ForgetOptions, console: Console) -> int:
    """Forget, and print what stays and where copies may be; exit status 1 if an id was not found. Raises UserError as `forget`."""
    said, unknown = forget(options.log, options.ids)
    said += [f"{one}: no request with this id in the log or its exports" for one in unknown]
    for line in said:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return int(bool(unknown))


def forget(directory: Path, ids: Sequence[str]) -> tuple[list[str], list[str]]:
    """(lines about what was removed and what stays, ids that were not found). The log is rewritten last, so that a killed call can be
    repeated. Raises UserError: no log there, a directory that cannot be read or written, a file of an export that is damaged.
    """
    salt = read_salt(directory)
    own = {row_id(salt, one): one for one in ids}
    # First, so that no reader, writer or export sees them again, even if this process is killed.
    with writing(directory), write_lock(directory):
        add_forgotten(directory, {keyed_hash(salt, FORGOTTEN, one) for one in ids})
    exports = list_exports(directory)
    with writing(directory):
        first = [one for one in _requests(directory, salt, exports) if one[0] in own]
        talks, prompts = {talk for _, talk, _ in first if talk}, {ids for *_, ids in first if len(ids) >= _FEWEST_IDS}
        repeat = {
            row
            for row, talk, prompt in _requests(directory, salt, exports)
            if row not in own and (talk in talks or any(prompt[: len(one)] == one for one in prompts))
        }
    with writing(directory), write_lock(directory):
        add_forgotten(directory, {keyed_hash(salt, CONVERSATION, talk) for talk in talks})
    elsewhere = [line for export in exports for line in _forget_export(export, repeat.union(own))]
    names = [json.dumps(one)[1:-1].encode() for one in ids]

    def without(line: bytes) -> bytes:
        record = record_in(line)
        # A damaged line with the id is removed too.
        gone = any(name in line for name in names) if record is None else record.id in ids
        return b"" if gone else line

    def without_text(line: bytes) -> bytes:
        record = record_in(line)
        if record is None or (record.conversation not in talks and row_id(salt, record.id) not in repeat):
            return line
        return to_line(record.without_text())

    removed, scrubbed = rewrite(directory, without), rewrite(directory, without_text)
    said = [
        f"{directory}: {removed:,} lines removed; text removed from {scrubbed:,} other requests of the same conversation or with the same "
        "first tokens",
        "kept: counts, times and keyed hashes of those other requests, and a keyed hash of each id and conversation, so that they stay forgotten",
    ]
    return said + elsewhere, [one for row, one in own.items() if row not in {row for row, *_ in first}]


def _requests(
    directory: Path, salt: bytes, exports: Sequence[Export]
) -> Iterator[tuple[str, str | None, tuple[int, ...]]]:
    """(row id, conversation, prompt ids) of each request in a log and its exports; damaged lines are skipped."""
    for path in log_files(directory):
        with path.open("rb") as file:
            for record in filter(None, map(record_in, file)):
                yield row_id(salt, record.id), record.conversation, record.prompt_ids or ()
    for path in (Path(export.folder) / name for export in exports for name in PROMPT_FILES):
        for prompt in StoredPrompts(path) if path.exists() else ():
            yield prompt.prompt_id, None, prompt.prompt_ids


def _forget_export(export: Export, rows: set[str]) -> Iterator[str]:
    """Remove rows from an export; yield lines about what was done and what the user has to do."""
    folder = Path(export.folder)
    shutil.rmtree(partial_of(folder), ignore_errors=True)  # left by a killed export
    if folder.is_dir():
        found = forget_exported(folder, rows)
        what = f"{found} rows removed, prompts and responses" if found else "had no such rows"
        yield f"{folder}: {what}"
    else:
        yield f"{folder}: this export is missing: if you moved or copied it, delete that copy"
    for run in filter(Path.exists, map(Path, export.uses)):
        yield (
            f"{run}: was trained on the export and may contain copies: delete its prompts/, responses/ and rollouts/; for held-out "
            "prompts also report.*, result.json and proposals.parquet. Its drafts work without them"
        )
