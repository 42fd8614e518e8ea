"""What stands for a full disk and for a kill within one process."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Killed(BaseException):
    """Stands for kill -9 inside one process: nothing in our code may catch it."""


def killed(*_: Any, **__: Any) -> None:
    raise Killed


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Every writer really fails when a file grows past this size, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
