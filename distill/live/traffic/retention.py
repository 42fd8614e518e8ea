"""Retention: a log keeps the text of a sample of recent requests. A gateway may run: files are rewritten under the lock that each append
takes.
"""

import contextlib
import fcntl
import heapq
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from data.files import write_bytes, writing
from distill.live.traffic.record import (
    SWEPT,
    WRITE_LOCK,
    RecordError,
    TrafficRecord,
    from_line,
    log_files,
    priority,
    read_salt,
    to_line,
)
from speculative.errors import UserError

DAY, HOUR = 86400.0, 3600.0
MOST_TEXTS = 10_000  # of a slice
_WITHOUT_TEXT = b'"prompt_ids":null,"response_ids":null'


@contextlib.contextmanager
def write_lock(directory: Path) -> Iterator[None]:
    """Lock held while a log is appended to or rewritten."""
    with open(os.open(directory / WRITE_LOCK, os.O_CREAT | os.O_RDWR, 0o600), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sweep(directory: Path, retention_days: float, now: float, most_texts: int = MOST_TEXTS) -> tuple[int, int]:
    """Remove the text of records that are too old or not in their slice's sample: (number of these records, of texts that are left).

    A slice keeps the text of the ``most_texts`` records with the smallest keyed hashes, a reproducible random sample. ``now``: Unix
    seconds.

    Raises UserError: the clock has jumped, or the directory cannot be read or written.
    """
    salt, oldest, has_text = read_salt(directory), now - retention_days * DAY, False
    recent: dict[str, set[str]] = defaultdict(set)
    for path in log_files(directory):
        for record in filter(None, map(_with_text, path.read_bytes().splitlines(keepends=True))):
            has_text = True
            if record.time >= oldest:
                recent[record.slice].add(priority(salt, record.id))
    if has_text:
        _check_clock(directory, retention_days, now)
    dropped = {name: ranks.difference(heapq.nsmallest(most_texts, ranks)) for name, ranks in recent.items()}

    def scrubbed(line: bytes) -> bytes:
        record = _with_text(line)
        # Records that came after the samples were drawn wait for the next sweep.
        if record is None or (record.time >= oldest and priority(salt, record.id) not in dropped.get(record.slice, ())):
            return line
        return to_line(record.without_text())

    changed = rewrite(directory, scrubbed)
    with writing(directory / SWEPT):
        write_bytes(directory / SWEPT, b"%d\n" % now, 0o600)
    return changed, sum(map(len, recent.values())) - sum(map(len, dropped.values()))


def _check_clock(directory: Path, retention_days: float, now: float) -> None:
    """Raises UserError if the clock stepped back since the last sweep, or so far forward that all text would be erased at once: a wrong
    clock also writes wrong times into records.
    """
    try:
        passed = now - float((directory / SWEPT).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return
    if not -HOUR <= passed <= DAY * max(1.0, retention_days):
        raise UserError(
            f"{directory}: the clock says that {passed / DAY:+,.1f} days have passed since old text was last erased. Nothing is erased, "
            f"because the clock may be wrong: set it, or delete {directory / SWEPT} if it is right"
        )


def _with_text(line: bytes) -> TrafficRecord | None:
    """The record of a line if it has text. Readers, not this function, refuse invalid lines."""
    if _WITHOUT_TEXT in line:
        return None
    record = record_in(line)
    return None if record is None or record.without_text() is record else record


def record_in(line: bytes) -> TrafficRecord | None:
    """The record of a line; None if it is damaged."""
    try:
        return from_line(line)
    except RecordError:
        return None


def rewrite(directory: Path, changed: Callable[[bytes], bytes]) -> int:
    """Replace every line of a log with ``changed(line)``, empty to delete it; return the number of changed lines. Raises UserError: disk
    full or directory not writable. Each file is then either old or new.
    """
    done: set[Path] = set()
    count = 0
    # Includes files that are started meanwhile.
    while left := [path for path in log_files(directory) if path not in done]:
        with writing(left[0]):
            # Do the slow part before taking the lock, because the gateway waits for it.
            results = {line: changed(line) for line in left[0].read_bytes().splitlines(keepends=True)}
            with write_lock(directory):
                for stale in directory.glob(".log-*.tmp"):
                    stale.unlink()
                before = left[0].read_bytes().splitlines(keepends=True)
                after = [results[line] if line in results else changed(line) for line in before]
                if after != before:
                    write_bytes(left[0], b"".join(after), 0o600, synced=True)
                    count += sum(old != new for old, new in zip(before, after, strict=True))
        done.add(left[0])
    return count
