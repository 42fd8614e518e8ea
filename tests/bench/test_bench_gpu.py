"""The program for a GPU: acceptance known by construction, FLOPs counted by hand, parts that fail alone and go on where they stood."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_modules import ROOT, bench

PAIR = "Qwen3 8B, its first 4 layers"


@pytest.fixture
def gpu_all(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program with two parts: one whose second cell fails when it is told to, and one that is well."""
    module = bench("gpu_all")

    def shaky(place: Any) -> Iterator[dict[str, Any]]:
        yield {"tau": 2.0, "marks": {"tau": 3.0}}
        if module.failing:
            raise RuntimeError("CUDA error: an illegal memory access\nand more")
        yield {"tau": 4.0, "marks": {"tau": 3.0}}

    def well(place: Any) -> Iterator[dict[str, Any]]:
        module.runs += 1
        yield {"tau": 1.0}

    module.failing, module.runs, module.shaky, module.well = True, 0, shaky, well
    monkeypatch.setattr(module, "PARTS", {name: (module.__name__, name, ()) for name in ("shaky", "well")})
    return module


def test_acceptance_is_known_by_construction() -> None:
    bench("gpu_all")
    from gpu.pairs import LLAMA_1B, LLAMA_8B, pair, tiny

    shapes = [replace(tiny(shape, 1), width=128) for shape in (LLAMA_8B, LLAMA_1B)]  # the margin grows with the width
    target, draft = pair(*shapes, 0.7, torch.float32, torch.device("cpu"), 64)
    ids = torch.arange(512).unsqueeze(1)
    with torch.no_grad():
        probs, own = (model(ids).logits[:, -1].softmax(-1) for model in (target, draft))
    same = (probs.argmax(-1) == own.argmax(-1)).float().mean().item()
    assert same == pytest.approx(0.7, abs=0.06)  # three deviations of 512 coins
    assert torch.minimum(probs, own).sum(-1).mean().item() == pytest.approx(same, abs=0.02)


def test_a_pairs_bytes_are_those_of_its_weights() -> None:
    bench("gpu_all")
    from gpu.pairs import QWEN3_8B, QWEN3_600M, least_bytes

    # 36 x (2 x 4096 x 4096 + 2 x 4096 x 1024 + 3 x 4096 x 12288) and a head of 151,936 x 4096.
    assert QWEN3_8B.read_weights == 36 * 192_937_984 + 622_329_856
    # 28 x (2 x 1024 x 2048 + 2 x 1024 x 1024 + 3 x 1024 x 3072) and a head of 151,936 x 1024.
    assert QWEN3_600M.read_weights == 28 * 15_728_640 + 155_582_464
    assert least_bytes(QWEN3_8B, QWEN3_600M, 5, 1, 0) / 3e12 == pytest.approx(7.03e-3, abs=1e-5)


def test_flops_of_a_step_are_counted_by_hand() -> None:
    bench("gpu_all")
    from gpu.place import Place
    from gpu.training import Race

    race = Race(Place(torch.device("cpu"), True, time.monotonic()))
    tokens, rows = 2 * 32, 2 * 24
    # A layer: q and o 32 x 32, k and v 32 x 16, three matrices of 32 x 64; attention 4 x 32 x 16 over half of 32 positions.
    layer = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 4 * 32 * 16
    assert race.flops() == tokens * layer * (2 + 3 * 1) + 2 * rows * 512 * (3 * 32 + 32)
    bodies = [
        sum(w.numel() for n, w in m.named_parameters() if w.dim() == 2 and "proj" in n)
        for m in (race.target, race.student)
    ]
    assert bodies == [shape.layer_weights for shape in race.shapes]


def test_every_way_to_attend_gives_the_same() -> None:
    bench("gpu_all")
    from gpu import attention
    from gpu.place import Place

    cells = list(attention.cells(Place(torch.device("cpu"), True, time.monotonic() + 60)))
    assert [(cell["way"], cell["queries"]) for cell in cells] == [
        (way, queries) for queries in (1, 6) for way in ("transformers", "grouped (ours)", "enable_gqa")
    ]
    assert max(cell["difference"] for cell in cells) < 1e-5  # float32's rounding


def test_a_part_that_fails_costs_no_other_and_is_run_again(gpu_all: Any, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    gpu_all.go(out=out, device="cpu", only="", seconds_per_part=60.0, minutes=10.0, tiny=True)
    parts = json.loads(out.read_text())["parts"]
    assert parts["shaky"]["error"] == "RuntimeError: CUDA error: an illegal memory access"
    assert (len(parts["shaky"]["cells"]), parts["shaky"]["finished"], parts["well"]["finished"]) == (1, False, True)
    gpu_all.failing = False
    gpu_all.go(out=out, device="cpu", only="", seconds_per_part=60.0, minutes=10.0, tiny=True)
    parts = json.loads(out.read_text())["parts"]
    assert (len(parts["shaky"]["cells"]), parts["shaky"]["error"]) == (2, None)
    assert gpu_all.runs == 1
    marks = [met for cell in parts["shaky"]["cells"] for met in gpu_all.marks_of(cell)]
    assert marks == [("tau", 2.0, 3.0), ("tau", 4.0, 3.0)]


def test_every_part_runs_without_datasets_pydantic_and_wandb(tmp_path: Path) -> None:
    """As on a machine that has torch and transformers alone. Tests for a GPU would be skipped here: they are only collected."""
    for name in ("datasets", "pydantic", "wandb"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name='{name}')")
    words = [str(ROOT / "bench" / "gpu_all.py"), "--tiny", "--device", "cpu", "--out", str(tmp_path / "gpu.json")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "--collect-only"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {name: part["error"] for name, part in parts.items() if not part["finished"]} == {}
    assert set(bench("gpu_all").PARTS) == set(parts)
    assert [cell for part in parts.values() for cell in part["cells"] if "error" in cell] == []


@pytest.mark.parametrize(("seconds", "cells"), [(0.5, 1), (1.5, 2)])
def test_a_part_whose_time_is_over_begins_no_other_cell(
    gpu_all: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, cells: int
) -> None:
    now = [0.0]

    def slow(place: Any) -> Iterator[dict[str, Any]]:
        for _ in range(3):
            now[0] += 1.0
            yield {}

    gpu_all.well = slow
    for module in (gpu_all, sys.modules["gpu.place"]):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    gpu_all.run_part("well", tmp_path / "gpu.json", "cpu", True, seconds)
    part = json.loads((tmp_path / "gpu.json").read_text())["parts"]["well"]
    assert (len(part["cells"]), part["finished"], part["cut"]) == (cells, True, True)


@pytest.mark.parametrize("found", [[], [{"tau": 1.0}]])
@pytest.mark.parametrize("hangs", [False, True])
def test_a_process_that_dies_or_hangs_leaves_what_it_found(
    gpu_all: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: list[Any], hangs: bool
) -> None:
    out = tmp_path / "gpu.json"
    out.write_text(json.dumps({"parts": {"well": {"cells": found, "finished": False, "error": None}}}))

    def run(*_: Any, **__: Any) -> Any:
        if hangs:
            raise subprocess.TimeoutExpired("part", 80.0)
        return subprocess.CompletedProcess([], -11)

    monkeypatch.setattr(gpu_all, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))
    gpu_all.run_apart("well", out, "cuda", False, 60.0)
    part = json.loads(out.read_text())["parts"]["well"]
    assert (part["cells"], part["finished"]) == (found, hangs and found != [])
    assert part["error"] == ("stopped after 80 s" if hangs else "its process ended with -11")
