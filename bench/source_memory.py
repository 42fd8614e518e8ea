"""Peak memory of reading a large local source, with and without `limit`.

    python bench/source_memory.py --rows 10000000 --limit 10000

Writes that many short prompts as parquet and as JSON lines. Each file is read in a process of its own, which prints one JSON line:
`imported_mib`, its peak resident memory before it reads, and `peak_mib`, the peak at the end.
"""

from distill.faults import run_script

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from data.prompts.prompt import PromptSource
from data.prompts.sources import load_source

STEP = 100_000  # rows written at once


def write_sources(folder: Path, count: int) -> list[Path]:
    """The same prompts as parquet and as JSON lines."""
    paths = [folder / "prompts.parquet", folder / "prompts.jsonl"]
    schema = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(paths[0], schema) as table, paths[1].open("w") as lines:
        for start in range(0, count, STEP):
            numbers = range(start, min(start + STEP, count))
            texts = [f"What does error number {number} of the billing service mean?" for number in numbers]
            table.write_table(pa.table({"prompt": texts}, schema))
            lines.writelines(f'{{"prompt": "{text}"}}\n' for text in texts)
    return paths


def peak_mib() -> int:
    """Peak resident memory of this process; `getrusage` would include that of its parent, which a new process inherits."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found.group(1)) // 1024 if found else 0


def read(path: Path, limit: int | None) -> None:
    """Read one source and print the figures of this process."""
    imported, started = peak_mib(), time.perf_counter()
    prompts = len(load_source(PromptSource(path=str(path), limit=limit)))
    figures = {"file": path.name, "limit": limit, "prompts": prompts, "seconds": time.perf_counter() - started}
    print(json.dumps(figures | {"imported_mib": imported, "peak_mib": peak_mib()}), flush=True)


def main(
    rows: Annotated[int, typer.Option(help="rows of each source", min=1)] = 1_000_000,
    limit: Annotated[int, typer.Option(help="of the source; 0 = none", min=0)] = 10_000,
    path: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Peak memory of reading a large local source."""
    if path is not None:
        return read(path, limit or None)
    with tempfile.TemporaryDirectory() as folder:
        for source in write_sources(Path(folder), rows):
            command = [sys.executable, __file__, "--path", str(source), "--limit", str(limit)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    run_script(main)
