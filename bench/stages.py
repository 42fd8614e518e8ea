"""Stages of a long study: one that is finished is skipped, one that was killed continues, and the same command does both."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.files import write_json
from distill.config.sections import did_you_mean
from speculative.errors import UserError


@dataclass(frozen=True)
class Stage:
    """A stage is finished when its file is there. left_out: why it cannot run on this machine; empty: it can."""

    make: Callable[[Any], None]
    file: Callable[[Any], Path]
    left_out: Callable[[Any], str] = lambda study: ""


@dataclass
class Study:
    """What stages share. seconds: of each finished one. said: of each, (command, output lines) in order."""

    seconds: dict[str, float] = field(init=False, default_factory=dict)
    said: dict[str, list[tuple[str, list[str]]]] = field(init=False, default_factory=dict)
    stage: str = field(init=False, default="")

    def run_stages(self, stages: Mapping[str, Stage], until: str, state: Path) -> None:
        """Run the stages that are not finished, in order, until this one; UserError: it is unknown. state: file of seconds and said."""
        if until not in stages:
            raise UserError(f"--until {until}: unknown stage; {did_you_mean(until, stages)}")
        state.parent.mkdir(parents=True, exist_ok=True)
        if state.is_file():
            stored = json.loads(state.read_text(encoding="utf-8"))
            self.seconds, self.said = stored["seconds"], stored["said"]
        for name in [*stages][: [*stages].index(until) + 1]:
            stage = stages[name]
            if name in self.seconds and stage.file(self).exists():
                print(f"{name}: finished before, {self.seconds[name]:.0f} s: {stage.file(self)}", flush=True)
            elif reason := stage.left_out(self):
                print(f"{name}: left out, because {reason}", flush=True)
            else:
                print(f"{name}: begins", flush=True)
                began, self.stage = time.monotonic(), name
                stage.make(self)
                self.seconds[name] = time.monotonic() - began
                write_json(state, {"seconds": self.seconds, "said": self.said})
                print(f"{name}: {self.seconds[name]:.0f} s: {stage.file(self)}", flush=True)
