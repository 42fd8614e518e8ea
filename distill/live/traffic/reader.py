"""The log of live traffic, read back: every line checked, repeats and forgotten requests left out."""

import datetime
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.responses.acceptance_log import AcceptanceLog, AcceptanceRecord
from distill.live.traffic.record import (
    FORGOTTEN,
    RecordError,
    TrafficRecord,
    forgotten_hashes,
    from_line,
    keyed_hash,
    log_files,
    read_salt,
)
from speculative.errors import UserError


@dataclass(frozen=True)
class TrafficLog:
    """Each request once, by time of arrival. warnings: what was left out, in plain lines."""

    directory: Path
    records: list[TrafficRecord]
    warnings: list[str]


def read_traffic(directory: Path) -> TrafficLog:
    """The records of a log directory; of several lines with one id the last counts.

    The last line of the last file may be torn, for the gateway may be writing it: it is left out with a warning.

    Raises:
        UserError: no log there; a line that is damaged or forged (file, line and field are named).
    """
    files = log_files(directory)
    if not files:
        raise UserError(f"{directory}: no log of traffic (log-00001.jsonl) there; give the gateway's --log directory")
    forgotten, warnings, found, lines = forgotten_hashes(directory), list[str](), dict[str, TrafficRecord](), 0
    salt = read_salt(directory) if forgotten else b""
    for number, line, path in _lines(files):
        try:
            record = from_line(line)
        except RecordError as error:
            if path == files[-1] and not line.endswith(b"\n"):
                warnings.append(f"{path}:{number}: the last line is torn and left out")
                continue
            raise UserError(
                f"{path}:{number}: {error}; nobody but the gateway writes here: if the line is damaged, take it out "
                f"(sed -i {number}d {path})"
            ) from error
        if not forgotten or keyed_hash(salt, FORGOTTEN, record.id) not in forgotten:
            lines += 1
            found[record.id] = record
    if lines > len(found):
        warnings.append(f"{lines - len(found):,} lines repeat an id: the last of each counts")
    return TrafficLog(directory, sorted(found.values(), key=lambda record: (record.time, record.id)), warnings)


def _lines(files: Sequence[Path]) -> Iterator[tuple[int, bytes, Path]]:
    for path in files:
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    yield number, line, path
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error


def accepts(record: TrafficRecord) -> bool:
    """Whether its acceptance says something of the draft: it drafted, and no constraint stood between target and text."""
    return bool(record.drafted) and record.accepted is not None and not record.constrained


def acceptance_of(log: TrafficLog, version: str) -> AcceptanceLog:
    """Acceptance of the requests that one draft served.

    Raises:
        UserError: no request that such a draft served.
    """
    told = [record for record in log.records if accepts(record)]
    records = [
        AcceptanceRecord(
            order, record.drafted or 0, record.accepted or 0, record.blocks, record.slice,
            datetime.datetime.fromtimestamp(record.time, datetime.UTC).isoformat(timespec="seconds"),
        )
        for order, record in enumerate(one for one in told if one.draft_version == version)
    ]  # fmt: skip
    versions = Counter(record.draft_version for record in told)
    if not records:
        known = ", ".join(f"{name} ({count:,})" for name, count in versions.items()) or "none"
        raise UserError(f"{log.directory}: no requests with counts of the draft {version}; there are: {known}")
    warnings = list(log.warnings)
    if len(log.records) > len(told):
        warnings.append(
            f"{len(log.records) - len(told):,} of {len(log.records):,} requests are left out: nothing drafted, no counts, or a constraint "
            "on the text"
        )
    targets = {record.target_version for record in told if record.draft_version == version}
    if len(targets) > 1:
        warnings.append(f"more than one target was served: {', '.join(sorted(targets))}; a change may be the target's")
    if len(versions) > 1:
        others = ", ".join(f"{name} ({count:,})" for name, count in versions.items() if name != version)
        warnings.append(f"requests of the draft {version}; left out are those of {others}")
    return AcceptanceLog(records, "traffic", False, warnings)
