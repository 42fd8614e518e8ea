"""A command in stages: its state is a file that is written before each stage begins, so that the same command resumes a killed one."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import Field

from data.files import write_json, writing
from speculative.measure.record import Record


class Event(Record):
    """Start of a stage; time: Unix seconds."""

    time: float
    stage: str
    text: str


class Stages(Record, frozen=False):
    """What a command did so far. since: start of the stage, Unix seconds. reason: why it began. events: the starts of all stages."""

    stage: str
    since: float = 0.0
    reason: str = ""
    events: list[Event] = Field(default_factory=list)

    def store(self, folder: Path) -> None:
        """Write the file atomically. Raises UserError if that fails."""
        with writing(folder / self.FILE):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / self.FILE, self.model_dump())

    def enter(self, folder: Path, stage: str, text: str) -> None:
        """Begin a stage: store it."""
        self.stage, self.since, self.reason = stage, time.time(), text
        self.events.append(Event(time=self.since, stage=stage, text=text))
        self.store(folder)

    def resume(self, stages: Mapping[str, Callable[[], None]]) -> str:
        """Run the present stage and those that it enters, until one that is none of ``stages``; return that one."""
        while self.stage in stages:
            stages[self.stage]()
        return self.stage
