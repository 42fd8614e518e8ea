"""Read acceptance per request or per interval from the logs of servers.

EXPECTED has the formats. jsonl: per request; or records of an engine: its responses, one per line or under "response" with "domain",
its request files, records of AIPerf (`engine_counts`). vllm: one line per interval. llama.cpp: one line per request; older builds
write `draft acceptance rate = ...`, without the mean length. All but proposals may be compressed. Other lines of an engine's log are ignored.
"""

import csv
import functools
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.prompts.lines import bare_name, opened
from data.responses.engine_counts import read_counts
from speculative.errors import UserError

EXPECTED = {
    "jsonl": '{"accepted": 131, "drafted": 300} on each line, optional "blocks", "domain", "time"; or an engine\'s response',
    "csv": "a header line with accepted,drafted and optional blocks,domain,time",
    "vllm": "`SpecDecoding metrics: ... Accepted: 131 tokens, Drafted: 300 tokens` lines",
    "llama.cpp": "`draft acceptance = 0.57 ( 171 accepted / 297 generated)` lines",
    "proposals": "the parquet file of `understudy generate --log`",
}
# Patterns of an engine's line: what marks it, its counts, its mean length (printed to two places), its time.
_ENGINES = {
    "vllm": (
        re.compile("SpecDecoding metrics:"),
        re.compile(r"Accepted: (\d+) tokens, Drafted: (\d+) tokens"),
        re.compile(r"Mean acceptance length: (\d+\.\d+)"),
        re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b"),
    ),
    "llama.cpp": (
        re.compile(r"draft acceptance(?: rate)? ="),
        re.compile(r"\(\s*(\d+) accepted /\s*(\d+) generated\)"),
        re.compile(r"mean (?:acceptance length|len) =\s*(\d+\.\d+)"),
        re.compile(r"(?:^|\s)(\d+\.\d\d\.\d{3}\.\d{3}) "),
    ),
}
_POSITIONS = re.compile(r"Per-position acceptance rate: ([\d., ]+?)(?:, [A-Z]|$)")
_MOST = 1 << 31  # Maximum tokens of one record.
_SNIFFED_LINES = 20000  # An engine prints much while it starts.


@dataclass(frozen=True)
class AcceptanceRecord:
    """Tokens of one request or interval. order: from 0, as logged. blocks: target calls with drafted tokens; None if not logged."""

    order: int
    drafted: int
    accepted: int
    blocks: int | None = None
    slice: str | None = None
    time: str | None = None


@dataclass(frozen=True)
class AcceptanceLog:
    """Records of a log. sums: a record is an interval of many requests. warnings: one line for each kind of skipped record."""

    records: list[AcceptanceRecord]
    format: str
    sums: bool
    warnings: list[str] = field(default_factory=list)

    def gamma(self) -> float | None:
        """Mean drafted tokens per block over records with blocks; None if there are none."""
        told = [(record.drafted, record.blocks) for record in self.records if record.blocks is not None]
        return sum(drafted for drafted, _ in told) / sum(blocks for _, blocks in told) if told else None


_Row = Mapping[str, Any]  # accepted, drafted, optional blocks, domain, time; not checked yet.


def read_acceptance_log(path: Path, format: str = "auto") -> AcceptanceLog:
    """The records of a log, in order. `auto` finds the format by suffix and content.

    An incomplete last line is skipped with a warning, because the log may still be written. Requests without drafted tokens are
    skipped.

    Raises UserError: no such file, unknown format, a damaged line (with its number), accepted > drafted, or no records.
    """
    if format not in ("auto", *EXPECTED):
        raise UserError(f"--format {format}: choose one of auto, {', '.join(EXPECTED)}")
    if not path.is_file():
        raise UserError(f"--log {path}: no such file")
    chosen = _format_of(path) if format == "auto" else format
    if chosen is None:
        raise _nothing_in(path, "its format is not recognised")
    warnings: list[str] = []
    rows = _proposals(path) if chosen == "proposals" else _text_rows(path, chosen, warnings)
    records: list[AcceptanceRecord] = []
    idle = 0
    for row in rows:
        if row["drafted"]:
            time = row.get("time")
            counts = row["drafted"], row["accepted"], row.get("blocks"), row.get("domain")
            records.append(AcceptanceRecord(len(records), *counts, None if time is None else str(time)))
        else:
            idle += 1
    if idle:
        warnings.append(f"{idle} of {idle + len(records)} records have no drafted tokens and are skipped")
    if not records:
        raise _nothing_in(path, f"no {chosen} record with drafted tokens")
    return AcceptanceLog(records, chosen, chosen == "vllm", warnings)


def _nothing_in(path: Path, what: str) -> UserError:
    known = "; ".join(f"{name}: {expected}" for name, expected in EXPECTED.items())
    return UserError(f"--log {path}: {what}; formats (--format): {known}")


def _format_of(path: Path) -> str | None:
    """The format by suffix if that is clear, else by the first line that shows it."""
    suffix = Path(bare_name(path)).suffix.lower()
    with path.open("rb") as file:
        if suffix == ".parquet" or file.read(4) == b"PAR1":
            return "proposals"
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    first = True
    for number, line, _ in _lines(path, []):
        if found := next((name for name, (mark, *_) in _ENGINES.items() if mark.search(line)), None):
            return found
        if first and line.strip():
            first = False
            if line.lstrip().startswith("{"):
                return "jsonl"
            if {"accepted", "drafted"} <= {cell.strip(' "') for cell in line.split(",")}:
                return "csv"
        if number > _SNIFFED_LINES:
            break
    return "csv" if suffix == ".csv" else None


