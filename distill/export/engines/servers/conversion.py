"""Convert a model once for each state of its files. It runs in the environments of engines, so it needs only the standard library."""

import json
from collections.abc import Callable
from pathlib import Path


def convert_once(model: str, made: Path, record: Path, convert: Callable[[], object]) -> None:
    """Call ``convert`` unless ``made`` is there and ``record`` says that it was made from the same files."""
    files = [one.stat() for one in sorted(Path(model).glob("*")) if one.suffix in (".json", ".safetensors")]
    source = json.dumps([model, *([one.st_size, one.st_mtime_ns] for one in files)])
    if not made.is_file() or not record.is_file() or record.read_text(encoding="utf-8") != source:
        print(f"converting {model}: {record.parent}", flush=True)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.unlink(missing_ok=True)
        convert()
        record.write_text(source, encoding="utf-8")
