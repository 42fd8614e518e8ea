"""`understudy sweep --fit MINUTES`: search the shapes of a grid by successive halving (1502.07943), with equal training time per rung.

Every shape is one run, with a learning rate that follows the steps it would have if it went through all rungs. A rung trains all shapes
that are left for the same minutes more and pauses them. Replay on the held-out prompts and the step times of this machine then predict
their speed-ups, and the slower half is dropped. The last rung trains its shapes to their verdicts.
"""

import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from distill.commands.sweep.plan import SEED, SweepFile, Trial
from distill.commands.sweep.table import value_text
from distill.commands.training_process import TrainingFailed, child, reached
from distill.config.layout import CHECKPOINTS, CONFIG, METRICS, PROGRESS, ROLLOUTS, step_folder
from distill.config.load import load_config
from distill.report.table import Column, Table
from speculative.errors import UserError

# Steps of each shape that are timed before the search; its run then starts afresh.
TIMED_STEPS = 8
TIMING = {"train.steps": TIMED_STEPS + 1, "train.pause_at": TIMED_STEPS, "judge.every": TIMED_STEPS}
# Keys that the search sets itself.
OWN_KEYS = ("train.steps", "train.pause_at", "judge.every", "judge.patience")
FIGURES = {"steps": ",d", "minutes": ".2f", "alpha": ".3f", "c": ".3f", "tau": ".2f", "gamma": "d"}


class Rung(NamedTuple):
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
    own = [key for key in OWN_KEYS if key in sweep.grid]
    for wrong, why in (
        (own, f"--fit sets {', '.join(own)} itself; remove it from the grid"),
        (len(sweep.grid.get(SEED, ())) > 1, "--fit compares shapes with one seed; remove `seed` from the grid"),
        (len(trials) < 2, "is one combination, so there is nothing to search; give a key several values, or leave --fit out"),
        (len({trial.answers_key for trial in trials}) > 1, "--fit judges on the same responses; remove target, data and serving"),
        (trials[0].config.behind(), "--fit times the target's steps, but target.endpoint is at a server; leave --fit out"),
    ):  # fmt: skip
        if wrong:
            raise UserError(f"{path}: grid: {why}")


