"""The modes of files, for a umask."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """This process's umask for a while."""
    earlier = os.umask(mask)
    try:
        yield
    finally:
        os.umask(earlier)


def other_modes(folder: Path, mask: int) -> list[str]:
    """What in a folder, itself included, has another mode than an ordinary writer under this umask gives."""
    wanted = {path: (0o777 if path.is_dir() else 0o666) & ~mask for path in (folder, *folder.rglob("*"))}
    return [str(path) for path, mode in wanted.items() if stat.S_IMODE(path.stat().st_mode) != mode]
