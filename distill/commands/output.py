"""Where a command may write, and what it says of a disk that refuses."""

import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

from data.files import write_json, writing
from distill.run.lock import held_for
from speculative.errors import UserError

PICTURES = (".svg", ".png")


def check_known(option: str, value: str, known: Collection[str]) -> None:
    """Refuses a value that an option does not know. Raises UserError."""
    if value not in known:
        raise UserError(f"{option} {value}: one of {', '.join(one for one in known if one)}")


def write_asked(option: str, path: Path | None, value: Any) -> None:
    """Writes a value as JSON where an option asks for it. Raises UserError naming the option and the file."""
    if path is not None:
        with writing(f"{option} {path}"), held_for(path):
            write_json(path, value)


def check_writable(option: str, path: Path | None) -> None:
    """Refuse a place that cannot be written, that is something else than a file, or a run's that is in use, before any work is done.

    Makes the folder it is in. Raises UserError naming the option; None: it was not asked for.
    """
    if path is None:
        return
    with writing(f"{option} {path}"), held_for(path):
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{option} {path}: is there and is not an ordinary file; give a file name")
        path.parent.mkdir(parents=True, exist_ok=True)
        trial = path.with_name(f".{path.name}.trial")
        trial.touch()
        trial.unlink()


def check_plot(path: Path | None) -> None:
    """`check_writable` of --plot, whose name must say which picture it is. Raises UserError."""
    if path is not None and path.suffix.lower() not in PICTURES:
        raise UserError(f"--plot {path}: its name must end in {' or '.join(PICTURES)}")
    check_writable("--plot", path)
