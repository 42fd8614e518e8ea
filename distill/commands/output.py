"""Checks of options and of the files that commands write."""

import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

from data.files import write_json, writing
from distill.run.lock import held_for
from speculative.errors import UserError


def check_known(option: str, value: str, known: Collection[str]) -> None:
    """Raise UserError if an option has an unknown value."""
    if value not in known:
        raise UserError(f"{option} {value}: choose one of {', '.join(one for one in known if one)}")


def numbers_of(option: str, text: str, kind: type, low: float, high: float, least: int = 1) -> list[Any]:
    """Distinct numbers of a list such as `1,4,16`, in the order given. Raises UserError."""
    try:
        values = list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        values = []
    if len(values) < least or not all(low <= value <= high for value in values):
        several = "two or more " if least > 1 else ""
        raise UserError(f"{option} {text}: give {several}numbers from {low:g} to {high:g}, with commas, e.g. 1,4")
    return values


def write_asked(option: str, path: Path | None, value: Any) -> None:
    """Write a value as JSON if the option is given. Raises UserError with the option and the file."""
    if path is not None:
        with writing(f"{option} {path}"), held_for(path):
            write_json(path, value)


def check_writable(option: str, path: Path | None) -> None:
    """Check before any work that a file can be written: not another kind of file, and not in a run that is in use.

    Makes its folder. None: the option is not given. Raises UserError with the option.
    """
    if path is None:
        return
    with writing(f"{option} {path}"), held_for(path):
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{option} {path}: exists and is not a regular file; give a file name")
        path.parent.mkdir(parents=True, exist_ok=True)
        trial = path.with_name(f".{path.name}.trial")
        trial.touch()
        trial.unlink()
