"""Check the destination of an export, and create the directory atomically."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from data.files import open_modes
from distill.config.layout import SERVING_FILE, SERVING_FORMAT
from distill.engines.protocol.verdict import check_directory_name
from distill.run.lock import held_for
from speculative.errors import UserError
from speculative.measure.record import Record


def check_destination(to: str | Path, *, sources: list[Path], overwrite: bool = False) -> Path:
    """Return the absolute path to export to.

    Args:
        to: the requested directory, which need not exist.
        sources: directories that the export reads (checkpoint, base, target). They are never overwritten.
        overwrite: allow replacing an earlier export. It is recognised by its serving.json and must contain only the
            files listed there, so that no other work is deleted.

    Raises UserError: for '/', the home directory, a file, a directory that is not empty, a path that overlaps a source, or a path for
    which an engine would select another method.
    """
    path = Path(to).expanduser().resolve()
    check_directory_name(path)
    if path == Path(path.anchor) or path == Path.home().resolve():
        raise UserError(f"export directory {path}: it is the root or home directory; choose a new directory")
    for source in (source.resolve() for source in sources):
        if path == source or path.is_relative_to(source) or source.is_relative_to(path):
            raise UserError(f"export directory {path}: it overlaps {source}, which is read; choose another directory")
    if path.is_file():
        raise UserError(f"export directory {path}: it is a file; choose a directory")
    if path.is_dir() and any(path.iterdir()):
        _check_replaceable(path, overwrite)
    return path


@contextmanager
def appearing_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path` to write in. Rename it to `path` at the end; remove it on any exception.

    An existing `path` is moved aside first and deleted only after the new directory is in place.
    """
    with held_for(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        working = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.partial-"))
        try:
            yield working
            open_modes(working)  # a server often runs as another user
            _swap(working, path)
        finally:
            shutil.rmtree(working, ignore_errors=True)


def _swap(working: Path, path: Path) -> None:
    if not path.exists():
        os.rename(working, path)
        return
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.previous-"))
    os.rename(path, aside)
    try:
        os.rename(working, path)
    except OSError:
        os.rename(aside, path)
        raise
    shutil.rmtree(aside)


def _check_replaceable(path: Path, overwrite: bool) -> None:
    serving: dict[str, Any] = {}
    with suppress(UserError):
        serving = Record.read(path / SERVING_FILE).record()
    if serving.get("format") != SERVING_FORMAT:
        raise UserError(f"export directory {path}: it is not empty and not an earlier export; choose a new directory")
    if not overwrite:
        raise UserError(f"export directory {path}: it has an earlier export; pass --overwrite or choose another")
    foreign = sorted({entry.name for entry in path.iterdir()} - {str(name) for name in serving.get("files", [])})
    if foreign:
        raise UserError(f"export directory {path}: {foreign[0]!r} in it is not part of an earlier export; move it away")
