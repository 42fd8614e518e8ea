"""Recognise the model of a server by its next-token probabilities after fixed texts, which are stored with the responses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.files import write_json
from speculative.errors import UserError

# Each has many continuations, so that another model, or the same one after more training, has other probabilities.
TEXTS = ("The most important thing about", "def process(data):\n    ", "Q: What should I do next?\nA:")
TOP = 5
# Nats, mean over the top tokens of all texts. The error of bfloat16 logits is about 0.06; not measured on real servers.
NOISE = 0.15

Says = Sequence[Mapping[str, float]]


def difference(before: Says, now: Says) -> float:
    """Mean difference in nats between two servers' next-token log-probabilities, {token: log_prob} for each text.

    A token that one server does not list is at most as probable there as its least probable listed token.
    """
    gaps = []
    for old, new in zip(before, now, strict=True):
        for token in {**old, **new} if old and new else ():
            said, other = (old, new) if token in old else (new, old)
            apart = said[token] - other.get(token, min(other.values()))
            gaps.append(abs(apart) if token in other else max(0.0, apart))
    return sum(gaps) / max(len(gaps), 1)


def recognise(path: Path, now: dict[str, Any], url: str) -> None:
    """Record which model answers, or refuse another model than the one that answered before.

    ``path``: the record. ``now``: {model, root, next: `Says`}; `root` is where the server says that it found the weights.

    Raises UserError: another model; a record that cannot be read or written.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, now)
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        apart = difference(before["next"], now["next"])
    except OSError as error:
        raise UserError(f"{path}: cannot be read or written ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: damaged; delete it if the server has the same model as before") from error
    if before["model"] == now["model"] and apart <= NOISE:
        return
    was, is_ = (f"{one['model']} from {one['root']}" if one["root"] else one["model"] for one in (before, now))
    raise UserError(
        f"{url}: {is_} is not the model that answered before ({was}): after fixed texts its log-probabilities differ by {apart:.2f} "
        f"nats, above the noise of {NOISE}; serve the earlier model, or give the run another name (record: {path})"
    )
