"""Files that one rank has written, seen by the others: network disks show new files, and new content of old ones, late."""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from speculative.errors import UserError

PATIENCE = 60.0  # seconds; NFS remembers what a folder held for 3 to 60


def await_seen(seen: Callable[[], bool], path: Path) -> None:
    """Returns when this rank sees what another one has written; at once where there is no other.

    Raises:
        UserError: not within a minute; ``path`` is named.
    """
    deadline = time.monotonic() + PATIENCE
    while PartialState().num_processes > 1 and not seen():
        if time.monotonic() > deadline:
            raise UserError(
                f"{path}: what another rank has written there does not show here after {PATIENCE:g} s; "
                "set output to a folder on a disk that all machines share"
            )
        time.sleep(0.1)


def await_written(path: Path) -> None:
    """All ranks call it behind the main process's write: returns when this one reads the same bytes.

    Raises:
        UserError: not within a minute.
    """
    if PartialState().num_processes > 1:
        (written,) = broadcast_object_list([_digest(path) if PartialState().is_main_process else None])
        await_seen(lambda: _digest(path) == written, path)


def _digest(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return None
