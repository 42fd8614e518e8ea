"""`understudy traffic show`: requests and acceptance by slice, by draft version and over time."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from rich.console import Console

from distill.live.alarm import Alarm, alarm
from distill.live.options import ShowOptions
from distill.live.traffic.reader import TrafficLog, accepts, moment_of, read_traffic
from distill.live.traffic.record import TrafficRecord
from distill.report.table import Cell, Column, Table
from speculative.measure.intervals import Interval
from speculative.measure.metrics import ratio_with_interval
from speculative.measure.record import Record

BINS = 24  # intervals of the time shown


class Traffic(Record):
    """A group of requests. text: with stored token ids. counted: those that count for acceptance; drafted, accepted, rate and ci (95 % over
    prompts) are of these. first_token_s: the median. since, until: the time span, Unix seconds.
    """

    slice: str
    draft_version: str
    requests: int
    prompt_tokens: int
    response_tokens: int
    text: int
    counted: int
    drafted: int
    accepted: int
    rate: float | None
    ci: Interval | None
    first_token_s: float | None
    since: float
    until: float


class Shown(Record):
    """Summary of a log. Times are Unix seconds. finishes: requests by finish reason. alarm: of the last version."""

    log: str
    requests: int
    since: float
    until: float
    finishes: dict[str, int]
    warnings: list[str]
    slices: list[Traffic]
    versions: list[Traffic]
    over_time: list[Traffic]
    alarm: Alarm | None = None


def show_traffic(options: ShowOptions, console: Console) -> Shown:
    """Print tables or JSON. Raises UserError: no log, or a forged line."""
    log = read_traffic(options.log)
    versions = [record.draft_version for record in log.records if accepts(record)]
    shown = _summary(log, alarm(log, versions[-1]) if versions else None)
    if options.as_json:
        console.print_json(data=shown.model_dump())
        return shown
    lines = [f"{options.log}: {shown.requests:,} requests, {moment_of(shown.since)} to {moment_of(shown.until)}"]
    notes = dict.fromkeys([*shown.warnings, *(shown.alarm.notes if shown.alarm else ())])
    lines += [f"note: {note}" for note in notes] + ([shown.alarm.sentence] if shown.alarm else [])
    rate = Column("accepted/drafted", ".3f")
    counts = [Column(name, ",") for name in ("requests", "tokens", "text")]
    columns: list[Column | str] = ["slice", "draft", *counts, rate, Column("first token", ",.0f", " ms")]
    table = Table(columns, caption="[95 % interval] over prompts; text: requests with stored token ids")
    for row in (*shown.slices, *shown.versions):
        first = None if row.first_token_s is None else 1000 * row.first_token_s
        numbers = row.requests, row.response_tokens, row.text
        table.add(row.slice, row.draft_version, *numbers, Cell(row.rate, row.ci), first)
    over_time = Table(["from", "draft", Column("requests", ","), rate])
    for row in shown.over_time:
        over_time.add(moment_of(row.since), row.draft_version, row.requests, Cell(row.rate, row.ci))
    console.print(table)
    console.print(over_time)
    for line in lines:
        console.print(line, highlight=False, markup=False)
    return shown


def _summary(log: TrafficLog, found: Alarm | None) -> Shown:
    records = log.records
    since, until = (records[0].time, records[-1].time) if records else (0.0, 0.0)
    width = (until - since) / BINS or 1.0
    parts: dict[tuple[int, str], list[TrafficRecord]] = {}  # by interval and draft
    slices: dict[str, list[TrafficRecord]] = {}
    versions: dict[str, list[TrafficRecord]] = {}  # in order of first use
    for record in records:
        number = min(BINS - 1, int((record.time - since) / width))
        parts.setdefault((number, record.draft_version), []).append(record)
        slices.setdefault(record.slice, []).append(record)
        versions.setdefault(record.draft_version, []).append(record)
    over_time = [
        _row(part, "", version, (since + number * width, since + (number + 1) * width))
        for (number, version), part in sorted(parts.items(), key=lambda item: item[0][0])
    ]
    return Shown(
        log=str(log.directory),
        requests=len(records),
        since=since,
        until=until,
        warnings=log.warnings,
        over_time=over_time,
        finishes=dict(sorted(Counter(record.finish for record in records).items())),
        slices=[_row(part, name, "", (since, until)) for name, part in sorted(slices.items())],
        versions=[_row(part, "", name, (since, until)) for name, part in versions.items()],
        alarm=found,
    )


def _row(records: Sequence[TrafficRecord], name: str, version: str, span: tuple[float, float]) -> Traffic:
    counted = [record for record in records if accepts(record)]
    accepted_N, drafted_N = (np.array([getattr(record, key) for record in counted]) for key in ("accepted", "drafted"))
    prompts = [record.prompt_hash for record in counted]
    waits = [record.first_token_s for record in records if record.first_token_s is not None]
    return Traffic(
        slice=name,
        draft_version=version,
        requests=len(records),
        since=span[0],
        until=span[1],
        prompt_tokens=sum(record.prompt_tokens or 0 for record in records),
        response_tokens=sum(record.response_tokens or 0 for record in records),
        text=sum(record.response_ids is not None for record in records),
        counted=len(counted),
        drafted=int(drafted_N.sum()),
        accepted=int(accepted_N.sum()),
        rate=float(accepted_N.sum() / drafted_N.sum()) if counted else None,
        ci=ratio_with_interval(accepted_N, drafted_N, prompts)[1] if len(counted) > 1 else None,
        first_token_s=float(np.median(waits)) if waits else None,
    )
