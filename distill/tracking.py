"""Metrics on their way out: metrics.jsonl always, wandb and tensorboard through Accelerate when asked."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import is_tensorboard_available

from speculative.errors import UserError

METRICS = "metrics.jsonl"


class Metrics:
    """Appends JSON lines on the main process; after a resume, lines past the resumed step are cut first."""

    def __init__(self, folder: Path, accelerator: Accelerator, log_every: int, has_trackers: bool) -> None:
        """The file is opened for appending, or made."""
        self.path = folder / METRICS
        self.accelerator = accelerator
        self.log_every = log_every
        self.has_trackers = has_trackers

    def cut_after(self, step: int) -> None:
        """Drops what will be written again: lines of later steps, and the judgement of this one."""
        if not self.accelerator.is_main_process or not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            # A kill in the middle of a write leaves a torn last line.
            if not line.endswith("}"):
                continue
            values = json.loads(line)
            if values["step"] < step or (values["step"] == step and "judge/score" not in values):
                kept.append(line)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, self.path)

    def write(self, step: int, values: Mapping[str, Any], *, always: bool = False) -> None:
        """One line; numbers go to the trackers too, every `log_every` steps or when ``always``."""
        if not self.accelerator.is_main_process:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self.has_trackers and (always or step % self.log_every == 0):
            self.accelerator.log(
                {key: value for key, value in values.items() if isinstance(value, int | float)}, step=step
            )


def start_trackers(
    accelerator: Accelerator, trackers: tuple[str, ...], project: str, name: str, config: Mapping[str, Any]
) -> None:
    """Starts Accelerate's trackers; wandb goes offline when nobody is logged in.

    Raises:
        UserError: a tracker whose package is not installed.
    """
    if not trackers:
        return
    if "tensorboard" in trackers and not is_tensorboard_available():
        raise UserError("tracking.trackers: tensorboard is not installed here; `pip install tensorboard` or drop it")
    options = {"wandb": {"name": name, "dir": str(accelerator.logging_dir)}} if "wandb" in trackers else {}
    if "wandb" in trackers and accelerator.is_main_process:
        try:
            import wandb
        except ImportError as error:
            raise UserError("tracking.trackers: wandb is not installed here; `pip install wandb` or drop it") from error
        if not os.environ.get("WANDB_MODE") and not wandb.api.api_key:
            # Not through WANDB_MODE: wandb has read its environment by now.
            options["wandb"]["mode"] = "offline"
    flat = {
        key: value if isinstance(value, int | float | str | bool) else json.dumps(value)
        for key, value in config.items()
    }
    accelerator.init_trackers(project, config=flat, init_kwargs=options)