def _lines(path: Path, warnings: list[str]) -> Iterator[tuple[int, str, bool]]:
    """(number from 1, text, whether it ends in a line feed) of each line; a truncated compressed file ends early, with a warning."""
    with opened(path) as file:
        # Split only at line feeds: a carriage return inside a line is progress output of an engine.
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="\n")
        number = 0
        try:
            for number, line in enumerate(text, start=1):
                yield number, line.rstrip("\r\n"), line.endswith("\n")
        except EOFError:
            warnings.append(f"{path}:{number + 1}: the compressed file is truncated; the part before is used")
        except (OSError, zlib.error) as error:
            raise UserError(f"--log {path}: cannot be read ({error}); give another copy") from error


def _text_rows(path: Path, format: str, warnings: list[str]) -> Iterator[_Row]:
    """Checked rows of a text log."""
    own: dict[str, Callable[[str], _Row | None]] = {"jsonl": _json_row, "csv": _CsvRows()}
    parse = own.get(format, functools.partial(_engine_line, format))
    for number, line, whole in _lines(path, warnings):
        if not line.strip():
            continue
        try:
            if (row := parse(line)) is not None:
                _check(row)
        except (ValueError, RecursionError, OverflowError) as error:  # Also too many digits, or nesting too deep.
            if whole:
                raise UserError(f"{path}:{number}: {error}; expected {EXPECTED[format]}") from None
            warnings.append(f"{path}:{number}: the last line is incomplete and skipped")
            return
        if row is not None:
            yield row


def _check(row: _Row) -> None:
    for key in ("accepted", "drafted", "blocks"):
        value = row.get(key)
        if (type(value) is not int or not 0 <= value < _MOST) and not (key == "blocks" and value is None):
            raise ValueError(f'"{key}" is {"missing" if key not in row else json.dumps(value)}, not a whole number')
    accepted, drafted, name = row["accepted"], row["drafted"], row.get("domain")
    if accepted > drafted:
        raise ValueError(f"accepted {accepted} of only {drafted} drafted tokens")
    if row.get("blocks") == 0 and drafted:
        raise ValueError(f"{drafted} drafted tokens in 0 blocks")
    if name is not None and not isinstance(name, str):
        raise ValueError(f'"domain" is {json.dumps(name)}, not text')


def _json_row(line: str) -> _Row:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row if "accepted" in row or "drafted" in row else _engine_row(row)


def _engine_row(row: _Row) -> _Row:
    """Convert a record of an engine to a row; a record without drafts has no drafted tokens."""
    response = row["response"] if isinstance(row.get("response"), dict) else row
    if (counts := read_counts(response)) is None:
        if "choices" not in response and "meta_info" not in response:
            raise ValueError('"accepted" is missing, and this is not a record of a known engine')
        return {"accepted": 0, "drafted": 0, "domain": row.get("domain")}
    time = row.get("time", response.get("created"))
    found = {"accepted": counts.accepted, "drafted": counts.drafted, "blocks": counts.blocks, "time": time}
    return {key: value for key, value in found.items() if value is not None} | {"domain": row.get("domain")}


class _CsvRows:
    """Rows with the names of the header, which is the first line."""

    def __init__(self) -> None:
        self.columns: list[str] | None = None

    def __call__(self, line: str) -> _Row | None:
        try:
            cells = [cell.strip() for cell in next(csv.reader([line], strict=True), [])]
        except csv.Error:
            raise ValueError("not a csv line") from None
        if self.columns is None:
            if not {"accepted", "drafted"} <= set(cells):
                raise ValueError("the header lacks accepted and drafted")
            self.columns = cells
            return None
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells under {len(self.columns)} columns")
        row: dict[str, Any] = {name: cell or None for name, cell in zip(self.columns, cells, strict=True)}
        for name in ("accepted", "drafted", "blocks"):
            if re.fullmatch(r"\d+", row.get(name) or "", re.ASCII):
                row[name] = int(row[name])
        return row


def _engine_line(format: str, line: str) -> _Row | None:
    """Blocks are drafted / positions if that agrees with the mean length 1 + accepted / blocks; else they follow from that length."""
    mark, *patterns = _ENGINES[format]
    if (marked := mark.search(line)) is None:
        return None
    counts, length, time, positions = (pattern.search(line) for pattern in (*patterns, _POSITIONS))
    if counts is None:
        raise ValueError(f"a line with {marked[0]} and no counts")
    accepted, drafted = int(counts[1]), int(counts[2])
    blocks = None
    if positions is not None and drafted:
        blocks = max(1, round(drafted / len(positions[1].split(","))))
    if length is not None and (blocks is None or abs(1 + accepted / blocks - float(length[1])) > 0.006):
        more = float(length[1]) - 1
        blocks = max(1, round(accepted / more)) if more > 0 and accepted else None
    return {"accepted": accepted, "drafted": drafted, "blocks": blocks, "time": time and time[1]}


def _proposals(path: Path) -> Iterator[_Row]:
    """One row per prompt, in order of first appearance; the file has no domains."""
    try:
        table = pq.read_table(path, columns=["prompt", "block", "accepted"])
        counted = table.group_by("prompt", use_threads=False).aggregate(
            [("accepted", "count"), ("accepted", "sum"), ("block", "count_distinct")]
        )
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--log {path}: {reason}; expected {EXPECTED['proposals']}") from error
    names = {"accepted_count": "drafted", "accepted_sum": "accepted", "block_count_distinct": "blocks"}
    yield from ({name: row[column] for column, name in names.items()} for row in counted.to_pylist())
