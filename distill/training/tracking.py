"""Metrics output: metrics.jsonl always, wandb and tensorboard through Accelerate if configured."""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from transformers.utils import flatten_dict

from data.files import write_bytes
from distill.config.layout import METRICS, WANDB_ID, list_steps
from speculative.errors import UserError

STEP = "train/step"
LOG_EVERY = 10  # steps


class Metrics:
    """Append JSON lines on the main process. After a resume, lines past the resumed step are removed first."""

    def __init__(self, folder: Path, accelerator: Accelerator, has_trackers: bool) -> None:
        self.path, self.accelerator = folder / METRICS, accelerator
        self.has_trackers = has_trackers

    def cut_after(self, step: int) -> None:
        """Remove the lines that will be written again: those of later steps and the judgement of this one."""
        if not self.accelerator.is_main_process or not self.path.exists():
            return
        lines = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            # A process killed while writing leaves an incomplete last line.
            try:
                values = json.loads(line)
            except ValueError:
                continue
            if values["step"] < step or (values["step"] == step and "judge/score" not in values):
                lines.append(line)
        write_bytes(self.path, "".join(line + "\n" for line in lines).encode())

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

    tau is `judge/tau_replay`. Of the prompts that were decoded live: `judge/tau_live` with its bounds, `judge/accepted_per_drafted_live`,
    `judge/live_prompts`, 0 without one, and `judge/z`; a server that answers again gives the last two.
    Survival is `judge/survival_J`, and alpha by domain `domains/NAME/alpha`.
    """
    names = {"tau": "tau_replay", "tau_ci": "tau_replay_ci"}
    # `live` is of tau, which a checkpoint has by replay even where it decoded prompts live.
    record = {names.get(key, key): value for key, value in record.items() if key != "live"} | {"live_prompts": 0}
    if check := record.get("live_check"):
        record |= {"tau_live": check["tau"], "tau_live_ci": check["tau_ci"], "live_prompts": check["prompts"]}
        record |= {
            "accepted_per_drafted_live": check["accepted_per_drafted"],
            "z": (check.get("replay") or {}).get("z"),
        }
    if fresh := record.get("fresh_check"):
        record |= {"live_prompts": fresh["prompts"], "z": fresh["z"]}
    numbers = {f"judge/{key}": value for key, value in record.items() if isinstance(value, int | float)}
    numbers |= {f"judge/survival_{place}": share for place, share in enumerate(record.get("survival") or (), start=1)}
    intervals = {f"judge/{key.removesuffix('_ci')}": ends for key, ends in record.items() if key.endswith("_ci")}
    for domain, part in record.get("domains", {}).items():
        name = f"domains/{domain}/alpha"
        numbers[name], intervals[name] = part["alpha"], part.get("alpha_ci")
    for name, ends in intervals.items():
        if ends:
            numbers |= {f"{name}_low": ends[0], f"{name}_high": ends[1]}
    return numbers


def tracked(step: int, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl: `train/KEY`, `time/STAGE` of its seconds, and names that have a slash as they are."""
    numbers: dict[str, float] = {STEP: step}
    numbers |= {f"time/{stage}": seconds for stage, seconds in values.get("seconds", {}).items()}
    numbers |= {
        key if "/" in key else f"train/{key}": value for key, value in values.items() if isinstance(value, int | float)
    }
    return numbers


def start_trackers(accelerator: Accelerator, trackers: tuple[str, ...], name: str, config: dict[str, Any]) -> None:
    """Start Accelerate's trackers, with ``name``, the run's; wandb runs offline without a login. $WANDB_PROJECT: their project.

    ``config``: a tree of plain values; trackers get the leaves under dotted names, lists and null as JSON text. UserError for a tracker
    that is not installed.
    """
    if not trackers:
        return
    for tracker in trackers:
        if tracker not in map(str, get_available_trackers()):
            raise UserError(f"tracking.trackers: {tracker} is not installed; run `pip install {tracker}`, or remove it")
    options: dict[str, dict[str, Any]] = {}
    with_wandb = "wandb" in trackers and accelerator.is_main_process
    if with_wandb:
        import wandb

        folder = Path(accelerator.logging_dir)
        options["wandb"] = {"name": name, "dir": str(folder), "resume": "allow", "id": _wandb_id(folder / WANDB_ID)}
        if not (os.environ.get("WANDB_MODE") or wandb.api.api_key):
            # WANDB_MODE has no effect here, because wandb has already read its environment.
            options["wandb"]["mode"] = "offline"
    flat = {k: v if isinstance(v, int | float | str) else json.dumps(v) for k, v in flatten_dict(config).items()}
    accelerator.init_trackers(os.environ.get("WANDB_PROJECT", "understudy"), config=flat, init_kwargs=options)
    if with_wandb:
        run = accelerator.get_tracker("wandb", unwrap=True)
        run.define_metric(STEP, hidden=True)
        run.define_metric("*", step_metric=STEP)


def _wandb_id(path: Path) -> str:
    """The id of the run in wandb, kept in the run's folder, so that a resumed run goes on in the same one."""
    if not path.exists() or not list_steps(path.parent):  # without a checkpoint nothing is resumed
        write_bytes(path, f"{secrets.token_hex(8)}\n".encode())
    return path.read_text(encoding="utf-8").strip()
