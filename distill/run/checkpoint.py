"""Checkpoints: written whole or not at all, found again, judged, pruned."""

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers.utils.logging import disable_progress_bar

from data.files import open_modes, write_json
from distill.config.layout import (
    AVERAGED,
    BEST_LINK,
    CHECKPOINTS,
    JUDGEMENT,
    PROGRESS,
    PROVENANCE,
    RAW,
    STATE,
    STUDENT,
    list_steps,
    step_folder,
)
from distill.run.verdict_record import Judgement
from speculative.errors import UserError


@dataclass
class Progress:
    """What a resumed run needs besides tensors. The position in the data follows from `step`."""

    step: int = 0
    tokens_seen: int = 0
    best_step: int | None = None
    best_score: float | None = None
    judged_without_gain: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def spend(self, stage: str, seconds: float) -> None:
        """Adds to the time spent in a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Books the seconds of the block by the wall clock; not those of one that fails."""
        started = time.perf_counter()
        yield
        self.spend(stage, time.perf_counter() - started)


def last_resumable(run: Path) -> int | None:
    """The newest checkpoint whose optimizer state is still kept."""
    return next((step for step in reversed(list_steps(run)) if (step_folder(run, step) / STATE).exists()), None)


def save_checkpoint(
    run: Path,
    accelerator: Accelerator,
    students: dict[str, Any],
    tokenizer: Any,
    progress: Progress,
    provenance: dict[str, Any],
) -> Path:
    """Writes students, optimizer, scheduler, every rank's RNG and progress under a temporary name, then renames.

    All ranks call it. ``students`` are causal LMs by folder name on the main process, and not looked at elsewhere.

    Raises:
        UserError: disk full or folder not writable; earlier checkpoints are untouched.
    """
    # Accelerate notes at each save that tied weights are stored once: as it should be.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    disable_progress_bar()
    final = step_folder(run, progress.step)
    temporary = final.with_name(f".{final.name}.tmp")
    try:
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(temporary / STATE))
        accelerator.wait_for_everyone()  # every rank's RNG is in the folder before it is renamed
        if accelerator.is_main_process:
            for name, student in students.items():
                student.save_pretrained(str(temporary / name))
                tokenizer.save_pretrained(str(temporary / name))
            write_json(temporary / PROVENANCE, provenance)
            write_json(temporary / PROGRESS, asdict(progress))
            open_modes(temporary)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
        accelerator.wait_for_everyone()
    except Exception as error:
        if not _is_disk_trouble(error):
            raise
        shutil.rmtree(temporary, ignore_errors=True)
        steps = list_steps(run)
        kept = (
            f"the last good checkpoint is {step_folder(run, steps[-1])}" if steps else "there is no earlier checkpoint"
        )
        raise UserError(f"{final}: cannot be written ({str(error).splitlines()[0]}); {kept}") from error
    return final


def settle_weights(folder: Path, judgement: dict[str, Any]) -> None:
    """Gives the better of raw and averaged weights the name `student`; the other stays beside it. May be called again."""
    if judgement.get("weights") == "ema" and (folder / AVERAGED).exists():
        if (folder / STUDENT).exists():
            os.replace(folder / STUDENT, folder / RAW)
        os.replace(folder / AVERAGED, folder / STUDENT)


def _is_disk_trouble(error: Exception) -> bool:
    """A full or unwritable disk in the words of Python, torch (RuntimeError), safetensors and tokenizers (bare Exception)."""
    words = ("os error", "i/o error", "no space", "file write failed", "unexpected pos")
    return isinstance(error, OSError) or any(word in str(error).lower() for word in words)


def prune_states(run: Path, keep: int) -> None:
    """Deletes the optimizer state of all but the newest ``keep`` checkpoints; students stay."""
    with_state = [step for step in list_steps(run) if (step_folder(run, step) / STATE).exists()]
    for step in with_state[:-keep]:
        shutil.rmtree(step_folder(run, step) / STATE, ignore_errors=True)


def judged_scores(run: Path) -> list[tuple[int, float]]:
    """(step, score) of every judged checkpoint, steps rising."""
    paths = {step: step_folder(run, step) / JUDGEMENT for step in list_steps(run)}
    return [
        (step, json.loads(path.read_text(encoding="utf-8"))["score"]) for step, path in paths.items() if path.exists()
    ]


def point_best(run: Path, step: int) -> None:
    """Makes `best` a link to a step's checkpoint, in one rename."""
    temporary = run / ".best.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(Path(CHECKPOINTS) / step_folder(run, step).name, target_is_directory=True)
    os.replace(temporary, run / BEST_LINK)


def load_judgements(run: Path) -> list[Judgement]:
    """The record of every judged checkpoint, step 0 first.

    Raises:
        UserError: the run has none, one is not whole, or that of step 0, the undistilled draft, is not there.
    """
    records, remedy = [], f"delete {run / CHECKPOINTS} and start the run's command again: the responses are kept"
    for step in list_steps(run):
        path = step_folder(run, step) / JUDGEMENT
        if path.exists():
            records.append(Judgement.read(path, remedy))
    if records and records[0].step != 0:
        raise UserError(
            f"{step_folder(run, 0) / JUDGEMENT}: not there, so nothing tells of the draft before training; {remedy}"
        )
    if not records:
        raise UserError(
            f"{run}: no judged checkpoint there; train first with `accelerate launch -m distill.train CONFIG`"
        )
    return records


def resume_point(run: Path) -> tuple[Progress, Path | None]:
    """Progress of the newest resumable checkpoint and its folder; fresh progress when there is none."""
    step = last_resumable(run)
    if step is None:
        return Progress(), None
    folder = step_folder(run, step)
    return Progress(**json.loads((folder / PROGRESS).read_text(encoding="utf-8"))), folder
