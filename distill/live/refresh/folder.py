"""The folder of a refresh: numbered, locked, found again after a kill."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from data.files import locked
from distill.config.run import RunConfig
from distill.live.refresh.options import RefreshOptions
from distill.live.versions import next_name, waiting_version
from speculative.errors import UserError

STATE, LOCK = "refresh.json", ".refresh.lock"
NOT_NEEDED, REFUSED = "not needed", "refused the text"
UNTRAINED = (NOT_NEEDED, REFUSED)  # outcomes of which nothing is left that would be looked at


@contextlib.contextmanager
def refresh_folder(
    options: RefreshOptions, config: RunConfig, drafts: Path, version: str, console: Console
) -> Iterator[Path | None]:
    """The folder of this refresh, locked: the one that a kill has left, or a new one; of a dry run one that vanishes.

    None: a version waits for its rollout.

    Raises:
        UserError: another refresh is at work there, or what was left is of another version than is served.
    """
    stem = options.run.parent / f"{config.name}-refresh-"
    if options.dry_run:
        with tempfile.TemporaryDirectory(prefix="understudy-refresh-") as passing:
            yield Path(passing) / f"{stem.name}{next_name(drafts)}"
        return
    found = {path: read_state(path) for path in sorted(stem.parent.glob(f"{stem.name}v*")) if path.is_dir()}
    left = [path for path, state in found.items() if state.get("outcome") is None]
    waiting = waiting_version(drafts)
    if not left and waiting is not None and not options.force:
        words = "waits for its rollout; --approve makes it current, --force makes another version"
        console.print(f"{waiting.folder} {words}", highlight=False, markup=False, soft_wrap=True)
        yield None
        return
    folder = left[0] if left else _new_folder(stem, next_name(drafts), found)
    state = found[folder] if left else {}
    if state and version not in (state["parent"], state["version"]):
        raise UserError(
            f"{folder}: a refresh of {state['parent']} that did not end, and {version} is served now; delete it"
        )
    with locked(folder / LOCK, f"{folder}: another refresh is at work there; wait for it"):
        yield folder


def _new_folder(stem: Path, name: str, found: dict[Path, dict[str, Any]]) -> Path:
    """That of the next number; behind one that trained in vain, which stays to be looked at."""
    number = int(name[1:])
    taken = {path for path, state in found.items() if state["outcome"] not in UNTRAINED}
    while (folder := stem.with_name(f"{stem.name}v{number:04d}")) in taken:
        number += 1
    if folder in found:
        shutil.rmtree(folder)
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """What refresh.json holds; nothing where there is none yet.

    Raises:
        UserError: damaged.
    """
    path = folder / STATE
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); delete {folder} to start again") from error
