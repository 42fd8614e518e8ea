"""Plot of a loop's served acceptance and tokens per second over time, with its events."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from distill.live.traffic.reader import read_traffic
from distill.live.traffic.record import TrafficRecord
from distill.report.figures import write_figure
from loop.account import LoopResult, counted
from speculative.measure.intervals import ratio_interval

BIN_REQUESTS, MOST_POINTS = 20, 40  # of a line


def plot_loop(path: Path, traffic: Path, result: LoopResult, began: float) -> None:
    """Plot one line per draft version, each point with the 95 % interval of some requests of one domain; events are numbered lines."""
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    (axis, beside), (below, empty) = figure.subplots(2, 2, width_ratios=(3, 1), height_ratios=(3, 2), sharex="col")
    empty.axis("off")
    records = read_traffic(traffic).records
    versions = dict.fromkeys(record.draft_version for record in records)
    colours = {
        version: f"C{place}" for place, version in enumerate(own for own in versions if own not in ("none", "plain"))
    }
    for version in versions:
        if version != "none":  # the overload
            served = [one for one in records if one.draft_version == version]
            _plot_speed(below, served, began, colours.get(version, "dimgrey"))
        own = counted(records, version)
        size = max(BIN_REQUESTS, len(own) // MOST_POINTS)
        sides = ([one for one in own if (one.time < result.shifted_at) == before] for before in (True, False))
        bins = [side[start : start + size] for side in sides for start in range(0, len(side), size)]
        bins = [part for part in bins if len(part) >= BIN_REQUESTS // 2]
        if not bins:
            continue
        times = [float(np.mean([record.time for record in part])) - began for part in bins]
        counts = [np.array([[one.accepted, one.drafted] for one in part], dtype=np.float64).T for part in bins]
        rates = [accepted.sum() / drafted.sum() for accepted, drafted in counts]
        (line,) = axis.plot(times, rates, marker="o", markersize=3, label=f"draft {version}", color=colours[version])
        low, high = zip(*(ratio_interval(accepted, drafted) for accepted, drafted in counts), strict=True)
        axis.fill_between(times, low, high, alpha=0.2, color=line.get_color())
    _write_events(axis, beside, result.events)
    axis.set(ylabel="accepted / drafted, served", ylim=(0, None))
    below.set(xlabel="seconds", ylabel="tokens per second of a request", ylim=(0, None))
    below.grid(alpha=0.3)
    below.legend(fontsize=8, loc="lower center")
    axis.set_title(f"The closed loop, engine: {result.engine}", pad=16)
    axis.legend(fontsize=8, loc="upper center")
    axis.grid(alpha=0.3)
    write_figure(figure, path)


def _plot_speed(axis: Any, own: Sequence[TrafficRecord], began: float, colour: str) -> None:
    """Tokens per second of requests, BIN_REQUESTS of them a point."""
    told = [one for one in own if one.response_tokens and one.total_s]
    bins = [told[start : start + BIN_REQUESTS] for start in range(0, len(told), BIN_REQUESTS)]
    rates = [sum(one.response_tokens or 0 for one in part) / sum(one.total_s or 0.0 for one in part) for part in bins]
    times = [float(np.mean([one.time for one in part])) - began for part in bins]
    version = own[0].draft_version
    label = "target alone" if version == "plain" else f"draft {version}"
    axis.plot(times, rates, marker="o", markersize=3, label=label, color=colour)


def _write_events(axis: Any, beside: Any, events: Sequence[tuple[float, str]]) -> None:
    """Draw a numbered line per event; the descriptions are listed next to the plot."""
    beside.axis("off")
    width, above = np.diff(axis.get_xlim())[0] / 50, dict[float, list[str]]()
    for number, (seconds, words) in enumerate(events, start=1):
        killed = words.startswith("kill")
        color = "tab:red" if killed else "dimgrey"
        axis.axvline(seconds, color=color, linewidth=0.8, linestyle=":" if killed else "-")
        place = next((known for known in above if seconds - known < width), seconds)
        above.setdefault(place, []).append(str(number))
        height, line = 1 - number / (len(events) + 1), f"{number}  {seconds:.0f} s  {words}"
        beside.text(0, height, line, color=color, fontsize=8, va="center")
    for place, numbers in above.items():
        axis.annotate(",".join(numbers), (place, 1.01), xycoords=("data", "axes fraction"), fontsize=7, ha="center")
