"""Processes that are found again behind a kill, by a mark in their environment, which all that they start has too."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_TOLD = 200  # characters of a last line


def marked_environment(variable: str, mark: str) -> dict[str, str]:
    """The environment that marks a process."""
    # SPT_NOENV: setproctitle, by which vLLM names its workers, else writes over the environment that they are found by.
    return os.environ | {variable: mark, "SPT_NOENV": "1"}


def marked(variable: str, mark: str) -> Iterator[psutil.Process]:
    """The living processes with a mark; none for an empty one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if mark and process.environ().get(variable) == mark and alive(process):
                yield process


def alive(process: psutil.Process) -> bool:
    """Whether it runs: one that has ended and is not yet waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def last_line(log: Path) -> str:
    """What a program printed last; empty where it printed nothing."""
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip()[-_TOLD:] for line in reversed(lines) if line.strip()), "")
    return ""
