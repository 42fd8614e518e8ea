"""Logs of traffic written by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.live.traffic.record import TrafficRecord, keyed_hash, prepare_directory, to_line

SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 16}


def record_of(number: int, **changes: Any) -> TrafficRecord:
    """A request that drafted 9 tokens in three steps; the ``number`` is its time."""
    values: dict[str, Any] = {
        "id": f"request-{number:04d}",
        "time": float(number),
        "slice": "code",
        "arm": "a",
        "draft_version": "v0001",
        "target_version": "target",
        "sampling": SAMPLING,
        "prompt_hash": keyed_hash(b"salt", "prompt", number),
        "prompt_ids": (5, 6, 20 + number),
        "response_ids": (7, 8, 9, 2),
        "accepted": number % 4,
        "drafted": 9,
        "blocks": 3,
        "first_token_s": 0.01,
        "total_s": 0.1,
        "finish": "stop",
        **changes,
    }
    for side in ("prompt", "response"):
        values.setdefault(f"{side}_tokens", 3 if values[f"{side}_ids"] is None else len(values[f"{side}_ids"]))
    return TrafficRecord(**values)


def write_log(directory: Path, *files: Sequence[TrafficRecord | bytes]) -> Path:
    """A log directory of these files; bytes are lines as they are."""
    prepare_directory(directory)
    for number, records in enumerate(files, start=1):
        lines = [one if isinstance(one, bytes) else to_line(one) for one in records]
        path = directory / f"log-{number:05d}.jsonl"
        path.write_bytes(b"".join(lines))
        path.chmod(0o600)
    return directory
