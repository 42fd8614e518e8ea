"""Reads the traffic log: checks every line, and leaves out repeated and forgotten requests."""

import datetime
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distill.live.traffic.record import (
    RecordError,
    TrafficRecord,
    forgotten_hashes,
    from_line,
    log_files,
    read_salt,
    remembered,
)
from speculative.errors import UserError


@dataclass(frozen=True)
class TrafficLog:
    """Each request once, by time of arrival. warnings: lines about what was left out."""

    directory: Path
    records: list[TrafficRecord]
    warnings: list[str]


Place = tuple[str, int]  # in a log: file and number of complete lines. Not a time, because clocks can be set.


def end_of(directory: Path) -> Place:
    for path in log_files(directory)[-1:]:
        with path.open("rb") as file:
            return path.name, sum(line.endswith(b"\n") for line in file)
    return "", 0


class LogTail:
    """Follows a growing log, keeping only the number of lines read. A file that was rewritten (retention, forget) is read again from its
    start.
    """

    def __init__(self, directory: Path, after: Place = ("", 0)) -> None:
        """``after``: skip everything before this place."""
        self.directory, (self._file, self._skipped) = directory, after
        self.lines, self.torn = 0, ""  # lines read; place of an incomplete last line
        # file: (bytes, lines) read, (bytes, checksum) of the last line
        self._stood: dict[Path, tuple[int, int, int, int]] = {}

    def read(self) -> Iterator[TrafficRecord]:
        """New records. Those of a rewritten file are repeated.

        Raises UserError: a damaged or forged line; the message names file, line and field.
        """
        files, self.torn = log_files(self.directory), ""
        for path in files:
            if path.name >= self._file:
                try:
                    yield from self._read_on(path, path == files[-1])
                except FileNotFoundError:  # removed by retention
                    continue
                except OSError as error:
                    raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error

    def _read_on(self, path: Path, is_last: bool) -> Iterator[TrafficRecord]:
        skipped = self._skipped if path.name == self._file else 0
        with path.open("rb") as file:
            place, lines, size, checksum = self._stood.get(path, (0, 0, 0, 0))
            file.seek(place - size)
            # Compared by content, because inodes are reused.
            if zlib.crc32(file.read(size)) != checksum:
                place, lines = file.seek(0), 0
            for number, line in enumerate(file, start=lines + 1):
                try:
                    record = from_line(line)
                except RecordError as error:
                    if is_last and not line.endswith(b"\n"):
                        self.torn = f"{path}:{number}"
                        break
                    raise UserError(
                        f"{path}:{number}: {error}; only the gateway should write here. If the line is damaged, remove it "
                        f"(sed -i {number}d {path})"
                    ) from error
                if number > skipped:
                    self.lines += 1
                    yield record
                if line.endswith(b"\n"):
                    place, lines, size, checksum = place + len(line), number, len(line), zlib.crc32(line)
        self._stood[path] = place, lines, size, checksum


def read_traffic(directory: Path) -> TrafficLog:
    """The records of a log directory. If an id occurs more than once, its last line counts. An incomplete last line, which the gateway may
    be writing, is left out with a warning. Raises UserError: no log, or a damaged or forged line; the message names file, line and field.
    """
    if not log_files(directory):
        raise UserError(f"{directory}: no traffic log (log-00001.jsonl) there; give the gateway's --log directory")
    tail = LogTail(directory)
    by_id, warnings = {record.id: record for record in tail.read()}, list[str]()
    if tail.torn:
        warnings.append(f"{tail.torn}: the last line is incomplete and left out")
    if tail.lines > len(by_id):
        warnings.append(f"{tail.lines - len(by_id):,} lines repeat an id; the last line of each id counts")
    records = list(by_id.values())
    if forgotten := forgotten_hashes(directory):
        kept = (remembered(one, read_salt(directory), forgotten) for one in records)
        records = [one for one in kept if one is not None]
    return TrafficLog(directory, sorted(records, key=lambda record: (record.time, record.id)), warnings)


def accepts(record: TrafficRecord) -> bool:
    """Whether a record counts for acceptance: it has drafted tokens, and the text was not constrained."""
    return bool(record.drafted) and record.accepted is not None and not record.constrained


def served_by(log: TrafficLog, version: str) -> tuple[list[TrafficRecord], list[str]]:
    """(requests of one draft version that count for acceptance, warnings). Raises UserError if there are none."""
    counted = [record for record in log.records if accepts(record)]
    records = [record for record in counted if record.draft_version == version]
    versions = Counter(record.draft_version for record in counted)
    if not records:
        names = ", ".join(f"{name} ({count:,})" for name, count in versions.items()) or "none"
        raise UserError(f"{log.directory}: no requests with draft counts for version {version}; found: {names}")
    warnings, all_count, uncounted = list(log.warnings), len(log.records), len(log.records) - len(counted)
    if uncounted:
        why = "nothing drafted, no counts, or constrained text"
        warnings.append(f"{uncounted:,} of {all_count:,} requests are left out: {why}")
    targets = {record.target_version for record in records}
    if len(targets) > 1:
        warnings.append(f"more than one target was served: {', '.join(sorted(targets))}; a change may be the target's")
    if len(versions) > 1:
        others = ", ".join(f"{name} ({count:,})" for name, count in versions.items() if name != version)
        warnings.append(f"only requests of version {version} count; left out: {others}")
    return records, warnings


def moment_of(seconds: float) -> str:
    """A Unix time in UTC."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")
