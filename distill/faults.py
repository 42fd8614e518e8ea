"""What went wrong, as one line and an exit status: for every program of ours, so that none ends in a traceback needlessly."""

import contextlib
import errno
import json
import logging
import os
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
# What gloo and NCCL say on a rank whose neighbour is gone.
_DEAD_RANK = (
    "closed by peer",
    "reset by peer",
    "socket timeout",
    "timed out waiting",
    "remote process exited",
    "likely closed",
    "nccl",
)
# Seconds that trackers have to send what they hold when a run of several ranks fails.
TRACKER_SECONDS = 20.0
# transformers imports torchao where it is installed, which on a CPU warns at every start of what only CUDA needs.
for _library in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_library).setLevel(logging.ERROR)
# Module: the extra of pyproject.toml that brings it.
EXTRAS = {
    "openai": "endpoint", "jiter": "endpoint", "prometheus_client": "endpoint",
    "starlette": "gateway", "uvicorn": "gateway", "h11": "gateway", "uvloop": "gateway",
    "torchao": "lowbit", "compressed_tensors": "quantize", "trl": "bench",
}  # fmt: skip
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


class Interrupted(Exception):
    """The user ended a run; the message says what is left of it."""


def explain(error: BaseException) -> tuple[str, int] | None:
    """(message, exit status) of a fault that a person can mend; None for a fault of ours, which keeps its traceback."""
    if isinstance(error, UserError):
        return f"understudy: {error}", MISTAKE
    if isinstance(error, Interrupted):
        return f"\ninterrupted: {error}", INTERRUPTED
    if isinstance(error, KeyboardInterrupt):
        return "\ninterrupted: what was written stays; the same command goes on from it", INTERRUPTED
    if isinstance(error, ModuleNotFoundError) and (module := (error.name or "").partition(".")[0]) in EXTRAS:
        return f"understudy: {module} is not installed; `pip install 'understudy[{EXTRAS[module]}]'` brings it", MISTAKE
    # Only here: `understudy --help` needs no torch.
    import torch

    from speculative.measure.self_checks import SelfCheckError

    if isinstance(error, SelfCheckError):
        return f"understudy: self-check failed, nothing was measured: {error}", FAILED_CHECK
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"understudy: out of memory ({str(error).splitlines()[0]}); lower train.micro_batch_size, loss.chunk_tokens, "
            "serving.batch_size or judge.batch_size and start again (responses and their shards are kept)",
            MISTAKE,
        )
    if _is_dead_rank(error):
        return (
            "understudy: another rank died or cannot be reached, so this one stops; the other's own message or the system's log "
            "(out of memory?) says why; the same command goes on from the last checkpoint, also on another number of ranks "
            f"({str(error).splitlines()[0][:160]})",
            MISTAKE,
        )
    if isinstance(error, OSError) and error.errno in _DISK:
        return (
            f"understudy: {error.filename or 'what was being written'}: cannot be written ({error.strerror})",
            MISTAKE,
        )
    return None


def _is_dead_rank(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _DEAD_RANK)


def exit_status(error: BaseException, trackers: Iterable[Any] = ()) -> int:
    """Prints the one line of a fault that a person can mend and returns its exit status; raises any other again.

    One of several ranks ends here, whatever the fault: Python's own way out would wait for the process group, whose other ranks
    sit in a collective. `trackers`: Accelerate's, which are finished first.
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
    """Runs a script of bench/, whose options are the parameters of `main`; a fault that a person can mend is one line."""
    try:
        typer.run(main)
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(exit_status(error))


def _end_rank(text: str, status: int, trackers: Iterable[Any], witness: bool) -> NoReturn:
    """Says why and leaves, for the launcher to end the other ranks. `witness`: another rank was the first to fail."""
    try:
        sys.stderr.write(text + "\n")  # in one piece: print would leave its newline to mix with another rank's line
        sys.stderr.flush()
        report = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if report and not witness:
            # torchrun ends with a table of its own, and calls the first failure in it, by whole seconds, the root cause.
            told = json.dumps({"message": text, "timestamp": int(time.time()) - 1})
            with contextlib.suppress(OSError):  # the disk may be what is full
                Path(report).write_text(told, encoding="utf-8")
        # They talk to a server.
        finishing = threading.Thread(target=_finish, args=(trackers,), daemon=True)
        finishing.start()
        finishing.join(TRACKER_SECONDS)
        sys.stdout.flush()
    finally:
        os._exit(status)


def _finish(trackers: Iterable[Any]) -> None:
    for tracker in trackers:
        with contextlib.suppress(Exception):  # the fault that ends the run is the one to tell
            tracker.finish()
