"""`understudy sweep --fit MINUTES`: search the shapes of a grid by successive halving (1502.07943), with equal training time per rung.

Every shape is one run, with a learning rate that follows the steps it would have if it went through all rungs. A rung trains all shapes
that are left for the same minutes more and pauses them. Replay on the held-out prompts and the step times of this machine then predict
their speed-ups, and the slower half is dropped. The last rung trains its shapes to their verdicts.
"""

import json
import math
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from distill.commands.sweep.plan import SEED, SweepFile, Trial
from distill.commands.sweep.runs import report, train_trial
from distill.commands.sweep.table import value_text
from distill.commands.training_process import TrainingFailed, child, reached
from distill.config.layout import BEST_LINK, CHECKPOINTS, METRICS, PROGRESS, step_folder
from distill.config.load import load_config
from distill.report.table import Column, Table
from speculative.errors import UserError

# Steps that are trained once before the search to time them, without the first; the search starts without them.
TIMED_STEPS = 6
# Keys that the search sets itself.
OWN_KEYS = ("train.steps", "train.pause_at", "judge.every", "judge.patience")
JUDGED = ("alpha", "c", "tau", "gamma", "speed_up")


@dataclass(frozen=True)
class Rung:
    """So many shapes are each trained for ``minutes`` more."""

    shapes: int
    minutes: float


def rungs_of(shapes: int, minutes: float) -> list[Rung]:
    """The rungs of a search over at least two shapes: each keeps half, rounded up, and all have the same share of the minutes."""
    counts = []
    while shapes > 1:
        counts.append(shapes)
        shapes = (shapes + 1) // 2
    return [Rung(count, minutes / len(counts) / count) for count in counts]


def steps_at(rungs: Sequence[Rung], step_seconds: float) -> list[int]:
    """Steps at which a shape that goes through all rungs pauses, one per rung; the last is its `train.steps`."""
    spent = [60.0 * sum(rung.minutes for rung in rungs[: number + 1]) for number in range(len(rungs))]
    # The sum of equal shares must not lose a step to rounding.
    return [int(seconds / step_seconds * (1.0 + 1e-9)) for seconds in spent]


def kept_of(rows: Sequence[Mapping[str, Any]], count: int) -> list[str]:
    """Names of the ``count`` shapes with the highest predicted speed-up; a shape that pays at some gamma is before one that does not."""
    order = sorted(rows, key=lambda row: (row["pays"], row["speed_up"]), reverse=True)
    return [row["name"] for row in order[:count]]


