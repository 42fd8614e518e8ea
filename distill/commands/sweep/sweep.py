"""`understudy sweep SWEEP.yaml`: every combination of a grid trained, each in a process of its own, and one table at the end.

output/NAME/logs/RUN.log      what each training run printed
            sweep.json        trials and rows, rewritten after each trial
            frontier.png      size against speed, if runs were timed
            rung-N.json       with --fit: the comparison of the shapes after a rung
output/NAME-COMBINATION/      the runs, as `distill.train` makes them

The state of a run is in its own folder, and the verdict is written last. So a killed sweep continues where it stopped, and the killed
run continues from its last checkpoint. Responses (and teacher signals) depend only on target, data, serving settings and seed. Later
runs reuse the files of an earlier run with the same ones, so the target answers once per seed. With `--fit` NAME is the sweep's name
and `-fit`.
"""

import shlex
import sys

from rich.console import Console

from distill.commands.options import SweepOptions
from distill.commands.sweep.fit import Search, minutes_of, refuse_unfit
from distill.commands.sweep.frontier import frontier_table, plot_frontier, points_of, recommended
from distill.commands.sweep.plan import finished, plan
from distill.commands.sweep.runs import report, train_trial
from distill.commands.sweep.table import Row, sweep_table
from distill.commands.training_process import TrainingFailed, terminated_as_interrupted
from speculative.errors import UserError


def run_sweep(options: SweepOptions, console: Console | None = None) -> list[Row]:
    """Train the unfinished trials one after the other, print a table and return its rows; with --fit those that the search leaves.

    Seeds are in the outer loop, so a sweep that is stopped early has complete passes over the grid. A failed trial is reported and the
    others continue.

    Raises UserError: an invalid file or combination; runs of another config under these names; a trial that is still running.
    Interrupted: Ctrl-C, after the running trial has stopped with its checkpoint.
    """
    console = console or Console()
    minutes = minutes_of(options.fit) if options.fit else None
    sweep, trials = plan(options.file, suffix="-fit" if minutes else "")
    if minutes:
        refuse_unfit(options.file, sweep, trials)
    folder, errors = trials[0].config.folder.parent / sweep.name, dict[str, str]()
    done = [minutes is None and finished(trial) for trial in trials]
    runs = f"{len(trials)} run{'s' if len(trials) > 1 else ''}"
    how = f"{minutes:g} minutes of training in all" if minutes else f"{sum(done)} finished, by {sweep.metric}"
    console.print(f"sweep {sweep.name}: {runs}, {how}", highlight=False)
    if options.dry_run:
        for trial, is_done in zip(trials, done, strict=True):
            line = f"  {'finished' if is_done else 'to do':8}  {trial.config.name}  {' '.join(trial.overrides[:-1])}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return []
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from error
    command, tried, all_trials = shlex.split(options.launcher) or [sys.executable], None, trials
    with terminated_as_interrupted():
        if minutes:
            search = Search(sweep, trials, folder, minutes, command, console, errors)
            trials = search.finalists()
            tried = search.told
        rows = report(folder, sweep, trials, errors, tried)
        for number, trial in enumerate(trials, start=1):
            if finished(trial):
                continue
            console.print(f"[{number}/{len(trials)}] {trial.config.name}", end="", highlight=False, markup=False)
            try:
                train_trial(sweep, all_trials, trial, command, console)
            except TrainingFailed as failed:
                errors[trial.config.name] = str(failed)
                console.print(f"    failed: {failed}", style="red", highlight=False, markup=False)
            finally:
                rows = report(folder, sweep, trials, errors, tried)
    console.print(sweep_table(sweep, rows))
    points = points_of(rows, trials, sweep.price_per_hour)
    if (found := recommended(points)) is not None:
        console.print(frontier_table(points))
        console.print(found[1], highlight=False, markup=False, soft_wrap=True)
        plot_frontier(folder / "frontier.png", points, found[0])
        console.print(f"written to {folder}/frontier.png", highlight=False)
    for name, why in errors.items():
        console.print(f"failed: {name}: {why}", style="red", markup=False, soft_wrap=True)
    console.print(f"written to {folder}/sweep.json", highlight=False)
    return rows
