"""Acceptance of a running engine as a log: its counters between scrapes, one record per interval, or its answers,
one record per request.
"""

import itertools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from distill.config.layout import ANSWERS
from distill.engines.protocol.client import counters_of
from distill.engines.protocol.counters import PAGES, difference
from distill.engines.protocol.counts import CountsError, DraftCounts
from distill.engines.protocol.engine import read_counts
from speculative.errors import UserError


@dataclass(frozen=True)
class AcceptanceRecord:
    """Tokens of one request or interval. blocks: target calls with drafted tokens; None if not logged."""

    drafted: int
    accepted: int
    blocks: int | None = None
    domain: str | None = None


@dataclass(frozen=True)
class AcceptanceLog:
    """Records of a log. sums: a record is an interval of many requests. warnings: on skipped records."""

    records: list[AcceptanceRecord]
    sums: bool = False
    warnings: list[str] = field(default_factory=list)


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


def _differences(url: str, pages: list[DraftCounts], gamma: int | None) -> AcceptanceLog:
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
        records.append(AcceptanceRecord(drafted, change.accepted, change.blocks))
    if not records:
        idle = "nothing was drafted between the scrapes; check that it serves requests, or raise --interval"
        raise UserError(f"--metrics-url {url}: {'; '.join(warnings) or idle}")
    return AcceptanceLog(records, True, warnings)


def read_answers(path: Path) -> AcceptanceLog:
    """The records of answers that `understudy readback` kept as JSON lines. Those without drafted tokens are skipped.

    So is a last line without an end, which a killed readback leaves.

    Raises UserError: no such file, a damaged line (with its number), counts that contradict each other, or no records.
    """
    if not path.is_file():
        raise UserError(f"--log {path}: no such file; give the answers of a readback, or see `understudy traffic show`")
    records, idle, warnings = list[AcceptanceRecord](), 0, list[str]()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            counts = read_counts(row["response"])
            label = str(row["domain"])
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                warnings = [f"line {number}, the last, is only the start of an answer and is skipped"]
                continue
            raise UserError(f"{path}:{number}: {error}; give the answers of a readback, RUN/{ANSWERS}") from None
        if counts is None or not counts.drafted or counts.accepted is None:
            idle += 1
        else:
            records.append(AcceptanceRecord(counts.drafted, counts.accepted, counts.blocks, label))
    if not records:
        raise UserError(f"--log {path}: no answer with drafted tokens; give the answers of a readback, RUN/{ANSWERS}")
    warnings += [f"{idle} answers have no drafted tokens and are skipped"] * bool(idle)
    return AcceptanceLog(records, False, warnings)
