"""What went wrong, as one line and an exit status: for every program of ours, so that none ends in a traceback needlessly."""

import errno

import torch

from speculative.errors import UserError
from speculative.self_checks import SelfCheckError

MISTAKE, FAILED_CHECK, INTERRUPTED = 2, 1, 130
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


class Interrupted(Exception):
    """The user ended a run; the message says what is left of it."""


def explain(error: BaseException) -> tuple[str, int] | None:
    """(message, exit status) of a fault that a person can mend; None for a fault of ours, which keeps its traceback."""
    if isinstance(error, UserError):
        return f"understudy: {error}", MISTAKE
    if isinstance(error, SelfCheckError):
        return f"understudy: self-check failed, nothing was measured: {error}", FAILED_CHECK
    if isinstance(error, Interrupted):
        return f"\ninterrupted: {error}", INTERRUPTED
    if isinstance(error, KeyboardInterrupt):
        kept = f"checkpoint {error} is written" if str(error) else "what was written stays"
        return f"\ninterrupted: {kept}; the same command goes on from it", INTERRUPTED
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"understudy: out of memory ({str(error).splitlines()[0]}); lower train.micro_batch_size, loss.chunk_tokens, "
            "serving.batch_size or judge.batch_size and start again (responses and their shards are kept)",
            MISTAKE,
        )
    if isinstance(error, OSError) and error.errno in _DISK:
        return (
            f"understudy: {error.filename or 'what was being written'}: cannot be written ({error.strerror})",
            MISTAKE,
        )
    return None
