"""`understudy traffic show`: requests and acceptance by slice, by draft version and over time."""

import datetime
from collections.abc import Sequence

import numpy as np
from rich.console import Console

from distill.live.alarm.alarm import Alarm, alarm
from distill.live.options import ShowOptions
from distill.live.traffic.reader import TrafficLog, accepts, read_traffic
from distill.live.traffic.record import TrafficRecord
from distill.report.table import Cell, Column, Table
from speculative.measure.intervals import Interval
from speculative.measure.metrics import ratio_with_interval
from speculative.measure.record import Record


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
    """Summary of a log. Times are Unix seconds. finishes: requests by finish reason. alarm: of the last version, or of --draft-version."""

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
    told = [record.draft_version for record in log.records if accepts(record)]
    version = options.draft_version or (told or [""])[-1]
    found = alarm(log, version) if version else None
    shown = _summary(log, options.bins).model_copy(update={"alarm": found})
    if options.as_json:
        console.print_json(data=shown.model_dump())
        return shown
    lines = [f"{options.log}: {shown.requests:,} requests, {_moment(shown.since)} to {_moment(shown.until)} UTC"]
    notes = dict.fromkeys([*shown.warnings, *(found.notes if found is not None else ())])
    lines += [f"note: {note}" for note in notes] + ([found.sentence] if found is not None else [])
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
        over_time.add(_moment(row.since), row.draft_version, row.requests, Cell(row.rate, row.ci))
    console.print(table)
    console.print(over_time)
    for line in lines:
        console.print(line, highlight=False, markup=False)
    return shown


def _summary(log: TrafficLog, bins: int) -> Shown:
    records = log.records
    times = np.array([record.time for record in records])
    since, until = (float(times[0]), float(times[-1])) if len(times) else (0.0, 0.0)
    edges = np.linspace(since, until, bins + 1)
    bin_N = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, bins - 1)
    versions = list(dict.fromkeys(record.draft_version for record in records))  # in order of first use
    over_time = []
    for number in np.unique(bin_N).tolist():
        here = [records[place] for place in np.flatnonzero(bin_N == number)]
        span = float(edges[number]), float(edges[number + 1])
        for version in versions:
            if own := [record for record in here if record.draft_version == version]:
                over_time.append(_row(own, "", version, span))
    finishes, whole = [record.finish for record in records], (since, until)
    return Shown(
        log=str(log.directory),
        requests=len(records),
        since=since,
        until=until,
        warnings=log.warnings,
        over_time=over_time,
        finishes={name: finishes.count(name) for name in sorted(set(finishes))},
        slices=[
            _row([one for one in records if one.slice == name], name, "", whole)
            for name in sorted({one.slice for one in records})
        ],
        versions=[_row([one for one in records if one.draft_version == name], "", name, whole) for name in versions],
    )


def _row(records: Sequence[TrafficRecord], name: str, version: str, span: tuple[float, float]) -> Traffic:
    counted = [record for record in records if accepts(record)]
    accepted = np.array([one.accepted for one in counted], dtype=np.float64)
    drafted = np.array([one.drafted for one in counted], dtype=np.float64)
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
        drafted=int(drafted.sum()),
        accepted=int(accepted.sum()),
        rate=float(accepted.sum() / drafted.sum()) if counted else None,
        ci=ratio_with_interval(accepted, drafted, [one.prompt_hash for one in counted])[1]
        if len(counted) > 1
        else None,
        first_token_s=float(np.median(waits)) if waits else None,
    )


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(" ", "seconds").removesuffix("+00:00")
