"""Which model a server has, beyond its name: what it would say next after fixed texts, kept beside the responses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.files import write_json
from speculative.errors import UserError

# Each leaves open what follows, so that another model, or the same one trained further, thinks otherwise of it.
TEXTS = ("The most important thing about", "def process(data):\n    ", "Q: What should I do next?\nA:")
TOP = 5
# Nats, mean over the top tokens of all texts. Logits in bfloat16 are known to about 0.06; not measured on real servers.
NOISE = 0.15

Says = Sequence[Mapping[str, float]]


def difference(before: Says, now: Says) -> float:
    """Nats between two servers' log-probabilities of the next token, {token: log_prob} of each text; mean over all tokens named.

    A token that one of them does not name is as likely there as its least likely at most, so it may have lost no more than that.
    """
    gaps = []
    for old, new in zip(before, now, strict=True):
        for token in {**old, **new} if old and new else ():
            said, other = (old, new) if token in old else (new, old)
            gaps.append(
                abs(said[token] - other[token]) if token in other else max(0.0, said[token] - min(other.values()))
            )
    return sum(gaps) / max(len(gaps), 1)


def recognise(path: Path, now: dict[str, Any], url: str) -> None:
    """Writes down which model answers, or refuses another than the one that answered before.

    Args:
        path: the record.
        now: {model, root, next: `Says`}; `root` is where the server says that it found the weights.
        url: of the server, for the message.

    Raises:
        UserError: another model; a record that cannot be read or written.
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
        f"{url}: {is_} is not the model that answered before ({was}): after fixed texts its log-probabilities are {apart:.2f} "
        f"nats away, {NOISE} would be noise; serve that one, or give the run another name ({path} is its record)"
    )
