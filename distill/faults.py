"""What went wrong, as one line and an exit status: for every program of ours, so that none ends in a traceback needlessly."""

import errno
import importlib.util
import sys
from pathlib import Path

from speculative.errors import UserError

MISTAKE, FAILED_CHECK, INTERRUPTED = 2, 1, 130
# What gloo and NCCL say on a rank whose neighbour is gone.
_DEAD_RANK = ("closed by peer", "reset by peer", "socket timeout", "timed out waiting", "remote process exited", "nccl")
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
    if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _DEAD_RANK):
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


def exit_status(error: BaseException) -> int:
    """Prints the one line of a fault that a person can mend and returns its exit status; raises any other again."""
    explained = explain(error)
    if explained is None:
        raise error
    print(explained[0], file=sys.stderr)
    return explained[1]


PACKAGES = ("data", "speculative", "distill")


def check_imports() -> None:
    """Our three packages must be siblings.

    Raises:
        UserError: one of them resolves to another place; it is named.
    """
    home = Path(__file__).resolve().parent.parent
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        found = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if found != home / package:
            raise UserError(
                f"`import {package}` finds {found or 'a folder without __init__.py'}, not ours beside {home / 'distill'}; "
                f"run from another directory or rename that {package}"
            )
