"""A training in a process of its own: its output goes to a log, Ctrl-C reaches it once, and it is known to whoever comes after a kill."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from distill.config.layout import CHECKPOINTS, VERDICT
from distill.config.run import RunConfig
from distill.faults import Interrupted
from distill.run.launcher import SAFE_PATH


class TrainingFailed(Exception):
    """A run that ended without a verdict; the message is its last error line."""


def train_apart(
    config: RunConfig, arguments: Sequence[str], log: Path, command: Sequence[str], group: str = ""
) -> None:
    """Takes a run to its verdict, from where it stands; the target answers first where the config wants a stored signal.

    Args:
        arguments: of `distill.train`, which make this config.
        command: what stands before `-m distill.train`.
        group: of the run in wandb.

    Raises:
        TrainingFailed: it ended without a verdict. Interrupted: Ctrl-C, when it has stopped.
    """
    if config.signal.source in ("store", "response_logprobs") and not (config.folder / CHECKPOINTS).exists():
        _child([*command, "-m", "distill.respond", *arguments], config.name, log, group)
    _child([*command, "-m", "distill.train", *arguments], config.name, log, group)
    if not (config.folder / VERDICT).exists():
        raise TrainingFailed("ended without a verdict")


def _child(words: Sequence[str], name: str, log: Path, group: str) -> None:
    note = log.with_suffix(".pid")
    with log.open("ab") as out:
        start = out.tell()
        # A session of its own: Ctrl-C reaches it through us, once, and it writes its checkpoint.
        child = subprocess.Popen(
            words, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={"WANDB_RUN_GROUP": group or name, **os.environ, **SAFE_PATH}, start_new_session=True,
        )  # fmt: skip
        try:
            with contextlib.suppress(psutil.NoSuchProcess):
                note.write_text(json.dumps([child.pid, psutil.Process(child.pid).create_time()]), encoding="utf-8")
            status = child.wait()
        except KeyboardInterrupt:
            _stop(child)
            raise Interrupted(f"{name} has stopped; the same command goes on with it") from None
        finally:
            note.unlink(missing_ok=True)
    if status:
        raise TrainingFailed(error_line(log.read_bytes()[start:].decode(errors="replace"), status))


def running_twin(log: Path) -> psutil.Process | None:
    """The training that writes this log and that whoever started it has left behind, by kill -9: two must not train in one folder."""
    try:
        number, created = json.loads(log.with_suffix(".pid").read_text(encoding="utf-8"))
        process = psutil.Process(number)
        alive = process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, psutil.Error):
        return None
    return process if alive else None


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Asks a training to stop; a second Ctrl-C asks again (it then stops at once), a third one kills it."""
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
    """The line that says why a run ended: our own message (of several ranks' the one that their launcher ends with), else the last."""
    lines = [line.strip().removeprefix("traceback : ") for line in output.splitlines() if line.strip()]
    if status < 0:
        return f"killed by signal {-status}" + (f" ({lines[-1][:200]})" if lines else "")
    ours = [line for line in lines if line.startswith("understudy:")]
    return (ours or lines or [f"exit status {status}"])[-1].removeprefix("understudy: ")[:400]


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends what waits for a training as Ctrl-C does."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
