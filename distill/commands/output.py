"""Where a command may write, and what it says of a disk that refuses."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speculative.errors import UserError

PICTURES = (".svg", ".png")


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """A disk that refuses a file is a UserError that names the option and the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written ({error.strerror or error})") from error


def check_writable(option: str, path: Path) -> None:
    """Refuse a place that cannot be written, or that is something else than a file, before any work is done.

    Makes the folder it is in. Raises UserError naming the option.
    """
    with writing(option, path):
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{option} {path}: is there and is not an ordinary file; give a file name")
        path.parent.mkdir(parents=True, exist_ok=True)
        trial = path.with_name(f".{path.name}.trial")
        trial.touch()
        trial.unlink()


def check_plot(path: Path) -> None:
    """`check_writable` of --plot, whose name must say which picture it is. Raises UserError."""
    if path.suffix.lower() not in PICTURES:
        raise UserError(f"--plot {path}: its name must end in {' or '.join(PICTURES)}")
    check_writable("--plot", path)