def minutes_of(text: str) -> float:
    """The minutes of `--fit`. Raises UserError for anything but a positive number."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < math.inf:
        raise UserError(f"--fit {text}: give the minutes of training in all as a number above 0, e.g. --fit 30")
    return minutes


def refuse_unfit(path: Path, sweep: SweepFile, trials: Sequence[Trial]) -> None:
    """Raise UserError for a grid whose combinations cannot be compared as shapes."""
    if own := [key for key in OWN_KEYS if key in sweep.grid]:
        raise UserError(f"{path}: grid: --fit sets {own[0]} itself; remove it from the grid")
    if len(sweep.grid.get(SEED, ())) > 1:
        raise UserError(f"{path}: grid: --fit compares shapes with one seed; remove `seed` from the grid")
    if len(trials) < 2:
        raise UserError(
            f"{path}: grid: is one combination, so there is nothing to search; give a key several values, or leave --fit out"
        )
    if len({trial.answers_key for trial in trials}) > 1:
        raise UserError(
            f"{path}: grid: --fit judges all shapes on the same responses; remove keys of target, data and serving from the grid"
        )
    if any(trial.config.behind() for trial in trials):
        raise UserError(
            f"{path}: --fit times the target's steps here, but target.endpoint is at a server; leave --fit out"
        )


@dataclass
class Search:
    """A search in ``folder``, whose state is in its sweep.json: seconds of a step by run, and the rows of every rung that has ended."""

    sweep: SweepFile
    trials: Sequence[Trial]
    folder: Path
    minutes: float
    command: Sequence[str]
    console: Console
    errors: dict[str, str]
    step_seconds: dict[str, float] = field(default_factory=dict)
    ended: list[list[dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises UserError: the folder holds another search."""
        self.rungs = rungs_of(len(self.trials), self.minutes)
        path = self.folder / "sweep.json"
        found = json.loads(path.read_text(encoding="utf-8")).get("fit") if path.exists() else None
        if found is None:
            return
        names = [trial.config.name for trial in self.trials]
        if (found["minutes"], found["shapes"]) != (self.minutes, names):
            raise UserError(
                f"{path}: holds a search of {found['minutes']:g} minutes over {len(found['shapes'])} shapes, and this one differs; "
                "repeat that command to go on, or give the sweep another name"
            )
        self.step_seconds, self.ended = found["step_seconds"], found["rungs"]

    @property
    def told(self) -> dict[str, Any]:
        """Its entry in sweep.json."""
        names = [trial.config.name for trial in self.trials]
        return {"minutes": self.minutes, "shapes": names, "step_seconds": self.step_seconds, "rungs": self.ended}

    def finalists(self) -> list[Trial]:
        """Run all rungs but the last; returns the trials of that, which end with a verdict.

        Raises UserError: the minutes are too few for a step, a comparison failed, or no shape is left.
        """
        left = list(self.trials)
        for trial in left:
            self._try(trial, self._time)
        for number, rung in enumerate(self.rungs[:-1]):
            if number == len(self.ended):
                left = self._left(left)
                self._say(number)
                paused = [self._at(trial, number) for trial in left]
                for trial in paused:
                    self._try(trial, self._train)
                self.ended.append(self._judge(number, [trial for trial in paused if self._alive(trial)]))
                self._write()
            rows = self.ended[number]
            self.console.print(
                rung_table(self.sweep, rows, f"rung {number + 1} of {len(self.rungs)}: {rung.minutes:.2f} min each")
            )
            kept = {row["name"] for row in rows if row["kept"]}
            left = [trial for trial in left if trial.config.name in kept]
        left = self._left(left)
        self._say(len(self.rungs) - 1)
        return [self._at(trial, len(self.rungs) - 1) for trial in left]

    def _say(self, number: int) -> None:
        rung, last = self.rungs[number], number + 1 == len(self.rungs)
        what = "to their verdicts" if last else "then the slower half is dropped"
        line = f"rung {number + 1} of {len(self.rungs)}: {rung.shapes} shapes, {rung.minutes:.2f} min of training each, {what}"
        self.console.print(line, highlight=False)

    def _alive(self, trial: Trial) -> bool:
        return trial.config.name not in self.errors

    def _left(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials that have not failed, if each has a step in the first rung."""
        left = [trial for trial in trials if self._alive(trial)]
        if not left:
            raise UserError(f"--fit: every shape failed, the last with: {list(self.errors.values())[-1]}")
        slowest = max(left, key=lambda trial: self.step_seconds[trial.config.name])
        seconds = self.step_seconds[slowest.config.name]
        if steps_at(self.rungs, seconds)[0] < 1:
            least = seconds / 60.0 * self.minutes / self.rungs[0].minutes
            raise UserError(
                f"--fit {self.minutes:g}: the first rung gives each shape {60 * self.rungs[0].minutes:.2g} s, but a step of "
                f"{slowest.config.name} takes {seconds:.2g} s; give more than {least:.2g} minutes"
            )
        return left

    def _try(self, trial: Trial, work: Any) -> None:
        if not self._alive(trial):
            return
        try:
            work(trial)
        except TrainingFailed as failed:
            self.errors[trial.config.name] = str(failed)
            self.console.print(f"    failed: {failed}", style="red", highlight=False, markup=False)

    def _changed(self, trial: Trial, values: Mapping[str, Any]) -> Trial:
        words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        overrides = (*trial.overrides[:-1], *words, trial.overrides[-1])
        return replace(trial, overrides=overrides, config=load_config(self.sweep.base, overrides))

    def _at(self, trial: Trial, number: int) -> Trial:
        """A shape's run as it is trained in a rung: paused at its end, or to the last step."""
        steps = steps_at(self.rungs, self.step_seconds[trial.config.name])
        pause = steps[number] if number + 1 < len(steps) else None
        values = {"train.steps": steps[-1], "train.pause_at": pause, "judge.every": steps[-1], "judge.patience": 0}
        # The verdict decodes live; at a pause replay is enough.
        return self._changed(trial, values | ({"judge.live": "end"} if trial.config.judge.live == "checkpoint" else {}))

    def _time(self, trial: Trial) -> None:
        """Time some steps of a shape, once, and start its run afresh."""
        name, folder = trial.config.name, trial.config.folder
        if name in self.step_seconds:
            return
        short = {
            "train.steps": TIMED_STEPS + 1,
            "train.pause_at": TIMED_STEPS,
            "judge.every": TIMED_STEPS,
            "judge.live": "never",
        }
        if (folder / CHECKPOINTS).exists() and load_config(folder / "config.yaml").train.steps != TIMED_STEPS + 1:
            raise UserError(f"{folder}: holds another run; give the sweep another name, or delete the folder")
        self.console.print(f"timing {name}", end="", highlight=False, markup=False)
        train_trial(self.sweep, self.trials, self._changed(trial, short), self.command, self.console)
        lines = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
        # The target runs once per response for all shapes, so its time must not count for the one that is first.
        skipped = {"teacher"} if trial.config.signal.source == "capture" else set()
        stages = [line["seconds"] for line in lines if "seconds" in line]
        seconds = [sum(spent for stage, spent in one.items() if stage not in skipped) for one in stages]
        shutil.rmtree(folder / CHECKPOINTS)
        for path in (folder / METRICS, folder / BEST_LINK):
            path.unlink(missing_ok=True)
        self.step_seconds[name] = statistics.median(seconds[1:] or seconds)
        self._write()

    def _train(self, trial: Trial) -> None:
        if not reached(trial.config):
            self.console.print(f"    {trial.config.name}", end="", highlight=False, markup=False)
            train_trial(self.sweep, self.trials, trial, self.command, self.console)

    def _judge(self, number: int, trials: Sequence[Trial]) -> list[dict[str, Any]]:
        """The rows of a rung: what replay and step times predict, and which shapes are kept.

        A command of its own compares them, so that no model stays in memory here. Raises UserError: it failed.
        """
        out, log = self.folder / f"rung-{number + 1}.json", self.folder / "logs" / f"rung-{number + 1}.log"
        folders = [step_folder(trial.config.folder, trial.config.last_step) for trial in trials]
        names = [
            f"{'parallel+' if trial.config.student.parallel else ''}{folder}"
            for trial, folder in zip(trials, folders, strict=True)
        ]
        ways = {}
        if len(names) > 1:
            with self.console.status(f"comparing, log in {log}"):
                try:
                    child([sys.executable, "-m", "distill.cli", "compare", *names, "--out", str(out)], out.stem, log)
                except TrainingFailed as failed:
                    raise UserError(f"--fit: the shapes of rung {number + 1} cannot be compared: {failed}") from failed
            found = json.loads(out.read_text(encoding="utf-8"))
            texts = {row["way"]: row for row in reversed(found["measured"])}  # the whole text is first
            ways = {way["way"]: _predicted(way, texts[way["way"]]) for way in found["ways"]}
        rows = []
        for trial, name, folder in zip(trials, names, folders, strict=True):
            spent = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))["seconds"].get("train", 0.0)
            row = {
                "name": trial.config.name,
                "values": trial.values,
                "steps": trial.config.last_step,
                "minutes": spent / 60.0,
            }
            rows.append(row | ways.get(name, dict.fromkeys(JUDGED) | {"pays": True, "speed_up": 0.0}))
        kept = kept_of(rows, self.rungs[number + 1].shapes)
        return [row | {"kept": row["name"] in kept} for row in rows]

    def _write(self) -> None:
        report(self.folder, self.sweep, [], self.errors, self.told)


