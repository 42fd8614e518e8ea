"""Acceptance of a running engine as a log: its counters between scrapes, one record per interval, or its answers,
one record per request.
"""

import itertools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distill.engines.protocol.client import counters_of
from distill.engines.protocol.counters import PAGES, ServerCounts, difference
from distill.engines.protocol.counts import AcceptanceLog, AcceptanceRecord, CountsError
from distill.engines.protocol.engine import read_counts
from speculative.errors import UserError

_EXPECTED = (
    '{"accepted": 131, "drafted": 300} on each line, optional "blocks", "domain", "time"; or an engine\'s response'
)
_MOST = 1 << 31  # Maximum tokens of one record.


def scrape(url: str, scrapes: int, interval: float, gamma: int | None, key: str = "") -> AcceptanceLog:
    """Scrape a server several times. ``gamma``: drafted tokens per block of an engine that counts only blocks. ``key``: its API key.

    Raises UserError: no counters, nothing drafted between scrapes, or a restart in every interval.
    """
    root = url.rstrip("/")
    for page in (*PAGES[::-1], "/v1"):
        root = root.removesuffix(page)
    pages = []
    for number in range(scrapes):
        if number:
            time.sleep(interval)
        counters = counters_of(root, key)
        if counters is None or counters.accepted is None:
            raise UserError(
                f"--metrics-url {url}: no counters of drafts there; start the engine with them (docs/readback.md lists the flags)"
            )
        if counters.drafted is None and gamma is None:
            raise UserError(
                f"--metrics-url {url}: {counters.engine} counts blocks, not drafted tokens; give its --gamma"
            )
        pages.append(counters)
    return _differences(url, pages, gamma)


def _differences(url: str, pages: list[ServerCounts], gamma: int | None) -> AcceptanceLog:
    records: list[AcceptanceRecord] = []
    warnings = []
    for number, (before, after) in enumerate(itertools.pairwise(pages), start=1):
        try:
            change = difference(before, after)
        except CountsError as error:
            warnings.append(f"between scrapes {number} and {number + 1} {error}; that interval is left out")
            continue
        drafted = change.drafted if change.drafted is not None else (change.blocks or 0) * (gamma or 0)
        if not drafted or change.accepted is None:
            continue
        if change.accepted > drafted:
            raise UserError(
                f"--metrics-url {url}: {change.accepted:,} tokens accepted of only {drafted:,} drafted tokens; give the server's --gamma"
            )
        records.append(AcceptanceRecord(len(records), drafted, change.accepted, change.blocks))
    if not records:
        idle = "nothing was drafted between the scrapes; check that it serves requests, or raise --interval"
        raise UserError(f"--metrics-url {url}: {'; '.join(warnings) or idle}")
    return AcceptanceLog(records, True, warnings)


def read_answers(path: Path) -> AcceptanceLog:
    """The records of a file of JSON lines: answers that `understudy readback` kept, an engine's responses, or counts.

    An incomplete last line is skipped with a warning, because the file may still be written. Requests without drafted tokens are skipped.

    Raises UserError: no such file, a damaged line (with its number), accepted > drafted, or no records.
    """
    if not path.is_file():
        raise UserError(f"--log {path}: no such file; give the answers of a readback, or see `understudy traffic show`")
    records, warnings, idle = list[AcceptanceRecord](), list[str](), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = _record(len(records), json.loads(line))
            except (ValueError, RecursionError, OverflowError) as error:  # Also too many digits, or nesting too deep.
                if line.endswith(b"\n"):
                    raise UserError(f"{path}:{number}: {error}; expected {_EXPECTED}") from None
                warnings.append(f"{path}:{number}: the last line is incomplete and skipped")
                break
            if record.drafted:
                records.append(record)
            else:
                idle += 1
    if idle:
        warnings.append(f"{idle} of {idle + len(records)} records have no drafted tokens and are skipped")
    if not records:
        raise UserError(f"--log {path}: no record with drafted tokens; expected {_EXPECTED}")
    return AcceptanceLog(records, False, warnings)


def _record(order: int, row: Any) -> AcceptanceRecord:
    """Check one line. Raises ValueError."""
    if not isinstance(row, Mapping):
        raise ValueError("not a JSON object")
    counts: Mapping[str, Any] = row
    if "accepted" not in row and "drafted" not in row:
        response = row["response"] if isinstance(row.get("response"), Mapping) else row
        found = read_counts(response)
        if found is None and "choices" not in response:
            raise ValueError('"accepted" is missing, and this is not a record of a known engine')
        counts = {"accepted": 0, "drafted": 0} if found is None else vars(found)
        row = {"time": response.get("created"), **row}
    for key in ("accepted", "drafted", "blocks"):
        value = counts.get(key)
        if (type(value) is not int or not 0 <= value < _MOST) and not (key == "blocks" and value is None):
            problem = "missing" if key not in counts else json.dumps(value)
            raise ValueError(f'"{key}" is {problem}, not a whole number')
    accepted, drafted, blocks = int(counts["accepted"]), int(counts["drafted"]), counts.get("blocks")
    label, moment = row.get("domain"), row.get("time")
    if accepted > drafted:
        raise ValueError(f"accepted {accepted} of only {drafted} drafted tokens")
    if blocks == 0 and drafted:
        raise ValueError(f"{drafted} drafted tokens in 0 blocks")
    if label is not None and not isinstance(label, str):
        raise ValueError(f'"domain" is {json.dumps(label)}, not text')
    return AcceptanceRecord(order, drafted, accepted, blocks, label, None if moment is None else str(moment))
