"""The engine that a rollout starts. It keeps running after the rollout, and is found again after a kill by a mark in its environment,
which its children inherit.
"""

import contextlib
import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from data.responses.engine_http import page_at
from speculative.errors import UserError

# In the engine's environment, so that the next rollout finds the engine, however this one ended.
MARK = "UNDERSTUDY_ROLLOUT"
GRACE_SECONDS = 15.0  # for an engine to exit after SIGTERM
POLL_SECONDS = 0.5
_TOKEN_TIMEOUT = 30.0
_LINE = 200  # characters of a last line


@dataclass(frozen=True)
class Engine:
    """An engine. mark: in the environment of the started process; empty: not started by a rollout."""

    url: str
    port: int
    mark: str = ""


def marked_environment(variable: str, mark: str) -> dict[str, str]:
    # SPT_NOENV: without it, setproctitle in an engine's workers overwrites the environment that holds the mark.
    return os.environ | {variable: mark, "SPT_NOENV": "1"}


def marked(variable: str, mark: str) -> Iterator[psutil.Process]:
    """The living processes with a mark; none for an empty one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if mark and process.environ().get(variable) == mark and alive(process):
                yield process


def alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def last_line(log: Path) -> str:
    """The last line of a log; empty if there is none."""
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip()[-_LINE:] for line in reversed(lines) if line.strip()), "")
    return ""


def engine_words(command: str, draft: Path, port: int) -> list[str]:
    """The words of --engine-command, which may hold JSON: only {draft} and {port} are replaced. Raises UserError: no command, or one
    without these.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"--engine-command {command}: {error}") from error
    for place in ("{draft}", "{port}"):
        if not any(place in word for word in words):
            raise UserError(f"--engine-command {command or 'is empty'}: it must contain {place}")
    return [word.replace("{draft}", str(draft)).replace("{port}", str(port)) for word in words]


def start_engine(engine: Engine, words: list[str], log: Path) -> psutil.Process:
    """Start an engine in its own session. Raises UserError if the program does not exist."""
    try:
        with log.open("ab") as out:
            return psutil.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=marked_environment(MARK, engine.mark),
            )
    except OSError as error:
        raise UserError(f"--engine-command {words[0]}: cannot be started ({error.strerror})") from error


def find_engine(engine: Engine) -> psutil.Process | None:
    """The running process of an engine; None if it ended or was never started. Its children have the mark too, but it leads the session."""
    return next((process for process in marked(MARK, engine.mark) if os.getsid(process.pid) == process.pid), None)


def stop_engine(engine: Engine, drain: float) -> None:
    """Stop an engine and its children, also of one that exited by itself, after its last connection closes or after ``drain`` seconds."""
    if (process := find_engine(engine)) is not None:
        _until(lambda: not alive(process) or not _connected(process, engine.port), drain)
        with contextlib.suppress(psutil.Error):
            process.terminate()
        _until(lambda: not alive(process), GRACE_SECONDS)
    left = list(marked(MARK, engine.mark))
    for child in left:
        with contextlib.suppress(psutil.Error):
            child.kill()
    _until(lambda: not any(map(alive, left)), GRACE_SECONDS)


def _until(over: Callable[[], bool], seconds: float) -> None:
    # Not psutil's wait: in a container, ended processes may never be reaped.
    deadline = time.monotonic() + seconds
    while not over() and time.monotonic() < deadline:
        time.sleep(min(POLL_SECONDS, 0.1))


def _connected(process: psutil.Process, port: int) -> bool:
    """Whether a client is connected to the port of the engine or its children."""
    with contextlib.suppress(psutil.Error):
        family = [process, *process.children(recursive=True)]
        return any(
            link.laddr and link.laddr.port == port and link.status == psutil.CONN_ESTABLISHED
            for one in family
            for link in one.net_connections("tcp")
        )
    return False


def generates(url: str) -> bool:
    """Whether an engine answers a request for one token, even with an error. An engine can be healthy and still hang."""
    words = {"model": min(models(url), default=""), "prompt": "a", "max_tokens": 1}
    return page_at(f"{url}/v1/completions", body=words, direct=True, seconds=_TOKEN_TIMEOUT) is not None


def models(url: str) -> set[str]:
    """Names of the models that an engine serves; empty if it does not list them."""
    page = page_at(f"{url}/v1/models", direct=True)
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
        return {str(model["id"]) for model in json.loads(page.text if page else "")["data"]}
    return set()
