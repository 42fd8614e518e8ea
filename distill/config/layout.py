"""What lies where in a run's folder: the one place of its names, and what a path that a person gives stands for.

runs/NAME/config.yaml             the resolved config
         .lock, .holder           held by the process that writes in the folder; which one that is, or was
         metrics.jsonl            one line a step
         target.json              what is known of the target without its weights
         student.json             what was measured and chosen for the draft's first weights
         prompts/                 as the target sees them, rendered once: train.arrow, heldout.arrow, manifest.json;
                                  synthetic.arrow and synthetic.json (how they were made, what was left out)
         responses/               token stores, with what the teacher said; day.txt where the chat template writes the
                                  date, served.json of a target behind a server
         rollouts/                sequences made while training
         checkpoints/step-000100/ student/ (a Hugging Face model; with optim.ema also the worse of student-raw, student-ema), adapter/ (of student.lora), state/ (optimizer, scheduler, RNG), progress.json,
                                  judgement.json, provenance.json (commit, versions, machine, command)
         self_checks.json         what was checked before anything was measured
         best                     link to the best checkpoint
         served.json, served.jsonl  what `understudy readback` measured in an engine, and that engine's answers
         result.json, proposals.parquet, report.html, report.json
         verdict.json, plot.png   verdict.json last: where it is, the run is finished
         export/                  where `understudy demo` exports to, and the commands in a report point to
"""

from pathlib import Path

CONFIG, METRICS = "config.yaml", "metrics.jsonl"
LOCK, HOLDER = ".lock", ".holder"
TARGET_FACTS, STUDENT_NOTES = "target.json", "student.json"
RESPONSES, TRAINING, HELDOUT, HELDOUT_GREEDY = "responses", "train", "heldout", "heldout-greedy"
USER_TURNS, SYNTHETIC = (
    "user-turns",
    "synthetic",
)  # what the target said as the user; prompts/: the prompts made, how many
PROMPTS = "prompts"
DAY, SERVED = "day.txt", "served.json"  # beside the stores of responses, to be copied with them
ROLLOUTS = "rollouts"
CHECKPOINTS, BEST_LINK = "checkpoints", "best"
ADAPTER = "adapter"  # of a student.lora: what `student` has merged, a peft directory; beside an export too
STUDENT, AVERAGED, RAW = "student", "student-ema", "student-raw"  # the last two while it is not known which is better
STATE, PROGRESS, JUDGEMENT, PROVENANCE = "state", "progress.json", "judgement.json", "provenance.json"
SELF_CHECKS = "self_checks.json"
RESULT, PROPOSALS, REPORT, VERDICT, PLOT = "result.json", "proposals.parquet", "report.html", "verdict.json", "plot.png"
READBACK, ANSWERS = "served.json", "served.jsonl"
GREEDY_ANSWERS, PLAIN_ANSWERS = "served-greedy.jsonl", "served-plain.jsonl"
EXPORT = "export"
SERVING_FILE, SERVING_FORMAT = "serving.json", "understudy-serving"  # of an exported directory, wherever it is


def step_folder(run: Path, step: int) -> Path:
    """Folder of the checkpoint at a step."""
    return run / CHECKPOINTS / f"step-{step:06d}"


def list_steps(run: Path) -> list[int]:
    """Steps that have a whole checkpoint, rising."""
    found = (run / CHECKPOINTS).glob("step-[0-9]*")
    return sorted(int(path.name.removeprefix("step-")) for path in found if (path / PROGRESS).exists())


def best_student(run: Path) -> Path:
    """The model of a run's best checkpoint."""
    return run / BEST_LINK / STUDENT


def run_of(path: str | Path) -> Path | None:
    """The run that a path is of: its folder, or a checkpoint's; None for any other model."""
    folder = Path(path)
    if (folder / CONFIG).is_file():
        return folder
    run = folder.resolve().parent.parent
    return run if (folder / STUDENT).is_dir() and (run / CONFIG).is_file() else None


def find_student(path: str) -> str:
    """A run's folder, a checkpoint's folder or a model directory -> the model directory; a hub id stays as it is."""
    folder = Path(path)
    for candidate in (best_student(folder), folder / STUDENT, folder):
        if (candidate / "config.json").exists():
            return str(candidate)
    return path
