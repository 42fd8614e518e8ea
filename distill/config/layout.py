"""File names in a run's folder, and how a path from the user is resolved."""

from difflib import get_close_matches
from pathlib import Path

# What a run's folder holds: file, who writes it and when, contents. docs/reference/run.md shows this table.
FILES = (
    ("config.yaml", "each start", "all keys of the config, with defaults"),
    ("began.txt", "first start", "the folder that relative paths in config.yaml start at, relative to the run"),
    (".lock, .holder", "whoever writes", "lock; the process that holds it or held it last"),
    ("target.json", "first start", "facts about the target that need no weights"),
    ("prompts/", "first start", "prompts as token ids; delete it to read a hub dataset again"),
    ("self_checks.json", "first start", "checks that ran before anything was measured"),
    ("student.json", "first start", "how the draft's initial weights were chosen"),
    ("student.partial/", "first start", "the draft before training, while it is saved and loaded again as a check"),
    ("responses/", "train, respond", "the target's responses and top-k probabilities (Arrow), one folder for each use"),
    ("responses/day.txt", "first start", "the day that a chat template writes"),
    ("responses/logged.json", "first start", "logged answers that were taken or left out (`data.responses: logged`)"),
    ("responses/server_identity.json", "first start", "which model answers, for a target at a server"),
    ("rollouts/", "train", "sequences made during training"),
    ("metrics.jsonl", "each step", "one line per step and per judgement; also sent to `tracking.trackers`"),
    ("wandb.id", "first start", "of the run in wandb"),
    ("tensorboard/, wandb/", "train", "logs of the trackers"),
    (
        "checkpoints/step-*/",
        "each judged step",
        "`student/`, `adapter/` (LoRA), `state/` (to resume), `progress.json`, `judgement.json`, `provenance.json` (commit, versions, "
        "machine, command)",
    ),
    ("best", "each judged step", "link to the best checkpoint; `best/student` is a Hugging Face model"),
    ("judging/", "train", "parts of a judgement or verdict that was not finished, also in a checkpoint"),
    ("result.json", "end", "everything that the page shows"),
    ("proposals.parquet", "end", "every drafted token of the live run"),
    ("plot.png", "end", "alpha and tau over steps, with the baseline"),
    ("report.html", "end", "the verdict as a page"),
    ("verdict.json", "end, last", "all ways to decode, and what to run; a run that has it is finished"),
    ("readback*.json, readback*.jsonl", "`readback`", "what was measured in an engine, and that engine's answers"),
    ("engine_costs.json", "`time`, train", "step times of an engine"),
    ("timing*/", "`time`, train", "an export for the engine that is timed; deleted afterwards"),
    ("dataset/", "`export --push-dataset`", "what is uploaded"),
    ("export/", "`demo`", "the exported draft; commands in a report use this path"),
)

CONFIG, BEGAN, METRICS, WANDB_ID = "config.yaml", "began.txt", "metrics.jsonl", "wandb.id"
LOCK, HOLDER = ".lock", ".holder"
TARGET_FACTS, STUDENT_NOTES, FIRST_STUDENT = "target.json", "student.json", "student.partial"
RESPONSES, TRAINING, HELDOUT, HELDOUT_GREEDY = "responses", "train", "heldout", "heldout-greedy"
LOGGED = "logged.json"
PROMPTS = "prompts"
DAY, SERVER_IDENTITY = "day.txt", "server_identity.json"  # Next to the stores of responses; copy them together.
ROLLOUTS = "rollouts"
CHECKPOINTS, BEST_LINK = "checkpoints", "best"
ADAPTER = "adapter"  # The peft directory of a student.lora, which `student` has merged; also next to an export.
STUDENT = "student"
STATE, PROGRESS, JUDGEMENT, PROVENANCE = "state", "progress.json", "judgement.json", "provenance.json"
JUDGING = "judging"
SELF_CHECKS = "self_checks.json"
RESULT, PROPOSALS, REPORT, VERDICT, PLOT = "result.json", "proposals.parquet", "report.html", "verdict.json", "plot.png"
READBACK, ANSWERS = "readback.json", "readback.jsonl"
GREEDY_ANSWERS, PLAIN_ANSWERS = "readback-greedy.jsonl", "readback-plain.jsonl"
EXPORT, TIMING = "export", "timing"
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


def near_path(path: str | Path) -> str:
    """`; did you mean X?` for the most similar path that is there; empty if there is none."""
    place = Path()
    for part in Path(path).parts:
        beside = place.iterdir() if place.is_dir() else ()
        near = [part] if (place / part).exists() else get_close_matches(part, [one.name for one in beside], n=1)
        if not near:
            return ""
        place /= near[0]
    return "" if place == Path(path) else f"; did you mean {place}?"


def find_student(path: str) -> str:
    """The model directory of a run's folder, a checkpoint's folder or a model directory; a hub id is returned unchanged."""
    folder = Path(path)
    for candidate in (best_student(folder), folder / STUDENT, folder):
        if (candidate / "config.json").exists():
            return str(candidate)
    return path
