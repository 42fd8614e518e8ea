"""A run's folder and its checkpoints: written whole or not at all, found again, pruned.

runs/NAME/config.yaml             the resolved config
         metrics.jsonl            one line a step
         responses/               token stores
         checkpoints/step-000100/ student/ (a Hugging Face model; with optim.ema also the worse of student-raw, student-ema), state/ (optimizer, scheduler, RNG), progress.json,
                                  judgement.json, provenance.json (commit, versions, machine, command)
         self_checks.json         what was checked before anything was measured
         best                     link to the best checkpoint
         result.json, proposals.parquet, report.html, report.md, report.json
         verdict.json, plot.png   verdict.json last: where it is, the run is finished
"""

import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers.utils.logging import disable_progress_bar

from data.store import write_json
from distill.config import RunConfig, dump_config, load_config
from speculative.errors import UserError

PROGRESS = "progress.json"
JUDGEMENT = "judgement.json"
RESULT = "result.json"  # what distill/findings.py writes, and report, drift and compare read
RESULT_FORMAT = 1
AVERAGED = "student-ema"  # beside `student` while it is not known which of the two is better
RAW = "student-raw"


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


# Keys that a resumed run may have changed: they do not reach what is trained on, only how it is laid out or shown.
MAY_DIFFER = (
    "resume", "train.micro_batch_size", "train.log_every", "train.keep_states", "train.profile_steps", "loss.chunk_tokens",
    "serving.batch_size", "judge.batch_size", "judge.speed_prompts", "judge.speed_threads", "judge.served", "tracking.trackers",
    "tracking.project",
)  # fmt: skip


def claim_folder(config: RunConfig) -> None:
    """Makes the run's folder, or accepts it when it holds the same config (apart from `MAY_DIFFER`).

    Raises:
        UserError: another config is there (first differing line named), or the folder cannot be written.
    """
    folder, text = config.folder, dump_config(config)
    path = folder / "config.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Before the first checkpoint only the responses could hang on the config, and their manifests guard them: a start
        # that failed may be mended.
        if path.exists() and (folder / "checkpoints").exists():
            may = set(MAY_DIFFER)
            if config.loss.weighting.name == "selected":
                may.discard("train.micro_batch_size")  # it chooses within a micro-batch
            old_tree, new_tree = load_config(path).model_dump(mode="json"), config.model_dump(mode="json")
            difference = _first_difference(old_tree, new_tree, may)
            if difference is not None:
                key, old, new = difference
                raise UserError(
                    f"{folder}: holds a run with another config ({key} is {old}, now {new}); "
                    "choose another name=... (its responses may be copied there), or delete the folder"
                )
            if config.resume == "never":
                raise UserError(
                    f"{folder}: holds a run already and resume is never; choose another name=..., or delete the folder"
                )
        elif path.exists() and path.read_text(encoding="utf-8") != text:
            for stale in ("self_checks.json", "student.json"):
                (folder / stale).unlink(missing_ok=True)
        temporary = path.with_name(".config.yaml.tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); set output=... to a folder that can"
        ) from error


def _first_difference(old: Any, new: Any, may: set[str], key: str = "") -> tuple[str, str, str] | None:
    """(dotted key, old value, new value) of the first difference between two trees that matters."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in (*old, *(name for name in new if name not in old)):
            found = _first_difference(old.get(name), new.get(name), may, f"{key}.{name}".lstrip("."))
            if found is not None:
                return found
        return None
    return None if old == new or key in may else (key, json.dumps(old), json.dumps(new))


def step_folder(run: Path, step: int) -> Path:
    """Folder of the checkpoint at a step."""
    return run / "checkpoints" / f"step-{step:06d}"


def list_steps(run: Path) -> list[int]:
    """Steps that have a whole checkpoint, rising."""
    found = (run / "checkpoints").glob("step-[0-9]*")
    return sorted(int(path.name.removeprefix("step-")) for path in found if (path / PROGRESS).exists())


def last_resumable(run: Path) -> int | None:
    """The newest checkpoint whose optimizer state is still kept."""
    return next((step for step in reversed(list_steps(run)) if (step_folder(run, step) / "state").exists()), None)


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
        accelerator.save_state(str(temporary / "state"))
        accelerator.wait_for_everyone()  # every rank's RNG is in the folder before it is renamed
        if accelerator.is_main_process:
            for name, student in students.items():
                student.save_pretrained(str(temporary / name))
                tokenizer.save_pretrained(str(temporary / name))
            write_json(temporary / "provenance.json", provenance)
            write_json(temporary / PROGRESS, asdict(progress))
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
        if (folder / "student").exists():
            os.replace(folder / "student", folder / RAW)
        os.replace(folder / AVERAGED, folder / "student")


def _is_disk_trouble(error: Exception) -> bool:
    """A full or unwritable disk in the words of Python, torch (RuntimeError), safetensors and tokenizers (bare Exception)."""
    words = ("os error", "i/o error", "no space", "file write failed", "unexpected pos")
    return isinstance(error, OSError) or any(word in str(error).lower() for word in words)


def prune_states(run: Path, keep: int) -> None:
    """Deletes the optimizer state of all but the newest ``keep`` checkpoints; students stay."""
    with_state = [step for step in list_steps(run) if (step_folder(run, step) / "state").exists()]
    for step in with_state[:-keep]:
        shutil.rmtree(step_folder(run, step) / "state", ignore_errors=True)


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
    temporary.symlink_to(Path("checkpoints") / step_folder(run, step).name, target_is_directory=True)
    os.replace(temporary, run / "best")


@dataclass(frozen=True)
class RunFacts:
    """What an export needs to know of a run."""

    student: Path
    target: str
    verdict: dict[str, Any] | None
    provenance: dict[str, Any]
    sampling: dict[str, Any]
    revision: str | None
    trust_remote_code: bool


def read_run(path: Path) -> RunFacts:
    """Facts of a run's best checkpoint, or of one checkpoint of a run.

    Raises:
        UserError: neither a run's folder nor a checkpoint of one, or nothing judged yet.
    """
    run = path if (path / "config.yaml").exists() else path.resolve().parent.parent
    if not (run / "config.yaml").exists():
        raise UserError(f"{path}: neither a run's folder (config.yaml in it) nor a checkpoint of one")
    folder = path if run != path else run / "best"
    if not (folder / "student").exists():
        raise UserError(f"{path}: no checkpoint there yet; finish the run first (the same command goes on)")
    config = load_config(run / "config.yaml")
    if config.target is None:
        raise UserError(
            f"{run}: pre-trained from text (target: null), not a draft; its best/student is an ordinary model"
        )
    verdict_file = run / "verdict.json"
    verdict = json.loads(verdict_file.read_text(encoding="utf-8")) if verdict_file.exists() else None
    if verdict is not None and folder.resolve() != step_folder(run, verdict["best"]["step"]).resolve():
        verdict = None  # the verdict is of another checkpoint
    provenance = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    data = [source.path for source in config.data.train]
    provenance |= {"data": data, "config": dump_config(config), "base": config.student.path}
    sampling = {key: getattr(config.serving, key) for key in ("temperature", "top_k", "top_p", "min_p")}
    where = config.target
    return RunFacts(
        folder / "student", where.path, verdict, provenance, sampling, where.revision, where.trust_remote_code
    )
