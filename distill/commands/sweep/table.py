"""What a sweep found: one row per combination, means over seeds with intervals, the best and what cannot be told from it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from distill.commands.sweep.plan import SEED, SweepFile, Trial
from distill.report.table import Cell, Column, Table
from distill.run.folder import load_verdict
from distill.run.verdict_record import Interval
from speculative.measure.measured import DRAFT, Measured

BEST, NOISE = "best", "within noise of the best"
LEVEL = 0.95


@dataclass(frozen=True)
class Figure:
    """A number with its 95 % interval; None where there is none."""

    value: float
    ci: Interval | None


@dataclass(frozen=True)
class Row:
    """A combination: its runs that are finished, those that are missing, the mean of each figure, and what is said of it.

    Intervals are over seeds (Student's t) where several are finished, else the judged one, over prompts.
    """

    values: dict[str, object]
    runs: list[str]
    seeds: int
    missing: int
    figures: dict[str, Figure | None]
    note: str = ""


def figures_of(trial: Trial) -> dict[str, Figure | None]:
    """Alpha, tau and speed-up of a finished run's draft, with their judged intervals.

    Raises:
        UserError: no verdict.
    """
    verdict = load_verdict(trial.config.folder)
    judged, timed = verdict.judged(DRAFT), verdict.row(DRAFT)
    return {"alpha": _figure(judged, "alpha"), "tau": _figure(judged, "tau"), "speed_up": _figure(timed, "speed_up")}


def _figure(row: Measured | None, name: str) -> Figure | None:
    value = getattr(row, name, None)
    return None if value is None else Figure(value, getattr(row, f"{name}_ci"))


def t_interval(values: Sequence[float]) -> Interval | None:
    """The interval of the mean at 95 %: Student's t over independent runs; None for fewer than two.

    mean -+ t(0.975, n - 1) s / sqrt(n), s the sample's standard deviation.
    """
    if len(values) < 2:
        return None
    half = float(stats.t.ppf(0.5 + LEVEL / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    mean = float(np.mean(values))
    return mean - half, mean + half


def summarise(sweep: SweepFile, trials: Sequence[Trial], found: Mapping[str, Mapping[str, Figure | None]]) -> list[Row]:
    """A row a combination, the best first; ``found``: the figures of the finished runs by name."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.group, []).append(trial)
    rows = [_row(members, found) for members in groups.values()]
    rows.sort(key=lambda row: -math.inf if (own := row.figures[sweep.metric]) is None else own.value, reverse=True)
    best = rows[0].figures[sweep.metric]
    return rows if best is None else [_noted(row, row is rows[0], best, row.figures[sweep.metric]) for row in rows]


def _noted(row: Row, is_best: bool, best: Figure, own: Figure | None) -> Row:
    overlap = own is not None and own.ci and best.ci and own.ci[0] <= best.ci[1] and best.ci[0] <= own.ci[1]
    return Row(**vars(row) | {"note": BEST if is_best else NOISE if overlap else ""})


def _row(members: Sequence[Trial], found: Mapping[str, Mapping[str, Figure | None]]) -> Row:
    done = [found[trial.config.name] for trial in members if trial.config.name in found]
    figures: dict[str, Figure | None] = {}
    for name in ("alpha", "tau", "speed_up"):
        known = [figure for run in done if (figure := run[name]) is not None]
        numbers = [figure.value for figure in known]
        judged = known[0].ci if len(done) == 1 and known else None
        figures[name] = Figure(float(np.mean(numbers)), t_interval(numbers) or judged) if known else None
    values = {key: value for key, value in members[0].values.items() if key != SEED}
    return Row(values, [trial.config.name for trial in members], len(done), len(members) - len(done), figures)


def sweep_table(sweep: SweepFile, rows: Sequence[Row]) -> Table:
    """One row per combination, the best first and bold."""
    keys = list(rows[0].values)
    count = sum(row.figures[sweep.metric] is not None for row in rows)
    picked = f" The best is picked out of {count}; its interval is not widened for that." if count > 1 else ""
    figures = (Column("alpha", ".3f"), Column("tau", ".2f"), Column("speed-up", ".2f", "x"))
    table = Table(
        [*keys, *figures, "seeds", ""],
        title=f"sweep {sweep.name}: by {sweep.metric}",
        caption="[95 % interval]: over seeds (Student's t), of one seed over prompts, as judged. "
        f"Overlapping intervals: the difference may be noise.{picked}",
    )
    for row in rows:
        values = [str(value) if isinstance(value, str) else json.dumps(value) for value in row.values.values()]
        found = (row.figures[name] for name in ("alpha", "tau", "speed_up"))
        cells = [Cell(one.value, one.ci) if one else None for one in found]
        seeds = f"{row.seeds} of {row.seeds + row.missing}" if row.missing else str(row.seeds)
        table.add(*values, *cells, seeds, row.note, strong=row.note == BEST)
    return table
