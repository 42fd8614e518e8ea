"""File names in a run's folder, and how a path from the user is resolved.

runs/NAME/config.yaml             the resolved config
         began.txt                the folder that relative paths in config.yaml start at, relative to the run
         .lock, .holder           the lock of the process that writes in the folder; which process holds it, or held it last
         metrics.jsonl            one line per step
         wandb.id                 of the run in wandb, with tracking.trackers: [wandb]
         target.json              facts about the target that need no weights
         student.json             what was measured and chosen for the initial weights of the draft
         student.partial/         the draft before training, while it is saved and loaded again as a check
         prompts/                 prompts as the target sees them, rendered once: train.arrow, heldout.arrow, manifest.json
         responses/               token stores with the target's probabilities; day.txt if the chat template writes the
                                  date, server_identity.json for a target at a server
         rollouts/                sequences made during training
         checkpoints/step-000100/ student/ (a Hugging Face model), adapter/ (of student.lora), state/ (optimizer, scheduler, RNG), progress.json,
                                  judgement.json, judging/ (parts of a judgement that was not finished), provenance.json (commit, versions, machine, command)
         self_checks.json         checks that ran before anything was measured
         best                     link to the best checkpoint
         judging/                 parts of a verdict that was not finished
         readback.json, readback.jsonl  what `understudy readback` measured in an engine, and that engine's answers
         engine_costs.json         step times of that engine (`understudy time`)
         result.json, proposals.parquet, report.html
         verdict.json, plot.png   verdict.json is written last: a run that has it is finished
         dataset/                 what `understudy export --push-dataset` uploads
         export/                  where `understudy demo` exports to; commands in a report use this path
"""

from pathlib import Path

CONFIG, BEGAN, METRICS, WANDB_ID = "config.yaml", "began.txt", "metrics.jsonl", "wandb.id"
LOCK, HOLDER = ".lock", ".holder"
TARGET_FACTS, STUDENT_NOTES, FIRST_STUDENT = "target.json", "student.json", "student.partial"
RESPONSES, TRAINING, HELDOUT, HELDOUT_GREEDY = "responses", "train", "heldout", "heldout-greedy"
PROMPTS = "prompts"
DAY, SERVER_IDENTITY = "day.txt", "server_identity.json"  # Next to the stores of responses; copy them together.
ROLLOUTS = "rollouts"
CHECKPOINTS, BEST_LINK = "checkpoints", "best"
ADAPTER = "adapter"  # The peft directory of a student.lora, which `student` has merged; also next to an export.
# The last two exist until it is known which is better.
STUDENT = "student"
STATE, PROGRESS, JUDGEMENT, PROVENANCE = "state", "progress.json", "judgement.json", "provenance.json"
JUDGING = "judging"
SELF_CHECKS = "self_checks.json"
RESULT, PROPOSALS, REPORT, VERDICT, PLOT = "result.json", "proposals.parquet", "report.html", "verdict.json", "plot.png"
READBACK, ANSWERS, ENGINE_COSTS = "readback.json", "readback.jsonl", "engine_costs.json"
GREEDY_ANSWERS, PLAIN_ANSWERS = "readback-greedy.jsonl", "readback-plain.jsonl"
EXPORT = "export"
SERVING_FILE, SERVING_FORMAT = "serving.json", "understudy-serving"  # Of any exported directory.


def step_folder(run: Path, step: int) -> Path:
    """Folder of the checkpoint at a step."""
    return run / CHECKPOINTS / f"step-{step:06d}"


def list_steps(run: Path) -> list[int]:
    """Steps that have a complete checkpoint, in rising order."""
    found = (run / CHECKPOINTS).glob("step-[0-9]*")
    return sorted(int(path.name.removeprefix("step-")) for path in found if (path / PROGRESS).exists())


def best_student(run: Path) -> Path:
    """The model of a run's best checkpoint."""
    return run / BEST_LINK / STUDENT


def run_of(path: str | Path) -> Path | None:
    """The run that a path belongs to (its folder, or a checkpoint's folder); None for any other model."""
    folder = Path(path)
    if (folder / CONFIG).is_file():
        return folder
    run = folder.resolve().parent.parent
    return run if (folder / STUDENT).is_dir() and (run / CONFIG).is_file() else None


def find_student(path: str) -> str:
    """The model directory of a run's folder, a checkpoint's folder or a model directory; a hub id is returned unchanged."""
    folder = Path(path)
    for candidate in (best_student(folder), folder / STUDENT, folder):
        if (candidate / "config.json").exists():
            return str(candidate)
    return path
