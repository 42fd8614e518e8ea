"""The state of a refresh and its folder: numbered, locked, and found again after a kill."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from rich.console import Console

from data.files import locked
from distill.live.alarm import Alarm, Reason
from distill.live.options import RefreshOptions
from distill.live.refresh.gate import Gate
from distill.live.refresh.reasons import Headroom, OwnText, Payback
from distill.live.stages import Stages
from distill.live.traffic.export import Exported
from distill.live.versions import next_name, waiting_version
from speculative.errors import UserError
from speculative.measure.record import Record

LOCK = ".refresh.lock"
NOT_NEEDED, REFUSED, KEPT, PUBLISHED = "not needed", "refused the text", "kept the old one", "published"
STATUS = {NOT_NEEDED: 0, REFUSED: 1, KEPT: 1, PUBLISHED: 0}  # exit status by last stage
UNTRAINED = (NOT_NEEDED, REFUSED)  # nothing of these is left for inspection


class Reasons(Record):
    """Reasons computed so far, in this order."""

    alarm: Alarm | None = None
    text: OwnText | None = None
    headroom: Headroom | None = None
    payback: Payback | None = None

    def missing(self) -> list[str]:
        """Names of computed reasons that do not hold."""
        return [name for name, found in self if isinstance(found, Reason) and not found.holds]


class State(Stages):
    """State of a refresh. home: the run of the served version. parent: that version; version: the new one. options: those that must stay
    the same. window: the exported traffic. Results of stages not reached are null.
    """

    FILE: ClassVar[str] = "refresh.json"
    REMEDY: ClassVar[str] = "delete {folder} to start again"
    home: str
    parent: str
    version: str
    options: dict[str, Any]
    reasons: Reasons = Field(default_factory=Reasons)
    window: Exported | None = None
    gate: Gate | None = None
    published: str | None = None


def _last_stage(folder: Path) -> str | None:
    """The last stage of an ended refresh; None if unfinished or unreadable."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stage = json.loads((folder / State.FILE).read_text(encoding="utf-8")).get("stage")
        return stage if stage in STATUS else None
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
    last = {path: _last_stage(path) for path in sorted(stem.parent.glob(f"{stem.name}v*")) if path.is_dir()}
    left = [path for path, stage in last.items() if stage is None]
    waiting = waiting_version(drafts)
    if not left and waiting is not None and not options.force:
        words = "is waiting for its rollout; --approve makes it current, --force makes another version"
        console.print(f"{waiting.folder} {words}", highlight=False, markup=False, soft_wrap=True)
        yield None
        return
    folder = left[0] if left else _new_folder(stem, next_name(drafts), last)
    state = State.stored(folder) if left else None
    if state is not None and version not in (state.parent, state.version):
        raise UserError(
            f"{folder}: an unfinished refresh of {state.parent}, but {version} is served now; delete the folder"
        )
    with locked(folder / LOCK, f"{folder}: another refresh is running there; wait for it"):
        yield folder


def _new_folder(stem: Path, name: str, last: dict[Path, str | None]) -> Path:
    """The folder of the next free number; folders of refreshes that trained are left for inspection."""
    number = int(name[1:])
    taken = {path for path, stage in last.items() if stage not in UNTRAINED}
    while (folder := stem.with_name(f"{stem.name}v{number:04d}")) in taken:
        number += 1
    if folder in last:
        shutil.rmtree(folder)
    return folder
