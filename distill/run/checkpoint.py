"""Checkpoints: write atomically, find, record judgements, delete old states."""

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from data.files import open_modes, write_json
from distill.config.layout import (
    BEST_LINK,
    CHECKPOINTS,
    JUDGEMENT,
    PROGRESS,
    PROVENANCE,
    STATE,
    list_steps,
    step_folder,
)
from distill.run.run import Progress, Run
from speculative.errors import UserError
from speculative.evaluate import Judgement
from speculative.measure.record import Record
from speculative.progress import each, phase


def last_resumable(run: Path) -> int | None:
    """Step of the newest checkpoint that still has its optimizer state."""
    return next((step for step in reversed(list_steps(run)) if (step_folder(run, step) / STATE).exists()), None)


def save_checkpoint(run: Run, students: dict[str, Any], tokenizer: Any, provenance: Mapping[str, Any]) -> Path:
    """Write students, optimizer, scheduler, every rank's RNG and progress under a temporary name, then rename.

    All ranks call it; ``students``, causal LMs by folder name, matter on the main one. UserError: disk full; earlier ones are untouched.
    """
    # Accelerate logs at each save that tied weights are stored once, which is intended.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    disable_progress_bar()
    final = step_folder(run.folder, run.progress.step)
    temporary = final.with_name(f".{final.name}.tmp")
    try:
        if run.main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        run.wait()
        with phase(f"saving step {run.progress.step}"):
            run.accelerator.save_state(str(temporary / STATE))
        run.wait()  # Every rank's RNG must be in the folder before it is renamed.
        if run.main:
            for name, student in each(students.items(), f"saving step {run.progress.step}"):
                student.save_pretrained(str(temporary / name))
                tokenizer.save_pretrained(str(temporary / name))
            write_json(temporary / PROVENANCE, dict(provenance))
            write_json(temporary / PROGRESS, asdict(run.progress))
            open_modes(temporary)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
        run.wait()
    except Exception as error:
        if not _is_disk_trouble(error):
            raise
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            f"{final}: cannot be written ({str(error).splitlines()[0]}); {last_good(run.folder)}"
        ) from error
    return final


def last_good(run: Path) -> str:
    """A phrase that says from which checkpoint a stopped run can continue."""
    steps = list_steps(run)
    return f"the last good checkpoint is {step_folder(run, steps[-1])}" if steps else "there is no checkpoint yet"


def keep_judgement(run: Run, step: int) -> None:
    """Count checkpoints without a gain and link the best. All ranks must call it."""
    # Read from files, so that a kill between two writes cannot make memory and disk disagree.
    scores = run.seen(lambda: judged_scores(run.folder))
    run.progress.best_step, run.progress.best_score = max(scores, key=lambda item: item[1])
    run.progress.judged_without_gain = sum(step > run.progress.best_step for step, _ in scores)
    if run.main:
        write_json(step_folder(run.folder, step) / PROGRESS, vars(run.progress))
        point_best(run.folder, run.progress.best_step)
    run.wait()


def _is_disk_trouble(error: Exception) -> bool:
    """Whether this is a full or unwritable disk, as reported by Python, torch (RuntimeError), safetensors or tokenizers (Exception)."""
    words = ("os error", "i/o error", "no space", "file write failed", "unexpected pos")
    return isinstance(error, OSError) or any(word in str(error).lower() for word in words)


def prune_states(run: Path) -> None:
    """Delete the optimizer state of all but the newest two checkpoints; keep the students."""
    with_state = [step for step in list_steps(run) if (step_folder(run, step) / STATE).exists()]
    for step in with_state[:-2]:
        shutil.rmtree(step_folder(run, step) / STATE, ignore_errors=True)


def judged_scores(run: Path) -> list[tuple[int, float]]:
    """(step, score) of every judged checkpoint, steps rising."""
    return [(step, record["score"]) for step, record in _judgements(run)]


def missed_checks(run: Path) -> list[int]:
    """Steps of checkpoints whose prompts, decoded live or answered again, differ from replay by more than chance."""
    judged = _judgements(run)
    checks = [(step, (own.get("live_check") or {}).get("replay") or own.get("fresh_check")) for step, own in judged]
    return [step for step, check in checks if check and not check["agrees"]]


def _judgements(run: Path) -> list[tuple[int, dict[str, Any]]]:
    paths = {step: step_folder(run, step) / JUDGEMENT for step in list_steps(run)}
    return [(step, Record.read(path).record()) for step, path in paths.items() if path.exists()]


def point_best(run: Path, step: int) -> None:
    """Make `best` a link to a step's checkpoint, in one rename."""
    temporary = run / ".best.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(Path(CHECKPOINTS) / step_folder(run, step).name, target_is_directory=True)
    os.replace(temporary, run / BEST_LINK)


def load_judgements(run: Path) -> list[Judgement]:
    """The record of every judged checkpoint, step 0 (the undistilled draft) first; UserError if that one is missing or one is damaged."""
    records, remedy = [], f"delete {run / CHECKPOINTS} and start the run's command again: the responses are kept"
    for step in list_steps(run):
        path = step_folder(run, step) / JUDGEMENT
        if path.exists():
            records.append(Judgement.read(path, remedy))
    if records and records[0].step != 0:
        raise UserError(f"{step_folder(run, 0) / JUDGEMENT}: is missing, so the draft at step 0 is unknown; {remedy}")
    if not records:
        raise UserError(f"{run}: has no judged checkpoint; train first with `understudy train CONFIG`")
    return records


def resume_point(run: Path) -> tuple[Progress, Path | None]:
    """Progress and folder of the newest resumable checkpoint; fresh progress and None if there is none."""
    step = last_resumable(run)
    if step is None:
        return Progress(), None
    folder = step_folder(run, step)
    return Progress(**Record.read(folder / PROGRESS, f"delete {folder} and start the command again").record()), folder
