"""`understudy sweep SWEEP.yaml`: every combination of a grid trained, each in a process of its own, and one table at the end.

output/NAME/logs/RUN.log      what each training run printed
            sweep.json, .csv  trials and rows, rewritten after each trial
output/NAME-COMBINATION/      the runs, as `distill.train` makes them

What a run has reached stands in its own folder, its verdict last. So a killed sweep goes on where it stood, and the run that
was killed goes on from its last checkpoint. Responses (and teacher signals) depend on target, data,
serving settings and seed alone: later runs get the files of an earlier one that agrees in these, and the target answers once
per seed.
"""

import contextlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from data.files import MANIFEST, write_bytes, write_json
from data.signals.store import INDEX
from distill.commands.sweep.plan import SweepFile, Trial, finished, load_sweep, plan, read_tree
from distill.commands.sweep.table import as_csv, measures, summarise, sweep_table
from distill.commands.training_process import TrainingFailed, running_twin, terminated_as_interrupted, train_apart
from distill.config.layout import DAY, RESPONSES, SERVED, SIGNAL
from distill.config.run import RunConfig
from speculative.errors import UserError


def run_sweep(path: Path, launcher: str = "", dry_run: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Runs what is not finished, one trial after the other, and ends in a table; returns what sweep.json holds.

    Args:
        launcher: what stands before `-m distill.train`, e.g. "accelerate launch --num_processes 2"; empty = this Python.
        dry_run: print the trials and stop.

    Raises:
        UserError: a file or combination that is refused; runs of another config under these names; a trial still running.
        Interrupted: Ctrl-C, after the running trial has stopped with its checkpoint.
    """
    console = console or Console()
    if "contestants" in (tree := read_tree(path)):
        # Imported here: a grid's trainings have processes of their own, and this one stays light.
        from distill.commands.sweep.study import run_study
        from distill.commands.sweep.study_file import read_study

        if launcher:
            raise UserError(f"{path}: a study trains in this process, one draft after the other; leave --launcher out")
        with terminated_as_interrupted():
            return run_study(read_study(path, tree), console, dry_run)
    sweep = load_sweep(path)
    trials = plan(sweep)
    done = [finished(trial) for trial in trials]
    console.print(
        f"sweep {sweep.name}: {len(trials)} run{'s' if len(trials) > 1 else ''}, {sum(done)} finished, by {sweep.metric}",
        highlight=False,
    )
    if dry_run:
        for trial, is_done in zip(trials, done, strict=True):
            line = f"  {'finished' if is_done else 'to do':8}  {trial.config.name}  {' '.join(trial.overrides[:-1])}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return {"trials": [trial.config.name for trial in trials]}
    runner = _Runner(sweep, trials, launcher, console)
    with terminated_as_interrupted():
        runner.run()
    result = runner.report()
    console.print(sweep_table(sweep, result["rows"]))
    for run in result["trials"]:
        if run["error"]:
            console.print(f"failed: {run['run']}: {run['error']}", style="red", markup=False, soft_wrap=True)
    console.print(f"written to {runner.folder}/sweep.json and sweep.csv", highlight=False)
    return result


class _Runner:
    """Trains the trials and keeps the books."""

    def __init__(self, sweep: SweepFile, trials: Sequence[Trial], launcher: str, console: Console) -> None:
        self.sweep, self.trials, self.console = sweep, trials, console
        self.folder = trials[0].config.folder.parent / sweep.name
        self.command = shlex.split(launcher) if launcher else [sys.executable]
        self.errors: dict[str, str] = {}
        try:
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written ({error.strerror})") from error

    def run(self) -> None:
        """Every trial that is not finished; a failed one is noted and the rest goes on.

        In the plan's order, seeds outermost: a sweep that is stopped early has whole passes over the grid.
        """
        for trial in self.trials:
            if finished(trial):
                continue
            try:
                self._make(trial)
            except TrainingFailed as failed:
                self.errors[trial.config.name] = str(failed)
                self.console.print(f"    failed: {failed}", style="red", highlight=False, markup=False)
            finally:
                self.report()

    def _make(self, trial: Trial) -> None:
        name, number = trial.config.name, self.trials.index(trial) + 1
        if (twin := running_twin(self._log(name))) is not None:
            raise UserError(
                f"{name}: still trained by process {twin.pid}, left by a sweep that was killed; wait for it or end it"
            )
        shared = share_stores(trial.config, [other.config for other in self.trials if other is not trial])
        line = f"[{number}/{len(self.trials)}] {name}"
        line += f", with the {' and '.join(shared)} of an earlier run" if shared else ""
        self.console.print(line, highlight=False, markup=False)
        started = time.perf_counter()
        with self.console.status(f"training, log in {self._log(name)}"):
            train_apart(
                trial.config, [self.sweep.base, *trial.overrides], self._log(name), self.command, group=self.sweep.name
            )
        found, minutes = measures(self.sweep, trial), (time.perf_counter() - started) / 60
        speed = "" if found["speed_up"] is None else f" {found['speed_up']:.2f}x,"
        self.console.print(
            f"    alpha {found['alpha']:.3f}, tau {found['tau']:.2f},{speed} {minutes:.1f} min", highlight=False
        )

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def report(self) -> dict[str, Any]:
        """Writes sweep.json and sweep.csv from what is finished; returns the former."""
        found = {trial.config.name: measures(self.sweep, trial) for trial in self.trials if finished(trial)}
        runs = [
            {"run": trial.config.name, "values": trial.values, "error": self.errors.get(trial.config.name)}
            | found.get(trial.config.name, {})
            for trial in self.trials
        ]
        rows, sweep = summarise(self.sweep, self.trials, found), self.sweep
        said = {"name": sweep.name, "base": sweep.base, "metric": sweep.metric, "direction": sweep.direction}
        result = said | {"rows": rows, "trials": runs}
        write_json(self.folder / "sweep.json", result)
        write_bytes(self.folder / "sweep.csv", as_csv(sweep, rows).encode())
        return result


def share_stores(config: RunConfig, others: Sequence[RunConfig]) -> list[str]:
    """Gives a run that lacks them the responses and teacher signal of runs that would have made the same; names what it gave.

    Shards are never changed once they are there, so they are linked (copied where the disk cannot); a signal's index is
    written in place, so it is copied. What is still missing in a store is made by the run itself, into files of its own.
    """
    given = []
    for part, key in ((RESPONSES, _responses_key), (SIGNAL, _signal_key)):
        for other in others:
            if other.folder == config.folder or key(other) != key(config) or not (other.folder / part).is_dir():
                continue
            stores = [other.folder / SIGNAL] if part == SIGNAL else sorted((other.folder / RESPONSES).iterdir())
            for store in stores:
                to = config.folder / store.relative_to(other.folder)
                if (store / MANIFEST).exists() and not to.exists():
                    _link_store(store, to)
                    given.append(part)
                    # Prompts rendered on another day would be others, and so would another model under the same name.
                    for name in (DAY, SERVED):
                        if store.with_name(name).exists():
                            shutil.copyfile(store.with_name(name), to.with_name(name))
    return list(dict.fromkeys(given))


def _link_store(store: Path, to: Path) -> None:
    """All or nothing: under a temporary name, then renamed. Hidden files are what a killed writer left."""
    temporary = to.with_name(f".{to.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(store, temporary, ignore=shutil.ignore_patterns(".*"), copy_function=_link_or_copy)
    os.replace(temporary, to)


def _link_or_copy(file: str, to: str) -> None:
    if Path(file).name not in (INDEX, MANIFEST):
        with contextlib.suppress(OSError):
            os.link(file, to)
            return
    shutil.copyfile(file, to)


def _responses_key(config: RunConfig) -> str:
    """Everything that can reach a responses' manifest: target, prompts, what limits their length, settings, seed."""
    tree = config.model_dump(mode="json")
    data = {key: value for key, value in tree["data"].items() if key not in ("mix", "rollouts", "text", "text_window")}
    serving = {key: value for key, value in tree["serving"].items() if key not in ("rule", "batch_size")}
    student = {key: tree["student"][key] for key in ("init", "path", "revision", "architecture", "extend_context")}
    parts = [tree["target"], data, serving, student, tree["judge"]["prompts"], tree["seed"]]
    return json.dumps(parts, sort_keys=True)


def _signal_key(config: RunConfig) -> str:
    kept = config.signal.model_dump(mode="json", exclude={"source"})
    loss = config.loss
    return json.dumps([_responses_key(config), kept, loss.temperature, loss.prompt_weight > 0], sort_keys=True)
