"""Where a rollout stands, so that one that was killed goes on: drafts/NAME/rollout.json."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from data.files import write_json, writing
from distill.live.arms import Arms
from distill.live.rollout.judgement import Served
from distill.run.verdict_record import Record

STATE = "rollout.json"
Stage = Literal["starting", "comparing", "watching", "finishing", "returning", "done", "back"]
ENDS = ("done", "back")


class Engine(Record, frozen=False):
    """An engine. mark, pid, created: of the process that was started; no mark: it runs by itself."""

    url: str
    port: int
    mark: str = ""
    pid: int | None = None
    created: float | None = None


class Event(Record):
    """A stage that began; time: Unix seconds."""

    time: float
    stage: Stage
    text: str


class State(Record, frozen=False):
    """A rollout. log: the gateway's directory. share: of the new engine while compared. before: arms.json as it was found. before_engine:
    the one that an earlier rollout started. since: Unix seconds of the stage's beginning. old: what the old engine did while they were
    compared. reason: why it went on, or back. blames: whether going back says something of the draft.
    """

    version: str
    log: str
    stage: Stage
    share: float
    engine: Engine
    before: Arms
    before_engine: Engine | None = None
    since: float = 0.0
    old: Served = Field(default_factory=Served)
    reason: str = ""
    blames: bool = True
    events: list[Event] = Field(default_factory=list)


def read_state(drafts: Path) -> State | None:
    """The last rollout of a draft; None before the first.

    Raises:
        UserError: it cannot be read.
    """
    path = drafts / STATE
    return State.read(path, "see which engines run, then delete it") if path.exists() else None


def write_state(drafts: Path, state: State) -> None:
    """Writes it whole.

    Raises:
        UserError: the disk refuses.
    """
    with writing(drafts / STATE):
        write_json(drafts / STATE, state.model_dump())
