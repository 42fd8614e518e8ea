"""Recognise the model of a server by its next-token probabilities: after fixed texts, or after prompts as local weights have them."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from data.files import write_json, writing
from speculative.errors import UserError
from speculative.measure.record import Record

# Each has many continuations, so that another model, or the same one after more training, has other probabilities.
TEXTS = ("The most important thing about", "def process(data):\n    ", "Q: What should I do next?\nA:")
TOP = 5
# Nats, mean over the top tokens of all texts. The error of bfloat16 logits is about 0.06; not measured on real servers.
NOISE = 0.15
# The same between local weights and a server of their precision: half, float32. Measured on a model of 8 M (mean, worst): bfloat16 in other
# kernels 0.004, 0.09; fp8 0.007, 0.10; int4 0.029, 0.72; float32 in other kernels 0.000, 0.00, against bfloat16 0.004, 0.06.
PRECISION = (0.02, 0.001)

_LOCK = threading.Lock()  # servers are looked at at the same time, and the first one sets the record
Says = Sequence[Mapping[str, float]]


class WrongServer(UserError):
    """A server that answers, but with another model, tokenizer or kind of probabilities."""


def difference(before: Says, now: Says) -> float:
    """Mean of `gaps`."""
    apart = gaps(before, now)
    return sum(apart) / max(len(apart), 1)


def gaps(before: Says, now: Says) -> list[float]:
    """Differences in nats between two models' next-token log-probabilities, {token: log_prob} for each text.

    A token that one model does not list is at most as probable there as its least probable listed token.
    """
    apart_by = []
    for old, new in zip(before, now, strict=True):
        for token in {**old, **new} if old and new else ():
            said, other = (old, new) if token in old else (new, old)
            apart = said[token] - other.get(token, min(other.values()))
            apart_by.append(abs(apart) if token in other else max(0.0, apart))
    return apart_by


class ServerIdentity(Record):
    """Which model answers. root: where the server says that it found the weights. next: after each of `TEXTS`."""

    REMEDY: ClassVar[str] = "delete it if the server has the same model as before"
    model: str
    root: str | None
    next: list[dict[str, float]]


def recognise(path: Path, now: ServerIdentity, url: str) -> None:
    """Record which model answers, or refuse another model than the one that answered before. ``path``: the record.

    Raises UserError: another model; a record that cannot be read or written.
    """
    with _LOCK:
        before = ServerIdentity.stored(path)
        if before is None:
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, now.record())
            return
    apart = difference(before.next, now.next)
    if before.model == now.model and apart <= NOISE:
        return
    was, is_ = (f"{one.model} from {one.root}" if one.root else one.model for one in (before, now))
    raise WrongServer(
        f"{url}: {is_} is not the model that answered before ({was}): after fixed texts its log-probabilities differ by {apart:.2f} "
        f"nats, above the noise of {NOISE}; serve the earlier model, or give the run another name (record: {path})"
    )
