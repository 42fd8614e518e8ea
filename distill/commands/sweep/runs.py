"""The runs of a sweep: training in a process of its own, with the responses of earlier runs, and sweep.json."""

import contextlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from data.files import MANIFEST, write_json
from distill.commands.sweep.frontier import points_of
from distill.commands.sweep.plan import SweepFile, Trial, finished
from distill.commands.sweep.table import FIGURES, Row, measured_of, summarise
from distill.commands.training_process import TrainingFailed, running_twin, train_apart
from distill.config.layout import DAY, RESPONSES, SERVED
from distill.run.lock import hold
from speculative.errors import UserError


def train_trial(
    sweep: SweepFile, trials: Sequence[Trial], trial: Trial, command: Sequence[str], console: Console
) -> None:
    """Run one trial in its own process, with the responses of an earlier trial if they fit, and print the result."""
    name = trial.config.name
    log = trial.config.folder.parent / sweep.name / "logs" / f"{name}.log"
    if (twin := running_twin(log)) is not None:
        raise UserError(f"{name}: process {twin.pid} of a killed sweep still trains it; wait for it or end it")
    try:
        held = hold(trial.config.folder)
    except UserError as busy:
        raise TrainingFailed(str(busy)) from busy
    with held:
        shared = share_stores(trial, [other for other in trials if other is not trial])
    console.print(f", with the {' and '.join(shared)} of an earlier run" if shared else "", highlight=False)
    started = time.perf_counter()
    with console.status(f"training, log in {log}"):
        train_apart(trial.config, [sweep.base, *trial.overrides], log, command, group=sweep.name)
    row = Row({}, [], [], 1, 0, measured_of(trial) if trial.config.train.pause_at is None else [])
    found = [f"{name} {figure.value:.3f}, " for name in FIGURES if (figure := row.figure(name)) is not None]
    console.print(f"    {''.join(found)}{(time.perf_counter() - started) / 60:.1f} min", highlight=False)


def report(
    folder: Path,
    sweep: SweepFile,
    trials: Sequence[Trial],
    errors: dict[str, str],
    fit: Mapping[str, Any] | None = None,
) -> list[Row]:
    """The rows of the finished trials. They are also written to sweep.json, with what `--fit` has tried."""
    found = {trial.config.name: measured_of(trial) for trial in trials if finished(trial)}
    rows = summarise(sweep, trials, found) if trials else []
    told = [vars(row) | {"measured": [one.record() for one in row.measured]} for row in rows]
    points = [vars(point) for point in points_of(rows, trials, sweep.price_per_hour)]
    result = {"format": 2, **sweep.model_dump(mode="json"), "rows": told, "points": points, "failed": errors}
    result |= {"fit": fit} if fit else {}
    write_json(folder / "sweep.json", result)
    return rows


def share_stores(trial: Trial, others: Sequence[Trial]) -> list[str]:
    """Give a run the responses, and the teacher's signal next to them, of runs that would have made the same ones.

    Returns the names of these stores. Finished shards never change, so they are linked, or copied if the disk cannot link. The run itself
    makes what is still missing, in new files.
    """
    given, folder = [], trial.config.folder
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
                given.append(RESPONSES)
                # Prompts rendered on another day can differ, and so can a model under the same name.
                for name in (DAY, SERVED):
                    if store.with_name(name).exists():
                        shutil.copyfile(store.with_name(name), to.with_name(name))
    return list(dict.fromkeys(given))


def _link_or_copy(file: str, to: str) -> None:
    if Path(file).name != MANIFEST:
        with contextlib.suppress(OSError):
            os.link(file, to)
            return
    shutil.copyfile(file, to)