def _predicted(way: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a compared draft at its best gamma, or at the configured one if none pays."""
    gamma, speed_up = way["best_gamma"], way["best_speed_up"]
    if not (pays := gamma > 0):
        gamma, speed_up = row["gamma"], row["speed_up"]
    tau = way["taus"][way["gammas"].index(gamma)]
    return {
        "alpha": row["alpha"],
        "c": way["cost_ratio"],
        "tau": tau,
        "gamma": gamma,
        "speed_up": speed_up,
        "pays": pays,
    }


def rung_table(sweep: SweepFile, rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One row per shape, the fastest first; those that are kept are bold."""
    columns = [
        Column("steps", ",d"),
        Column("minutes", ".2f"),
        Column("alpha", ".3f"),
        Column("c", ".3f"),
        Column("tau", ".2f"),
    ]
    table = Table(
        [*sweep.grid, *columns, "gamma", Column("predicted speed-up", ".2f", "x"), ""], title=title,
        caption="by replay of held-out prompts and step times of this machine, at the best gamma. minutes: trained so far",
    )  # fmt: skip
    for row in sorted(rows, key=lambda one: (one["pays"], one["speed_up"]), reverse=True):
        values = [value_text(row["values"][key]) for key in sweep.grid]
        numbers = [row[name] for name in ("steps", "minutes", "alpha", "c", "tau")]
        table.add(
            *values,
            *numbers,
            str(row["gamma"]),
            row["speed_up"],
            "kept" if row["kept"] else "dropped",
            strong=row["kept"],
        )
    return table
