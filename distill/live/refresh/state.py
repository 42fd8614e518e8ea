"""The state of a refresh and its folder: numbered, locked, and found again after a kill."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from rich.console import Console

from data.files import locked, write_json, writing
from distill.live.alarm import Alarm, Reason
from distill.live.options import RefreshOptions
from distill.live.refresh.gate import Gate
from distill.live.refresh.reasons import Headroom, OwnText, Payback
from distill.live.traffic.export import Exported
from distill.live.versions import next_name, waiting_version
from speculative.errors import UserError
from speculative.measure.record import Record

STATE, LOCK = "refresh.json", ".refresh.lock"
Outcome = Literal["not needed", "refused the text", "kept the old one", "published"]
UNTRAINED: tuple[Outcome, ...] = ("not needed", "refused the text")  # nothing of these is kept for inspection


class Decision(Record):
    """Whether to train: because of the reasons, or forced."""

    refresh: bool
    forced: bool
    sentence: str


class Reasons(Record):
    """Reasons computed so far, in this order."""

    alarm: Alarm | None = None
    text: OwnText | None = None
    headroom: Headroom | None = None
    payback: Payback | None = None

    def missing(self) -> list[str]:
        """Names of computed reasons that do not hold."""
        return [name for name, found in self if isinstance(found, Reason) and not found.holds]


class State(Record, frozen=False):
    """State of a refresh. home: the run of the served version. parent: that version; version: the new one. asked: the options in ASKED.
    window: the exported traffic. Stages not reached are null.
    """

    FORMAT = 2
    format: int
    kind: str
    run: str
    home: str
    traffic: str
    drafts: str
    parent: str
    version: str
    asked: dict[str, Any]
    started: str
    reasons: Reasons = Field(default_factory=Reasons)
    window: Exported | None = None
    decision: Decision | None = None
    gate: Gate | None = None
    published: str | None = None
    outcome: Outcome | None = None

    def write(self, folder: Path) -> None:
        """Write refresh.json atomically. Raises UserError if that fails."""
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / STATE, self.record())


def read_state(folder: Path) -> State | None:
    """The state in refresh.json; None if there is none. Raises UserError if it is damaged."""
    path = folder / STATE
    return State.read(path, f"delete {folder} to start again") if path.exists() else None


def _outcome(folder: Path) -> str | None:
    """The outcome of a refresh, in any format version; None if unfinished or unreadable."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return json.loads((folder / STATE).read_text(encoding="utf-8")).get("outcome")
    return None


@contextlib.contextmanager
def refresh_folder(
    options: RefreshOptions, stem: Path, drafts: Path, version: str, console: Console
) -> Iterator[Path | None]:
    """The locked folder of this refresh: an unfinished one, a new one, or a temporary one for a dry run. None if a version waits for its
    rollout. ``stem``: its path without the new version's name. Raises UserError: another refresh is running there, or the unfinished one
    belongs to another version than the served one.
    """
    if options.dry_run:
        with tempfile.TemporaryDirectory(prefix="understudy-refresh-") as passing:
            yield Path(passing) / f"{stem.name}{next_name(drafts)}"
        return
    found = {path: _outcome(path) for path in sorted(stem.parent.glob(f"{stem.name}v*")) if path.is_dir()}
    left = [path for path, outcome in found.items() if outcome is None]
    waiting = waiting_version(drafts)
    if not left and waiting is not None and not options.force:
        words = "is waiting for its rollout; --approve makes it current, --force makes another version"
        console.print(f"{waiting.folder} {words}", highlight=False, markup=False, soft_wrap=True)
        yield None
        return
    folder = left[0] if left else _new_folder(stem, next_name(drafts), found)
    state = read_state(folder) if left else None
    if state is not None and version not in (state.parent, state.version):
        raise UserError(
            f"{folder}: an unfinished refresh of {state.parent}, but {version} is served now; delete the folder"
        )
    with locked(folder / LOCK, f"{folder}: another refresh is running there; wait for it"):
        yield folder


def _new_folder(stem: Path, name: str, found: dict[Path, str | None]) -> Path:
    """The folder of the next free number; folders of refreshes that trained are kept for inspection."""
    number = int(name[1:])
    taken = {path for path, outcome in found.items() if outcome not in UNTRAINED}
    while (folder := stem.with_name(f"{stem.name}v{number:04d}")) in taken:
        number += 1
    if folder in found:
        shutil.rmtree(folder)
    return folder
