"""Metrics output: metrics.jsonl always, trackers such as wandb through Accelerate if configured."""

import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from data.files import write_bytes
from distill.config.layout import METRICS, VERDICT, WANDB_ID, list_steps
from distill.config.run import RunConfig
from speculative.errors import UserError

STEP = "train/step"
# Tracker names of the values in metrics.jsonl. The part before the slash is the panel's section. Judgements are
# `judge/...` in both; a key that is not in this table goes to train/.
TRACKED_NAMES = {
    "loss": "train/loss",
    "alpha_train": "train/alpha",
    "alpha_slack": "train/alpha_slack",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "skipped": "train/skipped",
    "tokens": "train/tokens",
    "tokens_seen": "train/tokens_seen",
    "tokens_per_second": "speed/tokens_per_second",
    "mfu": "speed/mfu",
    "peak_memory_mib": "memory/peak_mib",
    "judge/judging_seconds": "time/judge",
}
# Values whose summary in the table of runs is not the last value.
SUMMARIES = {
    "train/loss": "min",
    "train/alpha": "max",
    "speed/tokens_per_second": "mean",
    "speed/mfu": "mean",
    "memory/peak_mib": "max",
    "judge/alpha": "max",
    "judge/tau_replay": "max",
    "judge/score": "max",
}
# Of a verdict, the metadata of the artifact.
TOLD = ("outcome", "headline", "rule", "gamma", "prompts", "pays", "run", "survival", "gain", "measured")
LOG_EVERY = 10  # steps between points sent to trackers
# Characters of a domain that MLflow refuses in a name.
UNUSUAL = re.compile(r"[^-. \w]")
SECTIONS = ("train", "survival", "judge", "domains", "dial", "speed", "time", "memory")


class Metrics:
    """Append JSON lines on the main process. After a resume, lines past the resumed step are removed first."""

    def __init__(self, folder: Path, accelerator: Accelerator, has_trackers: bool) -> None:
        self.path, self.accelerator = folder / METRICS, accelerator
        self.has_trackers = has_trackers

    def cut_after(self, step: int) -> None:
        """Remove the lines that will be written again: those of later steps and the judgement of this one."""
        if not self.accelerator.is_main_process or not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            # A process killed while writing leaves an incomplete last line.
            try:
                values = json.loads(line)
            except ValueError:
                continue
            if values["step"] < step or (values["step"] == step and "judge/score" not in values):
                kept.append(line)
        write_bytes(self.path, "".join(line + "\n" for line in kept).encode())

    def write(self, step: int, values: Mapping[str, Any], *, always: bool = False) -> None:
        """Write one line. Numbers also go to the trackers, every `LOG_EVERY` steps or if ``always``."""
        if not self.accelerator.is_main_process:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self.has_trackers and (always or step % LOG_EVERY == 0):
            for tracker in self.accelerator.trackers:
                # wandb drops a step below its last one, which a resumed run may log again; its panels are over `train/step`.
                tracker.log(tracked(step, values), step=None if tracker.name == "wandb" else step)


def judged_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a judgement as `judge/NAME`, the bounds of its intervals as `judge/NAME_low` and `judge/NAME_high`.

    tau is `judge/tau_replay`. Of the prompts that were decoded live: `judge/tau_live` with its bounds, `judge/live_prompts`, `judge/z`; a
    server that answers again gives the last two.
    Survival is `judge/survival_J`, and alpha by domain `domains/NAME/alpha`.
    """
    record = {{"tau": "tau_replay", "tau_ci": "tau_replay_ci"}.get(key, key): value for key, value in record.items()}
    if check := record.get("live_check"):
        record |= {"tau_live": check["tau"], "tau_live_ci": check["tau_ci"], "live_prompts": check["prompts"]}
        record["z"] = (check.get("replay") or {}).get("z")
    if fresh := record.get("fresh_check"):
        record |= {"live_prompts": fresh["prompts"], "z": fresh["z"]}
    numbers = {f"judge/{key}": value for key, value in record.items() if isinstance(value, int | float)}
    numbers |= {f"judge/survival_{place}": share for place, share in enumerate(record.get("survival") or (), start=1)}
    intervals = {f"judge/{key.removesuffix('_ci')}": ends for key, ends in record.items() if key.endswith("_ci")}
    for domain, part in record.get("domains", {}).items():
        name = f"domains/{UNUSUAL.sub('_', domain)}/alpha"
        numbers[name], intervals[name] = part["alpha"], part.get("alpha_ci")
    for name, ends in intervals.items():
        if ends:
            numbers |= {f"{name}_low": ends[0], f"{name}_high": ends[1]}
    return numbers


def tracked(step: int, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl under their tracker names; `seconds` by stage becomes time/STAGE."""
    numbers: dict[str, float] = {STEP: step}
    for key, value in values.items():
        if key == "seconds" and isinstance(value, Mapping):
            numbers |= {f"time/{stage}": seconds for stage, seconds in value.items()}
        elif isinstance(value, int | float):
            numbers[TRACKED_NAMES.get(key, key if "/" in key else f"train/{key}")] = value
    return numbers


