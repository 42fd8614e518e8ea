"""One process at a time writes into a run's folder."""

import contextlib
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from filelock import AcquireReturnProxy

from data.files import locked, write_bytes, writing
from distill.config.layout import CONFIG, HOLDER, LOCK, PROMPTS


def hold(folder: Path) -> AcquireReturnProxy:
    """Lock a run's folder until the end of a `with` or of the process; the folder is made if it is missing.

    A process may hold it several times. UserError: another process holds it (the message says which), or it cannot be written.
    """
    holder = "another process"
    with contextlib.suppress(OSError):
        holder = (folder / HOLDER).read_text(encoding="utf-8", errors="replace").strip()
    with writing(folder, "; write elsewhere, a run by output=FOLDER"):
        busy = f"{folder}: in use by {holder}; wait for it, end it, or write elsewhere"
        held = locked(folder / LOCK, busy, by_process=True)
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        command = " ".join(shlex.join(sys.orig_argv).split())
        holder = f"process {os.getpid()} on {socket.gethostname()} since {since}: {command}\n"
        write_bytes(folder / HOLDER, holder.encode(errors="replace"))
    return held


@contextlib.contextmanager
def held_for(path: Path) -> Iterator[None]:
    """Lock the run whose folder contains a path while it is written (see `hold`); a path outside of runs needs no lock."""
    with contextlib.ExitStack() as held:
        for folder in path.resolve().parents:
            if (folder / CONFIG).is_file() and (folder / PROMPTS).is_dir():
                held.enter_context(hold(folder))
        yield
