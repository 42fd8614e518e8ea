"""Train in a child process: output goes to a log, Ctrl-C reaches it once, and it can be found after its parent is killed."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from distill.config.layout import CHECKPOINTS, VERDICT
from distill.config.run import RunConfig
from distill.faults import Interrupted
from distill.run.launcher import SAFE_PATH
from speculative.errors import UserError
from speculative.progress import phase


class TrainingFailed(Exception):
    """A training ended without a verdict. The message is its last error line."""


def launcher_words(launcher: str) -> list[str]:
    """The words before `-m distill.train`; by default this Python. Raises UserError: no such program, or quotes that do not end."""
    try:
        words = shlex.split(launcher) or [sys.executable]
    except ValueError as error:
        raise UserError(f"--launcher {launcher}: {error}") from error
    if shutil.which(words[0]) is None:
        raise UserError(f"--launcher {launcher}: there is no program {words[0]}; give e.g. 'accelerate launch'")
    return words


def train_apart(
    config: RunConfig, arguments: Sequence[str], log: Path, command: Sequence[str], group: str = ""
) -> None:
    """Train a run to its verdict, continuing from its last state. If the config needs a stored signal, `respond` runs first.

    ``arguments``: of `distill.train`, that give this config. ``command``: the words before `-m distill.train`. ``group``: in wandb.

    Raises TrainingFailed: it ended before that. Interrupted: after Ctrl-C, when it has stopped.
    """
    if config.signal.source == "store" and not (config.folder / CHECKPOINTS).exists():
        child([*command, "-m", "distill.respond", *arguments], config.name, log, group)
    child([*command, "-m", "distill.train", *arguments], config.name, log, group)
    if not (config.folder / VERDICT).exists():
        raise TrainingFailed("ended without a verdict")


def child(words: Sequence[str], name: str, log: Path, group: str = "") -> None:
    """Run a command with its output in a log. Raises TrainingFailed and Interrupted, see `train_apart`."""
    note = log.with_suffix(".pid")
    with log.open("ab") as out:
        start = out.tell()
        # In its own session, so that Ctrl-C reaches it only through `_stop`, once, and it writes a checkpoint.
        child = subprocess.Popen(
            words,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={"WANDB_RUN_GROUP": group or name, **os.environ, **SAFE_PATH},
            start_new_session=True,
        )
        try:
            with contextlib.suppress(psutil.NoSuchProcess):
                note.write_text(json.dumps([child.pid, psutil.Process(child.pid).create_time()]), encoding="utf-8")
            with phase(f"{name}, its log is {log}"):
                status = child.wait()
        except KeyboardInterrupt:
            _stop(child)
            raise Interrupted(f"{name} has stopped; the same command continues it") from None
        finally:
            note.unlink(missing_ok=True)
    if status:
        raise TrainingFailed(error_line(log.read_bytes()[start:].decode(errors="replace"), status))


def running_twin(log: Path) -> psutil.Process | None:
    """A training that still writes this log after its parent was killed, or None. Two must not train in one folder."""
    try:
        number, created = json.loads(log.with_suffix(".pid").read_text(encoding="utf-8"))
        process = psutil.Process(number)
        alive = process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, psutil.Error):
        return None
    return process if alive else None


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Ask a training to stop. A second Ctrl-C makes it stop at once, a third one kills it."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        try:
            child.wait()
            return
        except KeyboardInterrupt:
            continue
    child.wait()


def error_line(output: str, status: int) -> str:
    """The error line of a run: Understudy's last message (with several ranks, the one the launcher repeats), else the last line."""
    lines = [line.strip().removeprefix("traceback : ") for line in output.splitlines() if line.strip()]
    if status < 0:
        return f"killed by signal {-status}" + (f" ({lines[-1][:200]})" if lines else "")
    ours = [line for line in lines if line.startswith("understudy:")]
    return (ours or lines or [f"exit status {status}"])[-1].removeprefix("understudy: ")[:400]


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C while waiting for a training."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
