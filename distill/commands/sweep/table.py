"""Table of a sweep: one row per combination, means over seeds with intervals, the best one and those within noise of it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import special

from distill.commands.sweep.plan import SEED, SweepFile, Trial
from distill.report.table import Cell, Column, Table
from distill.run.verdict_record import load_verdict
from speculative.measure.intervals import Interval
from speculative.measure.measured import DRAFT, Measured

BEST, NOISE = "best", "within noise of the best"
LEVEL = 0.95
FIGURES = {"alpha": Column("alpha", ".3f"), "tau": Column("tau", ".2f"), "speed_up": Column("speed-up", ".2f", "x")}


@dataclass(frozen=True)
class Combination:
    """A combination: its runs, how many are finished and missing, the means of the draft's rows, and a note.

    measured: as judged and, if it was timed, as timed at its own gamma; empty if no run is finished. Intervals are over seeds
    (Student's t) if several are finished, else over prompts, as judged.
    """

    values: dict[str, object]
    runs: list[str]
    finished: list[str]
    seeds: int
    missing: int
    measured: list[Measured]
    note: str = ""

    def figure(self, name: str) -> Cell | None:
        """A figure with its interval; None if there is none."""
        known = next((row for row in self.measured if getattr(row, name) is not None), None)
        return None if known is None else Cell(getattr(known, name), getattr(known, f"{name}_ci"))


def measured_of(trial: Trial) -> list[Measured]:
    """A finished run's draft, as judged and as timed. Raises UserError: no verdict."""
    verdict = load_verdict(trial.config.folder)
    judged, timed = verdict.judged(DRAFT), verdict.row(DRAFT)
    return [row for row in (judged, None if timed is judged else timed) if row is not None]


def t_interval(values: Sequence[float]) -> Interval | None:
    """The interval of the mean at 95 %: Student's t over independent runs; None for fewer than two.

    mean -+ t(0.975, n - 1) s / sqrt(n), s the sample's standard deviation.
    """
    if len(values) < 2:
        return None
    half = float(special.stdtrit(len(values) - 1, 0.5 + LEVEL / 2) * np.std(values, ddof=1) / math.sqrt(len(values)))
    mean = float(np.mean(values))
    return mean - half, mean + half


def summarise(sweep: SweepFile, trials: Sequence[Trial], found: Mapping[str, Sequence[Measured]]) -> list[Combination]:
    """One row per combination, the best first; ``found``: `measured_of` the finished runs by name."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.group, []).append(trial)
    rows = [_row(members, found) for members in groups.values()]
    known = {id(row): row.figure(sweep.metric) for row in rows}
    rows.sort(key=lambda row: -math.inf if (own := known[id(row)]) is None else own.value, reverse=True)
    best = known[id(rows[0])]
    return rows if best is None else [replace(row, note=_note(known[id(row)], best)) for row in rows]


def _note(own: Cell | None, best: Cell) -> str:
    if own is best:
        return BEST
    overlap = own is not None and own.ci and best.ci and own.ci[0] <= best.ci[1] and best.ci[0] <= own.ci[1]
    return NOISE if overlap else ""


def _row(members: Sequence[Trial], found: Mapping[str, Sequence[Measured]]) -> Combination:
    finished = [trial.config.name for trial in members if trial.config.name in found]
    done = [found[name] for name in finished]
    sides = [[rows[side] for rows in done if len(rows) > side] for side in (0, 1)]
    values = {key: value for key, value in members[0].values.items() if key != SEED}
    means = [mean_of(rows) for rows in sides if rows]
    return Combination(
        values, [trial.config.name for trial in members], finished, len(done), len(members) - len(done), means
    )


def mean_of(rows: Sequence[Measured]) -> Measured:
    """The draft's figures as means over runs, with Student's interval; those of a single run unchanged."""
    if len(rows) == 1:
        return rows[0]
    figures: dict[str, Any] = {}
    for name in FIGURES:
        values = [value for row in rows if (value := getattr(row, name)) is not None]
        figures |= {name: float(np.mean(values)) if values else None, f"{name}_ci": t_interval(values)}
    gamma = rows[0].gamma if len({row.gamma for row in rows}) == 1 else None
    return Measured(DRAFT, rows[0].rule, gamma=gamma, how=rows[0].how, **figures)


def value_text(value: object) -> str:
    """A value of the grid as its file has it."""
    return value if isinstance(value, str) else json.dumps(value)


def sweep_table(sweep: SweepFile, rows: Sequence[Combination]) -> Table:
    """One row per combination, the best first and bold."""
    count = sum(row.figure(sweep.metric) is not None for row in rows)
    picked = f" The best is picked out of {count}; its interval is not widened for that." if count > 1 else ""
    table = Table(
        [*rows[0].values, *FIGURES.values(), "seeds", ""],
        title=f"sweep {sweep.name}: by {sweep.metric}",
        caption="[95 % interval]: over seeds (Student's t); with one seed over prompts, as judged. "
        f"If intervals overlap, the difference may be noise.{picked}",
    )
    for row in rows:
        values = map(value_text, row.values.values())
        seeds = f"{row.seeds} of {row.seeds + row.missing}" if row.missing else str(row.seeds)
        table.add(*values, *map(row.figure, FIGURES), seeds, row.note, strong=row.note == BEST)
    return table
