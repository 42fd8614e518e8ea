"""The frontier of a sweep: what each combination costs in bytes, hours and money, and which ones nothing beats in both size and speed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from distill.commands.sweep.plan import Trial
from distill.commands.sweep.table import Combination, mean_of, value_text
from distill.config.layout import best_student
from distill.report.figures import write_figure
from distill.report.money import Prices, price_rows, run_hours
from distill.report.table import Cell, Column, Table
from distill.run.verdict_record import Verdict, load_verdict
from speculative.measure.intervals import Interval
from speculative.measure.measured import DRAFT

MEGABYTE = 1e6


@dataclass(frozen=True)
class SizeAndSpeed:
    """A combination, as means over its finished seeds. speed_ups: (speed-up, its interval) of the draft by number of concurrent requests.
    c: draft step / target step. bytes: of the draft's weights. hours: of all stages of the run. million: price of a million tokens with the
    draft at one request; None without a price. frontier: no other combination is at most as large and at least as fast, and better in one.
    """

    values: dict[str, object]
    alpha: float | None
    tau: float | None
    c: float | None
    speed_ups: dict[int, tuple[float, Interval | None]]
    bytes: int
    hours: float
    million: float | None
    frontier: bool = False

    @property
    def speed_up(self) -> float:
        return self.speed_ups[1][0]

    @property
    def name(self) -> str:
        return ", ".join(f"{key.split('.')[-1]} {value_text(value)}" for key, value in self.values.items())


def points_of(rows: Sequence[Combination], trials: Sequence[Trial], price: float | None) -> list[SizeAndSpeed]:
    """The combinations with a finished and timed run, smallest draft first, with the frontier marked.

    Raises UserError: a run's verdict cannot be read.
    """
    folders = {trial.config.name: trial.config.folder for trial in trials}
    points = []
    for row in rows:
        runs = [folders[name] for name in row.runs if name in row.finished]
        found = [_point(row, [(run, load_verdict(run)) for run in runs], price)] if runs else []
        points += [point for point in found if 1 in point.speed_ups]
    return marked(points)


def marked(points: Sequence[SizeAndSpeed]) -> list[SizeAndSpeed]:
    """The points, smallest draft first, with the frontier marked."""
    points = sorted(points, key=lambda point: (point.bytes, -point.speed_up))
    sizes = [(point.bytes, -point.speed_up) for point in points]
    beaten = [any(o != own and o[0] <= own[0] and o[1] <= own[1] for o in sizes) for own in sizes]
    return [replace(point, frontier=not lost) for point, lost in zip(points, beaten, strict=True)]


def _point(row: Combination, runs: Sequence[tuple[Path, Verdict]], price: float | None) -> SizeAndSpeed:
    verdicts = [verdict for _, verdict in runs]
    loads = sorted(set.intersection(*(set(verdict.concurrencies) for verdict in verdicts)) | {1})
    speed_ups = {}
    for load in loads:
        found = [verdict.row(DRAFT, load) for verdict in verdicts]
        timed = [own for own in found if own is not None and own.speed_up is not None]
        if len(timed) == len(verdicts):
            mean = mean_of(timed)
            speed_ups[load] = mean.speed_up or 0.0, mean.speed_up_ci
    ratios = [verdict.costs.cost_ratio for verdict in verdicts if verdict.costs is not None]
    prices = Prices(price, price) if price else None
    millions = [rows[0].million_with_draft for verdict in verdicts if prices and (rows := price_rows(verdict, prices))]
    alpha, tau = row.figure("alpha"), row.figure("tau")
    return SizeAndSpeed(
        values=row.values,
        alpha=alpha.value if alpha else None,
        tau=tau.value if tau else None,
        c=_mean(ratios),
        speed_ups=speed_ups,
        bytes=max(sum(file.stat().st_size for file in best_student(run).glob("*.safetensors")) for run, _ in runs),
        hours=float(np.mean([run_hours(verdict) for verdict in verdicts])),
        million=_mean(millions),
    )


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def recommended(points: Sequence[SizeAndSpeed]) -> tuple[SizeAndSpeed, str] | None:
    """The smallest draft of the frontier that is not certainly slower than the fastest, and why; None without points."""
    if not points:
        return None
    fastest = max(points, key=lambda point: point.speed_up)
    ends = fastest.speed_ups[1][1]
    near = [one for one in points if one.frontier and ((own := one.speed_ups[1][1]) and ends and own[1] >= ends[0])]
    chosen = near[0] if near else fastest
    other = f"not certainly slower than the fastest ({fastest.name}, {fastest.speed_up:.2f}x)"
    size = f"{chosen.bytes / MEGABYTE:,.1f} MB, {chosen.hours:.2f} hours"
    why = f"it is the smallest draft that is {'the fastest' if chosen is fastest else other}"
    return chosen, f"Recommended: {chosen.name}: {chosen.speed_up:.2f}x, {size}; {why}."


def frontier_table(points: Sequence[SizeAndSpeed]) -> Table:
    """One row per combination, the smallest draft first; the frontier is bold."""
    loads = sorted({load for point in points for load in point.speed_ups})
    speeds = [Column(f"speed-up at {load}", ".2f", "x") for load in loads]
    judged = Column("alpha", ".3f"), Column("c", ".3f"), Column("tau", ".2f")
    spent = [Column("MB", ",.1f"), Column("hours", ".2f")]
    spent += [Column("a million tokens", ",.2f")] if any(point.million is not None for point in points) else []
    table = Table(
        [*points[0].values, *judged, *speeds, *spent, ""],
        title="size against speed",
        caption="frontier: no other draft is as small and as fast. hours: all stages of a run. Speed-ups: over the target "
        "alone at that load",
    )
    for point in points:
        cells = [Cell(*point.speed_ups[load]) if load in point.speed_ups else None for load in loads]
        money = [point.million] if any(one.million is not None for one in points) else []
        values = map(value_text, point.values.values())
        numbers = [point.alpha, point.c, point.tau, *cells, point.bytes / MEGABYTE, point.hours, *money]
        table.add(*values, *numbers, "frontier" if point.frontier else "", strong=point.frontier)
    return table


def plot_frontier(path: Path, points: Sequence[SizeAndSpeed], picked: SizeAndSpeed) -> None:
    """Plot speed-up at one request over the draft's size, with intervals; the frontier is a line, the recommended point a ring."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axis = figure.subplots()
    for point in points:
        ends = point.speed_ups[1][1] or (point.speed_up, point.speed_up)
        reach = [[max(0.0, point.speed_up - ends[0])], [max(0.0, ends[1] - point.speed_up)]]
        size, color = point.bytes / MEGABYTE, "tab:blue" if point.frontier else "tab:gray"
        axis.errorbar(size, point.speed_up, reach, fmt="o", color=color, capsize=3)
        axis.annotate(point.name, (size, point.speed_up), xytext=(6, 4), textcoords="offset points", fontsize=7)
    front = [(point.bytes / MEGABYTE, point.speed_up) for point in points if point.frontier]
    axis.plot(*zip(*front, strict=True), color="tab:blue", alpha=0.4)
    ring: Any = {"markersize": 14, "fillstyle": "none", "color": "tab:green", "label": "recommended"}
    axis.plot(picked.bytes / MEGABYTE, picked.speed_up, "o", **ring)
    axis.axhline(1.0, color="dimgrey", linewidth=0.8, linestyle=":")
    axis.set(xlabel="draft, MB", ylabel="speed-up at one request", title="size against speed, 95 % interval")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    write_figure(figure, path)
