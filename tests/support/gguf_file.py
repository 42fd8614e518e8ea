"""Write small GGUF files, as `llama_cpp.cpp` reads them, from the format's description: header, metadata, tensor shapes, no weights."""

import struct
from pathlib import Path
from typing import Any


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_of(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))


def write_gguf(path: Path, metadata: dict[str, Any], shapes: dict[str, list[int]]) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(metadata))
    entries = b"".join(text(key) + value_of(value) for key, value in metadata.items())
    tensors = b"".join(
        text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, 0) for name, sizes in shapes.items()
    )
    path.write_bytes(head + entries + tensors)
    return path
