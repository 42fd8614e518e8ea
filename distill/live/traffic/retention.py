"""What a log keeps, and for how long: text of a sample of recent requests.

Every file is rewritten whole, under the lock that each append takes, so a gateway may be running.
"""

import contextlib
import fcntl
import heapq
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
_WITHOUT_TEXT = b'"prompt_ids":null,"response_ids":null'


@dataclass(frozen=True)
class Swept:
    """scrubbed: records that lost their text. kept: priorities of those that have it, by slice."""

    scrubbed: int
    kept: dict[str, list[str]]


@contextlib.contextmanager
def write_lock(directory: Path) -> Iterator[None]:
    """Held by whoever appends to a log or rewrites it."""
    with open(os.open(directory / WRITE_LOCK, os.O_CREAT | os.O_RDWR, 0o600), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sweep(
    directory: Path, retention_days: float, reservoir: int | None, now: float, trust_clock: bool = False
) -> Swept:
    """Takes the text out of records that are too old, or beyond their slice's sample.

    A slice keeps the text of the ``reservoir`` records (None: of all) whose keyed hashes are the smallest: a random sample, the same
    whoever draws it. ``now``: Unix seconds. ``trust_clock``: also after a jump.

    Raises:
        UserError: the clock has jumped, or the directory cannot be read or written.
    """
    salt, oldest, newest = read_salt(directory), now - retention_days * DAY, -math.inf
    seen: dict[str, set[str]] = defaultdict(set)
    for path in log_files(directory):
        for line in path.read_bytes().splitlines(keepends=True):
            if (record := _with_text(line)) is not None:
                newest = max(newest, record.time)
                if record.time >= oldest:
                    seen[record.slice].add(priority(salt, record.id))
    if newest > -math.inf and not trust_clock:
        _check_clock(directory, newest, retention_days, now)
    most = max(map(len, seen.values()), default=0) if reservoir is None else reservoir
    kept = {name: heapq.nsmallest(most, places) for name, places in seen.items()}
    dropped = {name: places.difference(kept[name]) for name, places in seen.items()}

    def scrubbed(line: bytes) -> bytes:
        record = _with_text(line)
        # One that came since the samples were drawn waits for the next sweep.
        if record is None or (record.time >= oldest and priority(salt, record.id) not in dropped.get(record.slice, ())):
            return line
        return to_line(record.without_text())

    done = Swept(rewrite(directory, scrubbed), kept)
    with writing(directory / SWEPT):
        write_bytes(directory / SWEPT, b"%d\n" % now, 0o600)
    return done


def _check_clock(directory: Path, newest: float, retention_days: float, now: float) -> None:
    """Raises UserError for a clock that stepped back, or so far forward that all text would be erased at once.

    Judged by the last sweep, before the first one by the newest text: a wrong clock writes wrong times into records too.
    """
    last = newest
    with contextlib.suppress(OSError, ValueError):
        last = float((directory / SWEPT).read_text(encoding="ascii"))
    if not -HOUR <= now - last <= DAY * max(1.0, retention_days):
        raise UserError(
            f"{directory}: by the clock {(now - last) / DAY:+,.1f} days have passed since text was last erased or written; nothing is "
            "erased, for the clock may be wrong: set it, or start the gateway with --trust-clock"
        )


def _with_text(line: bytes) -> TrafficRecord | None:
    """The record of a line, if it has text; a line that is no record is for readers to refuse."""
    if _WITHOUT_TEXT in line:
        return None
    record = record_in(line)
    return None if record is None or record.without_text() is record else record


def record_in(line: bytes) -> TrafficRecord | None:
    """The record of a line; None of a damaged one."""
    try:
        return from_line(line)
    except RecordError:
        return None


def rewrite(directory: Path, changed: Callable[[bytes], bytes]) -> int:
    """Every line of a log as `changed` gives it, empty for none; returns how many are others now.

    Raises:
        UserError: disk full or directory not writable; files are old or new, each whole.
    """
    done: set[Path] = set()
    count = 0
    # A file that is begun meanwhile is looked at too.
    while left := [path for path in log_files(directory) if path not in done]:
        with writing(left[0]):
            # What takes time is done before the gateway has to wait.
            known = {line: changed(line) for line in left[0].read_bytes().splitlines(keepends=True)}
            with write_lock(directory):
                for stale in directory.glob(".log-*.tmp"):
                    stale.unlink()
                before = left[0].read_bytes().splitlines(keepends=True)
                after = [known[line] if line in known else changed(line) for line in before]
                if after != before:
                    write_bytes(left[0], b"".join(after), 0o600, synced=True)
                    count += sum(old != new for old, new in zip(before, after, strict=True))
        done.add(left[0])
    return count