def start_trackers(
    accelerator: Accelerator, trackers: tuple[str, ...], project: str, name: str, config: Mapping[str, Any]
) -> None:
    """Start Accelerate's trackers, with ``name``, the run's, in ``project``; wandb runs offline without a login.

    ``config``: a tree of plain values; trackers get the leaves under dotted names. UserError for a tracker that is not installed.
    """
    if not trackers:
        return
    for tracker in trackers:
        if tracker not in map(str, get_available_trackers()):
            raise UserError(f"tracking.trackers: {tracker} is not installed; run `pip install {tracker}`, or remove it")
    with_wandb = "wandb" in trackers and accelerator.is_main_process
    options: dict[str, dict[str, Any]] = {
        "trackio": {"name": name, "resume": "allow"},
        "mlflow": {"run_name": name},
        "wandb": wandb_options(Path(accelerator.logging_dir), name) | {"notes": notes_of(config)} if with_wandb else {},
    }
    accelerator.init_trackers(project, config=flat_config(config), init_kwargs=options)
    if with_wandb:
        # Every section is plotted over the training step.
        run = accelerator.get_tracker("wandb", unwrap=True)
        run.define_metric(STEP, hidden=True)
        for section in SECTIONS:
            run.define_metric(f"{section}/*", step_metric=STEP)
        for metric, summary in SUMMARIES.items():
            run.define_metric(metric, step_metric=STEP, summary=summary)


def wandb_options(folder: Path, name: str) -> dict[str, Any]:
    """Arguments of `wandb.init` to begin or continue the run of this folder; offline without a login."""
    import wandb

    options = {"name": name, "dir": str(folder), "resume": "allow", "id": _wandb_id(folder / WANDB_ID)}
    # WANDB_MODE has no effect here, because wandb has already read its environment.
    return options | ({} if os.environ.get("WANDB_MODE") or wandb.api.api_key else {"mode": "offline"})


def log_draft(folder: Path, config: RunConfig, exported: Path) -> None:
    """Log an exported draft to the run of a folder, as an artifact of type model. A judged draft gets alias `best` and its verdict.

    Raises UserError: wandb is not installed or cannot be reached. The export is kept.
    """
    try:
        import wandb
    except ImportError as error:
        told = "wandb is not installed; run `pip install wandb` and export again, or ignore this"
        raise UserError(f"{exported}: exported, but not logged to wandb: {told}") from error

    judged = (exported / VERDICT).exists()
    verdict = json.loads((exported / VERDICT).read_text(encoding="utf-8")) if judged else {}
    metadata = {key: value for key, value in verdict.items() if key in TOLD}
    artifact = wandb.Artifact(f"{config.name}-draft", type="model", metadata=metadata)
    artifact.add_dir(str(exported))
    try:
        with wandb.init(project=config.tracking.project, **wandb_options(folder, config.name)) as run:
            run.log_artifact(artifact, aliases=["best"] if judged else None)
    except wandb.Error as error:
        raise UserError(f"{exported}: exported, but not logged to wandb ({error}); set WANDB_MODE=offline") from error


def _wandb_id(path: Path) -> str:
    """The id of the run in wandb, kept in the run's folder, so that a resumed run goes on in the same one."""
    if not path.exists() or not list_steps(path.parent):  # without a checkpoint nothing is resumed
        write_bytes(path, f"{secrets.token_hex(8)}\n".encode())
    return path.read_text(encoding="utf-8").strip()


def flat_config(tree: Mapping[str, Any], prefix: str = "") -> dict[str, int | float | str | bool]:
    """Leaves of a config under dotted names; other values (a list, null) as JSON text."""
    flat: dict[str, int | float | str | bool] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_config(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, int | float | str | bool) else json.dumps(value)
    return flat


def notes_of(config: Mapping[str, Any]) -> str:
    """One line: target, draft, objective, serving temperature and seed."""
    target, student, loss, serving = (config.get(name) or {} for name in ("target", "student", "loss", "serving"))
    objective = loss.get("mix") or loss.get("name") or "by the serving rule"
    return (
        f"target {target.get('path')}, draft {student.get('path') or student.get('init')}, objective {objective}, "
        f"serving temperature {serving.get('temperature')}, seed {config.get('seed')}"
    )
