"""Where a rollout stands, so that one that was killed goes on: drafts/NAME/rollout.json."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from data.files import write_json, writing
from distill.live.rollout.anytime import Sums
from distill.live.rollout.judgement import Served
from speculative.errors import UserError

STATE = "rollout.json"
Stage = Literal["starting", "comparing", "watching", "finishing", "returning", "done", "back"]
ENDS = ("done", "back")


@dataclass
class State:
    """A rollout. log: the gateway's directory. share: of the new engine while compared. before: arms.json as it was found. mark, pid,
    created: of the engine that was started; no mark: it runs by itself. before_engine: {url, port, mark, pid, created} of the one that
    an earlier rollout started. since: Unix seconds of the stage's beginning. old: what the old engine did while they were compared.
    reason: why it went on, or back. blames: whether going back says something of the draft. events: {time, stage, text} of each stage.
    """

    version: str
    log: str
    stage: Stage
    share: float
    url: str
    port: int
    before: dict[str, Any]
    mark: str = ""
    pid: int | None = None
    created: float | None = None
    before_engine: dict[str, Any] | None = None
    since: float = 0.0
    old: Served = field(default_factory=Served)
    reason: str = ""
    blames: bool = True
    events: list[dict[str, Any]] = field(default_factory=list)


def read_state(drafts: Path) -> State | None:
    """The last rollout of a draft; None before the first.

    Raises:
        UserError: it cannot be read.
    """
    path = drafts / STATE
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        old = values.pop("old")
        served = Served(**old | {name: Sums(**old[name]) for name in ("acceptance", "latency")})
        return State(**values, old=served)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); see which engines run, then delete it") from error


def write_state(drafts: Path, state: State) -> None:
    """Writes it whole.

    Raises:
        UserError: the disk refuses.
    """
    values = dataclasses.asdict(state)
    for name in ("acceptance", "latency"):
        values["old"][name] = {key: float(value) for key, value in values["old"][name].items()}
    with writing(drafts / STATE):
        write_json(drafts / STATE, values)
