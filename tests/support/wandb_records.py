"""What an offline wandb run wrote."""

from pathlib import Path
from typing import Any


def records_of(path: Path) -> list[Any]:
    """The records in a .wandb file: blocks of 32 KiB of chunks (checksum 4, length 2, kind 1, bytes) behind 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, joined, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        chunk = data[position + 7 : position + 7 + length]
        if kind == 0 or len(chunk) < length:
            break
        position += 7 + length
        joined = chunk if kind in (1, 2) else joined + chunk  # whole or first; middle or last
        if kind in (1, 4):
            records.append(Record.FromString(joined))
    return records
