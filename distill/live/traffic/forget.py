"""`understudy traffic forget`: removes requests from a log, and their text where it is repeated.

The prompt of a later turn contains the earlier turns. So every other request of the conversation loses its text, and so does every request
whose ids begin with a forgotten prompt. Counts and keyed hashes stay.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from data.files import writing
from distill.live.options import ForgetOptions
from distill.live.traffic.record import (
    CONVERSATION,
    FORGOTTEN,
    TrafficRecord,
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
    lines, unknown = forget(options.log, options.ids)
    lines += [f"{name}: no request with this id in the log" for name in unknown]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return int(bool(unknown))


def forget(directory: Path, ids: Sequence[str]) -> tuple[list[str], list[str]]:
    """(lines about what was removed and what stays, ids that were not found). The log is rewritten last, so that a killed call can be
    repeated. Raises UserError: no log there, a directory that cannot be read or written.
    """
    salt = read_salt(directory)
    # First, so that no reader, writer or export sees them again, even if this process is killed.
    with writing(directory), write_lock(directory):
        add_forgotten(directory, {keyed_hash(salt, FORGOTTEN, name) for name in ids})
    with writing(directory):
        first = [record for record in _records(directory) if record.id in ids]
        talks = {record.conversation for record in first if record.conversation}
        prompts = {record.prompt_ids for record in first if len(record.prompt_ids or ()) >= _FEWEST_IDS}
    with writing(directory), write_lock(directory):
        add_forgotten(directory, {keyed_hash(salt, CONVERSATION, talk) for talk in talks})
    quoted = [json.dumps(name)[1:-1].encode() for name in ids]

    def without(line: bytes) -> bytes:
        record = record_in(line)
        # A damaged line with the id is removed too.
        gone = any(name in line for name in quoted) if record is None else record.id in ids
        return b"" if gone else line

    def without_text(line: bytes) -> bytes:
        record = record_in(line)
        if record is None or record.id in ids:
            return line
        ids_before = record.prompt_ids or ()
        repeats = record.conversation in talks or any(ids_before[: len(part)] == part for part in prompts if part)
        return to_line(record.without_text()) if repeats else line

    # In this order, so that a killed call finds the same conversations when it is repeated.
    scrubbed, removed = rewrite(directory, without_text), rewrite(directory, without)
    lines = [
        f"{directory}: {removed:,} lines removed; text removed from {scrubbed:,} other requests of the same conversation or with the same "
        "first tokens",
        "what stays: counts, times and keyed hashes of those other requests, and a keyed hash of each id and conversation, "
        "so that they stay forgotten",
        "exports of this log, and runs that were trained on them, may hold copies: delete those and export again",
    ]
    return lines, sorted(set(ids) - {record.id for record in first})


def _records(directory: Path) -> Iterator[TrafficRecord]:
    """Each request in a log; damaged lines are skipped."""
    for path in log_files(directory):
        with path.open("rb") as file:
            yield from filter(None, map(record_in, file))
