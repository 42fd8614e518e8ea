"""A run's relative paths start at the folder where the run began, in whatever folder a later command is given."""

import contextlib
import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distill.config.layout import BEGAN

PATH_KEYS = ("path", "served", "output")


def origin_of(run: Path) -> Path | None:
    """The folder where a run began; None for a run that is not there."""
    with contextlib.suppress(OSError, ValueError):
        return (run.resolve() / (run / BEGAN).read_text(encoding="utf-8").strip()).resolve()
    return None


def remember_origin(run: Path) -> None:
    """Write the working directory into a new run, relative to the run so that both can be moved together."""
    if not (run / BEGAN).exists():
        (run / BEGAN).write_text(os.path.relpath(Path.cwd(), run.resolve()) + "\n", encoding="utf-8")


def anchored(tree: Any, run: Path) -> Any:
    """A config's plain values with the relative paths that exist where the run began; unchanged in that folder itself."""
    origin = origin_of(run)
    if origin is None or origin == Path.cwd().resolve():
        return tree

    def place(key: str, text: str) -> str:
        if key not in PATH_KEYS or text in ("embedded", "stdlib"):
            return text
        there = os.path.join(origin, text)
        return there if os.path.exists(there) or glob.glob(there) else text

    return _mapped(tree, place)


def spelled(tree: Any, run: Path) -> Any:
    """Plain values with each path below the folder where the run began relative to it, as the run's first config has them."""
    start = f"{origin_of(run)}/"
    return _mapped(tree, lambda _, text: text.removeprefix(start))


def _mapped(value: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _mapped(inner, change, name) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(inner, change, key) for inner in value]
    return change(key, value) if isinstance(value, str) else value
