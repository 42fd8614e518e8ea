"""`understudy sweep SWEEP.yaml`: every combination of a grid trained, each in a process of its own, and one table at the end.

output/NAME/logs/RUN.log      what each training run printed
            sweep.json        trials, rows and forecasts, rewritten after each trial
            frontier.png      size against speed, if runs were timed
output/NAME-COMBINATION/      the runs, as `distill.train` makes them

The state of a run is in its own folder, and the verdict is written last. So a killed sweep continues where it stopped, and the killed
run continues from its last checkpoint. Responses (and teacher signals) depend only on target, data, serving settings and seed. Later
runs reuse the files of an earlier run with the same ones, also of the base config's own run, so the target answers once per seed.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from data.files import MANIFEST, write_json
from distill.commands.sweep.doubling import forecasts
from distill.commands.sweep.frontier import SizeAndSpeed, frontier_table, plot_frontier, points_of, recommended
from distill.commands.sweep.options import SweepOptions
from distill.commands.sweep.plan import SweepFile, Trial, finished, plan
from distill.commands.sweep.table import FIGURES, Combination, measured_of, summarise, sweep_table
from distill.commands.training_process import (
    TrainingFailed,
    launcher_words,
    running_twin,
    terminated_as_interrupted,
    train_apart,
)
from distill.config.layout import DAY, RESPONSES, SERVER_IDENTITY
from distill.config.load import load_config
from distill.engines.protocol.serving_engine import for_engine
from distill.run.lock import hold
from speculative.errors import UserError


def run_sweep(options: SweepOptions, console: Console | None = None) -> list[Combination]:
    """Train the unfinished trials one after the other, print a table and return its rows.

    Seeds are in the outer loop, so a sweep that is stopped early has complete passes over the grid. A failed trial is reported and the
    others continue.

    Raises UserError: an invalid file or combination; runs of another config under these names; a trial that is still running.
    Interrupted: Ctrl-C, after the running trial has stopped with its checkpoint.
    """
    console = console or Console()
    sweep, trials = plan(options.file)
    done = [finished(trial) for trial in trials]
    runs = f"{len(trials)} run{'s' if len(trials) > 1 else ''}"
    console.print(f"sweep {sweep.name}: {runs}, {sum(done)} finished, by {sweep.metric}", highlight=False)
    if options.dry_run:
        for trial, is_done in zip(trials, done, strict=True):
            line = f"  {'finished' if is_done else 'to do':8}  {trial.config.name}  {' '.join(trial.overrides[:-1])}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return []
    folder, errors = trials[0].config.folder.parent / sweep.name, dict[str, str]()
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from error
    command = launcher_words(options.launcher)
    with terminated_as_interrupted():
        report = _report(folder, sweep, trials, errors)
        for number, trial in enumerate(trials, start=1):
            if finished(trial):
                continue
            console.print(f"[{number}/{len(trials)}] {trial.config.name}", end="", highlight=False, markup=False)
            try:
                _train(sweep, trials, trial, command, console)
            except TrainingFailed as failed:
                errors[trial.config.name] = str(failed)
                console.print(f"    failed: {failed}", style="red", highlight=False, markup=False)
            finally:
                report = _report(folder, sweep, trials, errors)
    rows, points, foretold = report
    console.print(sweep_table(sweep, rows))
    for sentence in foretold:
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    if (found := recommended(points)) is not None:
        console.print(frontier_table(points))
        console.print(found[1], highlight=False, markup=False, soft_wrap=True)
        plot_frontier(folder / "frontier.png", points, found[0])
        console.print(f"written to {folder}/frontier.png", highlight=False)
    for name, why in errors.items():
        console.print(f"failed: {name}: {why}", style="red", markup=False, soft_wrap=True)
    console.print(f"written to {folder}/sweep.json", highlight=False)
    return rows


def _train(sweep: SweepFile, trials: Sequence[Trial], trial: Trial, command: Sequence[str], console: Console) -> None:
    """Run one trial in its own process, with the responses of an earlier trial if they fit, and print the result."""
    name = trial.config.name
    log = trial.config.folder.parent / sweep.name / "logs" / f"{name}.log"
    if (twin := running_twin(log)) is not None:
        raise UserError(f"{name}: process {twin.pid} of a killed sweep still trains it; wait for it or end it")
    try:
        held = hold(trial.config.folder)
    except UserError as busy:
        raise TrainingFailed(str(busy)) from busy
    with contextlib.suppress(UserError):  # What the sweep overrides may be missing in its base.
        trials = [*trials, Trial({}, (), for_engine(load_config(sweep.base)))]
    with held:
        shared = share_stores(trial, [other for other in trials if other is not trial])
    console.print(", with the responses of an earlier run" if shared else "", highlight=False)
    started = time.perf_counter()
    train_apart(trial.config, [sweep.base, *trial.overrides], log, command, group=sweep.name)
    row = Combination({}, [], [], 1, 0, measured_of(trial))
    found = [f"{name} {figure.value:.3f}, " for name in FIGURES if (figure := row.figure(name)) is not None]
    console.print(f"    {''.join(found)}{(time.perf_counter() - started) / 60:.1f} min", highlight=False)


def _report(
    folder: Path, sweep: SweepFile, trials: Sequence[Trial], errors: dict[str, str]
) -> tuple[list[Combination], list[SizeAndSpeed], list[str]]:
    """Rows and points of the finished trials, and forecasts for more prompts. They are also written to sweep.json."""
    rows = summarise(sweep, trials, {trial.config.name: measured_of(trial) for trial in trials if finished(trial)})
    points, foretold = points_of(rows, trials, sweep.price_per_hour), list(forecasts(trials))
    told = [vars(row) | {"measured": [one.record() for one in row.measured]} for row in rows]
    result = {"rows": told, "points": list(map(vars, points)), "forecasts": foretold, "failed": errors}
    write_json(folder / "sweep.json", {"format": 2, **sweep.model_dump(mode="json"), **result})
    return rows, points, foretold


def share_stores(trial: Trial, others: Sequence[Trial]) -> bool:
    """Give a run the responses, and the teacher's signal next to them, of runs that would have made the same ones; whether there are some.

    Finished shards never change, so they are linked, or copied if the disk cannot link. The run itself makes what is still missing, in
    new files.
    """
    shared, folder = False, trial.config.folder
    for other in (one.config.folder for one in others if one.answers_key == trial.answers_key):
        for store in sorted((other / RESPONSES).glob("*")):
            to = folder / store.relative_to(other)
            if (store / MANIFEST).exists() and not to.exists():
                # Copied under a temporary name, so that a copy is complete or absent. Killed writers leave hidden files, which are skipped.
                temporary = to.with_name(f".{to.name}.tmp")
                shutil.rmtree(temporary, ignore_errors=True)
                hidden = shutil.ignore_patterns(".*")
                shutil.copytree(store, temporary, ignore=hidden, copy_function=_link_or_copy)
                os.replace(temporary, to)
                shared = True
                # Prompts rendered on another day can differ, and so can a model under the same name.
                for name in (DAY, SERVER_IDENTITY):
                    if store.with_name(name).exists():
                        shutil.copyfile(store.with_name(name), to.with_name(name))
    return shared


def _link_or_copy(file: str, to: str) -> None:
    if Path(file).name != MANIFEST:
        with contextlib.suppress(OSError):
            os.link(file, to)
            return
    shutil.copyfile(file, to)
