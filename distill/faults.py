"""Errors as one line and an exit status, for every program, so that mistakes of the user print no traceback."""

import contextlib
import errno
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import typer

from speculative.errors import UserError

MISTAKE, FAILED_CHECK, INTERRUPTED = 2, 1, 130
# Error texts of gloo and NCCL on a rank that lost another rank.
_DEAD_RANK = (
    "closed by peer",
    "reset by peer",
    "socket timeout",
    "timed out waiting",
    "remote process exited",
    "likely closed",
    "nccl",
)
# Seconds for trackers to send their last data when a run of several ranks fails.
TRACKER_SECONDS = 20.0
# transformers imports torchao if it is installed. On a CPU torchao warns at every start about libraries that only CUDA needs.
for _library in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_library).setLevel(logging.ERROR)
# Module -> extra of pyproject.toml that installs it.
EXTRAS = {
    "openai": "endpoint",
    "jiter": "endpoint",
    "prometheus_client": "endpoint",
    "starlette": "gateway",
    "uvicorn": "gateway",
    "h11": "gateway",
    "httpcore2": "gateway",
    "uvloop": "gateway",
    "torchao": "lowbit",
    "compressed_tensors": "quantize",
    "trl": "bench",
    "gguf": "gguf",
    "sentencepiece": "gguf",
}
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


class Interrupted(Exception):
    """The user ended a run. The message says what is kept."""


class Interrupt:
    """Ctrl-C or SIGTERM sets a flag that the loop reads between steps. The second signal stops at once."""

    def __init__(self) -> None:
        """Install the signal handlers until `restore`."""
        self.requested = False
        self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if os.environ.get("RANK", "0") == "0":
            launched = "; the launcher kills all processes after 30 s, and an unfinished judgement is made on resume"
            limit = launched if "TORCHELASTIC_RUN_ID" in os.environ else ""
            print(
                f"\nstopping after this step, with a checkpoint; press Ctrl-C again to stop at once{limit}",
                file=sys.stderr,
            )

    def restore(self) -> None:
        """Restore the earlier handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def explain(error: BaseException) -> tuple[str, int] | None:
    """(message, exit status) of an error that the user can fix; None for a bug, which keeps its traceback."""
    if isinstance(error, UserError):
        return f"understudy: {error}", MISTAKE
    if isinstance(error, Interrupted):
        return f"\ninterrupted: {error}", INTERRUPTED
    if isinstance(error, KeyboardInterrupt):
        return "\ninterrupted: finished work is kept; give the same command again to continue", INTERRUPTED
    if isinstance(error, ModuleNotFoundError) and (module := (error.name or "").partition(".")[0]) in EXTRAS:
        return f"understudy: {module} is not installed; `pip install 'understudy[{EXTRAS[module]}]'` brings it", MISTAKE
    # Imported late: `understudy --help` needs no torch.
    import torch

    from speculative.measure.self_checks import SelfCheckError

    if isinstance(error, SelfCheckError):
        return f"understudy: self-check failed: {error}", FAILED_CHECK
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, torch.OutOfMemoryError):
        message = (
            f"out of memory ({first}); lower train.micro_batch_size, loss.chunk_tokens, "
            "serving.batch_size or judge.batch_size and give the same command again (finished responses are kept)"
        )
    elif _is_dead_rank(error):
        message = (
            "another rank failed or cannot be reached, so this one stops; see the error of that rank or the system log "
            f"(out of memory?); the same command continues from the last checkpoint, also with another number of ranks ({first[:160]})"
        )
    elif isinstance(error, OSError) and error.errno in _DISK:
        message = f"{error.filename or 'what was being written'}: cannot be written ({error.strerror})"
    else:
        return None
    return f"understudy: {message}", MISTAKE


def _is_dead_rank(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _DEAD_RANK)


def exit_status(error: BaseException, trackers: Iterable[Any] = ()) -> int:
    """Print the one line of an error that the user can fix and return its exit status; raise any other error again.

    One of several ranks exits here, whatever the error. A normal exit of Python would wait for the process group, whose other
    ranks wait in a collective. `trackers`: Accelerate's, which are finished first.
    """
    explained = explain(error)
    distributed = sys.modules.get("torch.distributed")
    grouped = distributed is not None and distributed.is_initialized() and distributed.get_world_size() > 1
    if grouped or "TORCHELASTIC_ERROR_FILE" in os.environ:
        text, status = explained or ("".join(traceback.format_exception(error)).rstrip(), 1)
        _end_rank(text, status, trackers, witness=explained is not None and _is_dead_rank(error))
    _finish(trackers)
    if explained is None:
        raise error
    print(explained[0], file=sys.stderr)
    return explained[1]


def run_script(main: Callable[..., Any]) -> None:
    """Run a script of bench/, whose options are the parameters of `main`. Errors that the user can fix print one line."""
    try:
        typer.run(main)
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(exit_status(error))


def _end_rank(text: str, status: int, trackers: Iterable[Any], witness: bool) -> NoReturn:
    """Print the error and exit; the launcher ends the other ranks. `witness`: another rank failed first."""
    try:
        sys.stderr.write(text + "\n")  # One write: print writes the newline separately, and lines of ranks would mix.
        sys.stderr.flush()
        report = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if report and not witness:
            # torchrun prints a table at the end. It calls the earliest failure, in whole seconds, the root cause.
            record = json.dumps({"message": text, "timestamp": int(time.time()) - 1})
            with contextlib.suppress(OSError):  # The disk may be full.
                Path(report).write_text(record, encoding="utf-8")
        # Trackers talk to a server, so they get a time limit.
        finishing = threading.Thread(target=_finish, args=(trackers,), daemon=True)
        finishing.start()
        finishing.join(TRACKER_SECONDS)
        sys.stdout.flush()
    finally:
        os._exit(status)


def _finish(trackers: Iterable[Any]) -> None:
    for tracker in trackers:
        with contextlib.suppress(Exception):  # The error that ended the run matters more.
            tracker.finish()
