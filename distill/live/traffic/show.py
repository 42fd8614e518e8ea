"""`understudy traffic show`: what came, of which slice, and how much of what was drafted was accepted, over time."""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.dates import ConciseDateFormatter
from matplotlib.figure import Figure
from rich.console import Console

from data.files import writing
from distill.commands.output import check_plot
from distill.live.alarm.alarm import alarm
from distill.live.traffic.options import ShowOptions
from distill.live.traffic.reader import TrafficLog, accepts, read_traffic
from distill.live.traffic.record import TrafficRecord
from distill.report.plot import write_figure
from distill.report.screen_table import screen_table
from distill.report.tables import interval
from speculative.measure.intervals import ratio_interval


def show_traffic(options: ShowOptions, console: Console) -> dict[str, Any]:
    """{log, requests, since, until, finishes: {name: requests}, warnings, slices, versions: [row], over_time: [row + {since, until}],
    alarm: of --run}.

    row: {slice, draft_version, requests, prompt_tokens, response_tokens, text, counted, drafted, accepted, rate, ci, first_token_s}.
    counted: requests whose acceptance says something of the draft; the next four are theirs, null or 0 where there are none. ci: 95 % over
    requests. text: requests whose tokens are kept. first_token_s: the median. Times are Unix seconds.

    Raises:
        UserError: no log there, a forged line, no place for the plot.
    """
    check_plot(options.plot)
    log = read_traffic(options.log)
    records, result = log.records, _summary(log, options.bins)
    if options.run is not None:
        told = [record.draft_version for record in records if accepts(record)]
        found = alarm(log, options.draft_version or (told or [""])[-1], options.run)
        result["alarm"] = found.record()
    if options.plot is not None:
        with writing(f"--plot {options.plot}"):
            plot_traffic(options.plot, result)
    if options.as_json:
        console.print_json(data=result)
        return result
    since, until = (_moment(records[place].time) for place in (0, -1)) if records else ("-", "-")
    console.print(f"{options.log}: {len(records):,} requests, {since} to {until} UTC", highlight=False, markup=False)
    table = screen_table(
        "", ("slice", "draft", "requests", "tokens", "text", "accepted/drafted", "first\ntoken"), words=("slice", "draft"), no_wrap=True,
        caption="[95 % interval] over requests; text: requests whose tokens are kept",
    )  # fmt: skip
    for row in (*result["slices"], *result["versions"]):
        first = "-" if row["first_token_s"] is None else f"{row['first_token_s'] * 1000:,.0f} ms"
        counts = (f"{row[key]:,}" for key in ("requests", "response_tokens", "text"))
        table.add_row(row["slice"], row["draft_version"], *counts, _rate(row), first)
    console.print(table)
    table = screen_table("", ("from", "draft", "requests", "accepted/drafted"), words=("from", "draft"), no_wrap=True)
    for row in result["over_time"]:
        table.add_row(_moment(row["since"]), row["draft_version"], f"{row['requests']:,}", _rate(row))
    console.print(table)
    for line in [f"note: {warning}" for warning in log.warnings] + (
        [found.sentence] if options.run is not None else []
    ):
        console.print(line, highlight=False, markup=False)
    return result


def _summary(log: TrafficLog, bins: int) -> dict[str, Any]:
    records = log.records
    times = np.array([record.time for record in records])
    since, until = (float(times[0]), float(times[-1])) if len(times) else (0.0, 0.0)
    edges = np.linspace(since, until, bins + 1)
    bin_N = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, bins - 1)
    slices = sorted({record.slice for record in records})
    versions = sorted({record.draft_version for record in records}, key=lambda name: _first(records, name))
    over_time = []
    for number in np.unique(bin_N).tolist():
        here = [records[place] for place in np.flatnonzero(bin_N == number)]
        for version in versions:
            if own := [record for record in here if record.draft_version == version]:
                over_time.append(
                    _row(own, "", version) | {"since": float(edges[number]), "until": float(edges[number + 1])}
                )
    finishes = [record.finish for record in records]
    return {
        "log": str(log.directory), "requests": len(records), "since": since, "until": until,
        "finishes": {name: finishes.count(name) for name in sorted(set(finishes))}, "warnings": log.warnings,
        "slices": [_row([one for one in records if one.slice == name], name, "") for name in slices],
        "versions": [_row([one for one in records if one.draft_version == name], "", name) for name in versions],
        "over_time": over_time,
    }  # fmt: skip


def _first(records: Sequence[TrafficRecord], version: str) -> float:
    return next(record.time for record in records if record.draft_version == version)


def _row(records: Sequence[TrafficRecord], name: str, version: str) -> dict[str, Any]:
    counted = [record for record in records if accepts(record)]
    accepted, drafted = (
        np.array([getattr(one, key) for one in counted], dtype=np.float64) for key in ("accepted", "drafted")
    )
    waits = [record.first_token_s for record in records if record.first_token_s is not None]
    return {
        "slice": name, "draft_version": version, "requests": len(records),
        "prompt_tokens": sum(record.prompt_tokens or 0 for record in records),
        "response_tokens": sum(record.response_tokens or 0 for record in records),
        "text": sum(record.response_ids is not None for record in records), "counted": len(counted),
        "drafted": int(drafted.sum()), "accepted": int(accepted.sum()),
        "rate": float(accepted.sum() / drafted.sum()) if counted else None,
        "ci": list(ratio_interval(accepted, drafted)) if len(counted) > 1 else None,
        "first_token_s": float(np.median(waits)) if waits else None,
    }  # fmt: skip


def _rate(row: dict[str, Any]) -> str:
    return "-" if row["rate"] is None else f"{row['rate']:.3f} {interval(row['ci'])}".rstrip()


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(" ", "seconds").removesuffix("+00:00")


def plot_traffic(path: Path, result: dict[str, Any]) -> None:
    """Acceptance with its interval, a line a draft version, above the requests; png or svg by the file's name."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for version in (row["draft_version"] for row in result["versions"]):
        rows = [row for row in result["over_time"] if row["draft_version"] == version]
        told = [row for row in rows if row["ci"] is not None]
        times = [datetime.datetime.fromtimestamp((row["since"] + row["until"]) / 2, datetime.UTC) for row in told]
        (line,) = top.plot(times, [row["rate"] for row in told], marker="o", markersize=3, label=version)  # type: ignore[arg-type]
        top.fill_between(times, *zip(*(row["ci"] for row in told), strict=True), alpha=0.2) if told else None  # type: ignore[arg-type]
        starts = [datetime.datetime.fromtimestamp(row["since"], datetime.UTC) for row in rows]
        width = datetime.timedelta(seconds=rows[0]["until"] - rows[0]["since"])
        bottom.bar(
            starts, [row["requests"] for row in rows], width=width, align="edge", alpha=0.5, color=line.get_color()
        )  # type: ignore[arg-type]
    top.set(ylabel="accepted / drafted", title="served acceptance by draft version, 95 % interval")
    if result["versions"]:
        top.legend(fontsize=8)
    top.grid(alpha=0.3)
    bottom.set(ylabel="requests")
    bottom.xaxis.set_major_formatter(ConciseDateFormatter(bottom.xaxis.get_major_locator()))
    write_figure(figure, path)
