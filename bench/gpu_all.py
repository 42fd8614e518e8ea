"""All measurements that need a GPU, in one run of at most ten minutes: decoder, trainer, losslessness, tests.

    python bench/gpu_all.py --out bench/results/gpu_h100.json            # real sizes; the same command resumes
    python bench/gpu_all.py --tiny --device cpu --out tiny.json          # the same program in a minute

Nothing is downloaded. Each part runs in its own process, which is stopped when its time is over; its results so far are in the
file, and a part that fails does not affect the others. Finished parts are not run again; parts with an error are.
It needs torch, transformers, accelerate, scipy, pyarrow and rich, and for the tests pytest-xdist. A part reports any
other package that it lacks.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # Libraries read it when they are imported.
ROOT = Path(__file__).resolve().parents[1]
sys.path += [folder for folder in (str(ROOT), str(ROOT / "bench")) if folder not in sys.path]

# isort: split
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from gpu.pairs import PAIRS  # noqa: E402
from gpu.place import Place, first_line  # noqa: E402
from result_file import command_line, write_result  # noqa: E402

# name: (module, function, arguments before the place); what matters most comes first.
PARTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    **{name: ("gpu.decoding", "cells", (name,)) for name in list(PAIRS)[:2]},
    "losslessness": ("gpu.trained", "losslessness_cells", ()),
    "tests": ("gpu_all", "test_cells", ()),
    "train step": ("gpu.training", "cells", ()),
    "products": ("gpu.products", "cells", ()),
    "attention": ("gpu.attention", "cells", ()),
    "trained pair": ("gpu.trained", "trained_cells", ()),
    **{name: ("gpu.decoding", "cells", (name,)) for name in list(PAIRS)[2:]},
}
GRACE = 20.0  # seconds over its time in which a part may end by itself
COLUMNS = [
    "batch",
    "mode",
    "runner",
    "contestant",
    "model",
    "matrix",
    "way",
    "queries",
    "draft",
    "rule",
    "tokens_per_second",
    "tau",
    "alpha",
    "milliseconds_per_block",
    "floor_share",
    "vs_hf_assisted",
    "vs_plain",
    "over",
    "microseconds",
    "difference",
    "passed",
    "error",
    "skipped",
]
console = Console(width=170)


def test_cells(place: Place) -> Iterator[dict[str, Any]]:
    """`pytest -m gpu` of the files that have such tests."""
    files = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-n",
        "0" if place.tiny else "5",
        "-p",
        "no:cacheprovider",
        *files[: 1 if place.tiny else None],
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60 + place.left, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines() or [""]
    yield {"passed": float(done.returncode == 0), "said": lines[-6:], "marks": {"passed": 1.0}}


def machine(device: torch.device) -> dict[str, Any]:
    """Device and versions."""
    packages = ("torch", "transformers", "accelerate", "trl", "liger-kernel", "triton")
    found = {
        name: importlib.metadata.version(name) for name in packages if importlib.util.find_spec(name.replace("-", "_"))
    }
    return {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "versions": found}


def read(out: Path) -> dict[str, Any]:
    """Results of an earlier run."""
    return json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"parts": {}}


def run_part(name: str, out: Path, device: str, tiny: bool, seconds: float) -> None:
    """One part in this process: every cell is written to the file at once."""
    place = Place(torch.device(device), tiny, time.monotonic() + seconds)
    result, began = read(out), time.monotonic()
    part: dict[str, Any] = {"cells": [], "finished": False, "error": None}
    result |= {"machine": machine(place.device), "tiny": tiny}
    result["parts"][name] = part
    try:
        module, function, arguments = PARTS[name]
        for cell in getattr(importlib.import_module(module), function)(*arguments, place):
            part["cells"].append(cell)
            part |= {"seconds": round(time.monotonic() - began, 1), "cut": place.left == 0.0}
            write_result(out, result)
            if part["cut"]:
                break
        part["finished"] = True
    except Exception as error:
        part["error"] = first_line(error)
    write_result(out, result)


def run_apart(name: str, out: Path, device: str, tiny: bool, seconds: float) -> None:
    """Run one part in its own process, which is killed if it does not end in time."""
    command = [sys.executable, __file__, "--out", str(out), "--device", device, "--seconds-per-part", str(seconds)]
    command += ["--only", name, *(["--tiny"] if tiny else [])]
    stopped, why = False, None
    try:
        if (code := subprocess.run(command, timeout=seconds + GRACE, check=False).returncode) != 0:
            why = f"its process ended with {code}"
    except subprocess.TimeoutExpired:
        stopped, why = True, f"stopped after {seconds + GRACE:.0f} s"
    result = read(out)
    part = result["parts"].setdefault(name, {"cells": [], "finished": False, "error": None})
    if why is not None and not part["finished"]:
        # What it found in its time is its result; a process that died is given another try.
        part |= {"finished": stopped and bool(part["cells"]), "cut": True, "error": part["error"] or why}
        write_result(out, result)


def marks_of(cell: dict[str, Any]) -> Iterator[tuple[str, float | None, float]]:
    """(what, found, mark)."""
    for name, mark in cell.get("marks", {}).items():
        yield name, cell.get(name), mark


def shown(value: Any) -> str:
    """Format a value for a table cell."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(number)}" for name, number in value.items())
    return "" if value is None else f"{value:,.3g}" if isinstance(value, float) else str(value)


def show(result: dict[str, Any]) -> None:
    """Print one table per part, then the marks."""
    verdicts = Table("part", "", "found", "mark", "", title=f"marks, {result['machine']['device']}")
    for name, part in result["parts"].items():
        columns = [column for column in COLUMNS if any(cell.get(column) is not None for cell in part["cells"])]
        state = " (cut)" if part.get("cut") else ""
        table = Table(*columns, title=f"{name}{state}: {part['error'] or str(part.get('seconds', 0)) + ' s'}")
        for cell in part["cells"]:
            values = [cell.get(column) for column in columns]
            table.add_row(*map(shown, values))
            for what, found, mark in marks_of(cell):
                key = " ".join(str(cell[column]) for column in ("mode", "rule") if column in cell)
                met = found is not None and found >= mark
                verdicts.add_row(name, f"{key} {what}", shown(found), f"{mark:g}", "met" if met else "not met")
        console.print(table)
    console.print(verdicts)


def go(out: Path, device: str, only: str, seconds_per_part: float, minutes: float, tiny: bool) -> None:
    """Run what is missing."""
    began = time.monotonic()
    if only:
        return run_part(only, out, device, tiny, seconds_per_part)
    # The processes of the parts add to the file under this command.
    write_result(out, (earlier := read(out)) | {"command": command_line(earlier.get("command", ""))})
    for name in PARTS:
        left = 60 * minutes - (time.monotonic() - began)
        if read(out)["parts"].get(name, {}).get("finished") or left < seconds_per_part / 2:
            continue
        console.print(f"{name} ...")
        (run_part if tiny else run_apart)(name, out, device, tiny, min(seconds_per_part, left))
    show(read(out))


def asked(words: list[str] | None = None) -> argparse.Namespace:
    """The command line. (typer may need the configuration library.)"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench/results/gpu_all.json", help="finished parts in it are kept"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=tuple(PARTS), default="", help="this part alone, in this process")
    parser.add_argument(
        "--seconds-per-part", type=float, default=60.0, help="a part starts no new measurement after this"
    )
    parser.add_argument("--minutes", type=float, default=9.5, help="no part is started that could end after this")
    parser.add_argument("--tiny", action="store_true", help="small shapes, all parts in this process")
    return parser.parse_args(words)


if __name__ == "__main__":
    go(**vars(asked()))