class Search:
    """A search in ``folder``. Its `state` is in sweep.json: seconds of a step by run, and the rows of every rung that has ended."""

    def __init__(
        self, sweep: SweepFile, trials: Sequence[Trial], folder: Path, minutes: float, console: Console, errors: dict[str, str]
    ) -> None:  # fmt: skip
        """``errors``: receives the error of each run that fails. Raises UserError: the folder holds another search."""
        self.sweep, self.trials, self.folder, self.console, self.errors = sweep, trials, folder, console, errors
        self.rungs = rungs_of(len(trials), minutes)
        asked = {"minutes": minutes, "shapes": [trial.config.name for trial in trials]}
        path = folder / "sweep.json"
        found = json.loads(path.read_text(encoding="utf-8")).get("fit") if path.exists() else None
        self.state: dict[str, Any] = found or {**asked, "step_seconds": {}, "rungs": []}
        minutes, shapes = self.state["minutes"], self.state["shapes"]
        if asked != {"minutes": minutes, "shapes": shapes}:
            told = f"holds a search of {minutes:g} minutes over {len(shapes)} shapes, and this one differs"
            raise UserError(f"{path}: {told}; repeat that command to go on, or give the sweep another name")

    def finalists(self, train: Callable[[Trial], None], write: Callable[[], object]) -> list[Trial]:
        """Run all rungs but the last; returns the trials of that, which end with a verdict.

        ``train``: trains a run to its end or its pause. ``write``: writes sweep.json.

        Raises UserError: the minutes are too few for a step, a comparison failed, or no two shapes are left to compare.
        """
        self._run, self._write = train, write
        left = self._each(self.trials, self._time)
        for number, rung in enumerate(self.rungs):
            self._refuse_too_short(left)
            count, now = len(self.rungs), [self._at(trial, number) for trial in left]
            last = number + 1 == count
            what = "to their verdicts" if last else "then the slower half is dropped"
            title = f"rung {number + 1} of {count}: {rung.shapes} shapes, {rung.minutes:.2f} min of training each"
            self.console.print(f"{title}, {what}", highlight=False, soft_wrap=True)
            if last:
                break
            if number == len(self.state["rungs"]):
                self.state["rungs"].append(self._judged(number, self._each(now, self._train)))
                self._write()
            rows = self.state["rungs"][number]
            self.console.print(rung_table(self.sweep, rows, title))
            left = [trial for trial in left if any(row["kept"] for row in rows if row["name"] == trial.config.name)]
        return now

    def _refuse_too_short(self, left: Sequence[Trial]) -> None:
        if not left:
            raise UserError(f"--fit: no shape is left; the last one failed with: {list(self.errors.values())[-1]}")
        seconds, name = max((self.state["step_seconds"][trial.config.name], trial.config.name) for trial in left)
        minutes, given = self.state["minutes"], 60 * self.rungs[0].minutes
        if steps_at(self.rungs, seconds)[0] < 1:
            told = f"the first rung gives each shape {given:.2g} s, but a step of {name} takes {seconds:.2g} s"
            raise UserError(f"--fit {minutes:g}: {told}; give more than {seconds * minutes / given:.2g} minutes")

    def _each(self, trials: Sequence[Trial], work: Callable[[Trial], None]) -> list[Trial]:
        """Do this with each trial; returns those that did not fail."""
        for trial in trials:
            try:
                work(trial)
            except TrainingFailed as failed:
                self.errors[trial.config.name] = str(failed)
                self.console.print(f"    failed: {failed}", style="red", highlight=False, markup=False)
        return [trial for trial in trials if trial.config.name not in self.errors]

    def _changed(self, trial: Trial, values: Mapping[str, Any]) -> Trial:
        # The verdict decodes live; at a pause replay is enough.
        live = trial.config.judge.live.replace("checkpoint", "end")
        words = [f"judge.live={live}", *(f"{key}={json.dumps(value)}" for key, value in values.items())]
        overrides = (*trial.overrides[:-1], *words, trial.overrides[-1])
        return replace(trial, overrides=overrides, config=load_config(self.sweep.base, overrides))

    def _at(self, trial: Trial, number: int) -> Trial:
        """A shape's run as it is trained in a rung: paused at its end, or to the last step."""
        steps = steps_at(self.rungs, self.state["step_seconds"][trial.config.name])
        pause = steps[number] if steps[number] < steps[-1] else None
        values = {"train.steps": steps[-1], "train.pause_at": pause, "judge.every": steps[-1], "judge.patience": 0}
        return self._changed(trial, values)

    def _time(self, trial: Trial) -> None:
        """Time some steps of a shape, once, and remove them."""
        name, folder = trial.config.name, trial.config.folder
        if name in self.state["step_seconds"]:
            return
        if (folder / CHECKPOINTS).exists() and load_config(folder / CONFIG).train.steps != TIMED_STEPS + 1:
            raise UserError(f"{folder}: holds another run; give the sweep another name, or delete the folder")
        self._train(self._changed(trial, TIMING))
        lines = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
        # With `capture` the target runs once per response for all shapes, so its time must not count for the one that is first.
        skipped = "teacher" if trial.config.signal.source == "capture" else ""
        spent = [{**line["seconds"], skipped: 0.0} for line in lines if "seconds" in line]
        # A draft of another learning rate made them.
        shutil.rmtree(folder / ROLLOUTS, ignore_errors=True)
        shutil.rmtree(folder / CHECKPOINTS)
        (folder / METRICS).unlink()
        # Other processes can only add time.
        self.state["step_seconds"][name] = min(sum(one.values()) for one in spent)
        self._write()

    def _train(self, trial: Trial) -> None:
        if not reached(trial.config):
            self.console.print(f"    {trial.config.name}", end="", highlight=False, markup=False)
            self._run(trial)

    def _judged(self, number: int, trials: Sequence[Trial]) -> list[dict[str, Any]]:
        """The rows of a rung, the fastest first: what replay and step times predict, and which shapes are kept.

        A command of its own compares them, so that no model stays in memory here. Raises UserError: it failed.
        """
        out, log = self.folder / f"rung-{number + 1}.json", self.folder / "logs" / f"rung-{number + 1}.log"
        folders = [step_folder(trial.config.folder, trial.config.last_step) for trial in trials]
        pairs = zip(trials, folders, strict=True)
        names = ["parallel+" * bool(trial.config.student.parallel) + str(folder) for trial, folder in pairs]
        trusted = ["--trust-remote-code"] * trials[0].config.target.trust_remote_code  # As the training did.
        words = ["compare", *names, "--out", str(out), *trusted]
        try:
            child([sys.executable, "-P", "-m", "distill.cli", *words], out.stem, log)
        except TrainingFailed as failed:
            raise UserError(f"--fit: the shapes of rung {number + 1} cannot be compared: {failed}") from failed
        found, rows = json.loads(out.read_text(encoding="utf-8")), []
        for trial, folder, way in zip(trials, folders, found["ways"], strict=True):
            own = next(row for row in found["measured"] if row["way"] == way["way"])  # the first is of the whole text
            spent = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))["seconds"]["train"]
            # If no gamma pays, the configured one.
            gamma = way["best_gamma"] or own["gamma"]
            rows.append({
                "name": trial.config.name, "values": trial.values, "steps": trial.config.last_step, "minutes": spent / 60.0,
                "alpha": own["alpha"], "c": way["cost_ratio"], "tau": way["taus"][way["gammas"].index(gamma)], "gamma": gamma,
                "speed_up": way["best_speed_up"] if way["best_gamma"] else own["speed_up"],
            })  # fmt: skip
        rows.sort(key=lambda row: row["speed_up"], reverse=True)
        return [row | {"kept": place < self.rungs[number + 1].shapes} for place, row in enumerate(rows)]


def rung_table(sweep: SweepFile, rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One row per shape, the fastest first; those that are kept are bold."""
    table = Table(
        [*sweep.grid, *map(Column, FIGURES, FIGURES.values()), Column("predicted speed-up", ".2f", "x"), ""], title=title,
        caption="by replay of held-out prompts and step times of this machine, at the best gamma. minutes: trained so far",
    )  # fmt: skip
    for row in rows:
        values, kept = [value_text(row["values"][key]) for key in sweep.grid], row["kept"]
        table.add(*values, *map(row.get, FIGURES), row["speed_up"], "kept" if kept else "dropped", strong=kept)
    return table
