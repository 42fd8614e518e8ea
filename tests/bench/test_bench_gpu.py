"""The program for a GPU: acceptance known by construction, FLOPs counted by hand, parts that fail alone, models in pieces."""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from bench_modules import ROOT, bench


@pytest.fixture
def gpu_all(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program with two parts in this process: one whose second cell fails when it is told to, and one that is well."""
    module = bench("gpu_all")

    def shaky(place: Any) -> Iterator[dict[str, Any]]:
        yield {"tau": 2.0, "marks": {"tau": 3.0}}
        if module.failing:
            raise RuntimeError("CUDA error: an illegal memory access\nand more")
        yield {"tau": 4.0, "marks": {"tau": 3.0}, "limits": {"tau": 4.0}}

    def well(place: Any) -> Iterator[dict[str, Any]]:
        module.runs += 1
        yield {"tau": 1.0}

    module.failing, module.runs, module.shaky, module.well = True, 0, shaky, well
    monkeypatch.setattr(module, "PARTS", {name: (module.__name__, name, 1.0) for name in ("shaky", "well")})
    monkeypatch.setattr(module, "run_apart", lambda name, asked, seconds: module.run_part(name, asked))
    return module


def words(module: Any, out: Path, *more: str) -> argparse.Namespace:
    return module.words_of(["--tiny", "--device", "cpu", "--out", str(out), *more])


def parts_of(out: Path) -> dict[str, Any]:
    return json.loads(out.read_text())["parts"]


def test_acceptance_is_known_by_construction() -> None:
    bench("gpu_all")
    from gpu.pairs import QWEN3_8B, QWEN3_600M, pair, tiny

    shapes = [replace(tiny(shape, 1), width=128) for shape in (QWEN3_8B, QWEN3_600M)]  # the margin grows with the width
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
    tokens, rows = 2 * 32, 2 * 31
    # A layer: q and o 32 x 32, k and v 32 x 16, three matrices of 32 x 64; attention 4 x 32 x 16 over half of 32 positions.
    layer = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 4 * 32 * 16
    assert race.flops() == tokens * layer * (2 + 3 * 1) + 2 * rows * 512 * (3 * 32 + 32)
    bodies = [
        sum(w.numel() for n, w in m.named_parameters() if w.dim() == 2 and "proj" in n)
        for m in (race.target, race.student)
    ]
    assert bodies == [shape.layer_weights for shape in race.shapes]


def test_a_part_that_fails_costs_no_other_and_is_run_again(gpu_all: Any, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    gpu_all.go(words(gpu_all, out, "--commit", "abc"))
    parts = parts_of(out)
    assert parts["shaky"]["error"] == "RuntimeError: CUDA error: an illegal memory access"
    assert (len(parts["shaky"]["cells"]), parts["shaky"]["finished"], parts["well"]["finished"]) == (1, False, True)
    assert {(part["commit"], part["device"], part["versions"]["torch"]) for part in parts.values()} == {
        ("abc", "cpu", importlib.metadata.version("torch"))
    }
    gpu_all.failing = False
    gpu_all.go(words(gpu_all, out))
    parts = parts_of(out)
    assert (len(parts["shaky"]["cells"]), parts["shaky"]["error"], gpu_all.runs) == (2, None, 1)
    marks = [(what, value, met) for cell in parts["shaky"]["cells"] for what, value, _, met in gpu_all.marks_of(cell)]
    assert marks == [("tau", 2.0, False), ("tau", 4.0, True), ("tau", 4.0, True)]
    gpu_all.go(words(gpu_all, out, "--again"))
    assert gpu_all.runs == 2


def test_a_try_that_gets_less_far_leaves_what_an_earlier_one_found(
    gpu_all: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "gpu.json"
    gpu_all.go(words(gpu_all, out))
    found = parts_of(out)["shaky"]["cells"]

    def broken(place: Any) -> Iterator[dict[str, Any]]:
        raise RuntimeError("nothing yet")
        yield {}

    monkeypatch.setattr(gpu_all, "shaky", broken)
    gpu_all.go(words(gpu_all, out))
    assert parts_of(out)["shaky"]["cells"] == found != []
    assert not parts_of(out)["shaky"]["finished"]


def test_a_part_without_a_package_is_run_again_when_it_is_there(
    gpu_all: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu_all, "well", lambda place: iter([{"skipped": "pydantic is not installed"}]))
    gpu_all.go(words(gpu_all, out))
    assert (parts_of(out)["well"]["finished"], parts_of(out)["well"]["error"]) == (False, "pydantic is not installed")


def test_parts_share_the_time_that_is_left(gpu_all: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [0.0], []

    def part(name: str, asked: Any, seconds: float) -> None:
        given.append((name, round(seconds)))
        now[0] += 20.0

    monkeypatch.setattr(gpu_all, "run_apart", part)
    monkeypatch.setattr(gpu_all, "time", SimpleNamespace(monotonic=lambda: now[0]))
    gpu_all.go(words(gpu_all, tmp_path / "gpu.json", "--minutes", "2"))
    assert given == [("shaky", 60), ("well", 100)]


def test_a_part_whose_time_is_over_begins_no_other_cell(
    gpu_all: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def slow(place: Any) -> Iterator[dict[str, Any]]:
        for _ in range(3):
            now[0] += 1.0
            yield {}

    gpu_all.well = slow
    for module in (gpu_all, sys.modules["gpu.place"]):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    gpu_all.run_part("well", words(gpu_all, tmp_path / "gpu.json", "--seconds", "1.5"))
    part = parts_of(tmp_path / "gpu.json")["well"]
    assert (len(part["cells"]), part["finished"], part["cut"]) == (2, False, True)


PROGRAM = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
pathlib.Path(sys.argv[0]).with_name("pid").write_text(str(child.pid))
time.sleep(1 if "well" in sys.argv else 60)
sys.exit(3)
"""


@pytest.mark.parametrize(("name", "error"), [("shaky", "killed after 2 s"), ("well", "its process ended with 3")])
def test_a_part_that_hangs_or_dies_says_so_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: str
) -> None:
    module, out = bench("gpu_all"), tmp_path / "gpu.json"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    out.write_text(json.dumps({"parts": {name: {"cells": [{"tau": 1.0}], "finished": False, "error": None}}}))
    monkeypatch.setattr(module, "__file__", str(program))
    module.run_apart(name, words(module, out), 2.0)
    part = parts_of(out)[name]
    assert (part["cells"], part["finished"], part["error"]) == ([{"tau": 1.0}], False, error)
    child = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_what_the_machine_lacks_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, version = bench("gpu_all"), importlib.metadata.version

    def here(name: str) -> str:
        if name == "pydantic":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.9.1" if name == "accelerate" else version(name)

    monkeypatch.setattr(importlib.metadata, "version", here)
    found, missing = module.versions()
    assert (found["accelerate"], missing) == ("1.9.1", ["accelerate>=1.10", "pydantic>=2.7"])


def test_a_model_arrives_in_pieces(tmp_path: Path) -> None:
    bench("gpu_all")
    from gpu import pieces

    content = bytes(range(256)) * 40
    with zipfile.ZipFile(tmp_path / "model-1.whl", "w") as archive:
        archive.writestr("model/small.gguf", content)
    sent, first, rest, kept = (tmp_path / name for name in ("sent", "first", "rest", "kept"))
    cut = pieces.split(tmp_path / "model-1.whl", sent, 0.004)
    assert [path.name for path in cut] == ["model-1.whl.1-of-3", "model-1.whl.2-of-3", "model-1.whl.3-of-3"]
    pieces.keep(tmp_path / "nothing", kept)
    with pytest.raises(FileNotFoundError, match="no model: send its pieces"):
        pieces.join(kept)
    for folder, some in ((first, cut[1:2]), (rest, [cut[0], cut[2]])):
        folder.mkdir()
        for path in (*some, sent / "model-1.whl.sha256"):
            (folder / path.name).write_bytes(path.read_bytes())
    pieces.keep(first, kept)
    with pytest.raises(FileNotFoundError, match=r"model-1\.whl: 1, 3 of 3 pieces have not arrived"):
        pieces.join(kept)
    (rest / cut[2].name).write_bytes(b"spoilt")
    pieces.keep(rest, kept)
    with pytest.raises(
        ValueError, match=r"model-1.whl: the checksum of the pieces together is not .*: send them again"
    ):
        pieces.join(kept)
    pieces.keep(sent, kept)
    assert (whole := pieces.join(kept)).read_bytes() == content
    assert whole == pieces.join(kept) == kept / "small.gguf"


def test_a_part_without_its_model_says_so(tmp_path: Path) -> None:
    module, out = bench("gpu_all"), tmp_path / "gpu.json"
    module.run_part("smollm2", words(module, out))
    assert parts_of(out)["smollm2"]["error"].startswith("FileNotFoundError: no model: send its pieces")


@pytest.mark.ranks
@pytest.mark.timeout(600)  # Five programs, one after the other.
def test_one_rank_is_launched_and_a_device_map_answers(tmp_path: Path) -> None:
    """Without wandb, as on a machine that has torch and transformers alone."""
    (tmp_path / "wandb.py").write_text("raise ModuleNotFoundError('No module named wandb', name='wandb')")
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(ROOT / "bench" / "gpu_all.py"), "--tiny", "--device", "cpu", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--only", "ranks", "--seconds", "560"], env=environment, timeout=590, check=True)
    part = parts_of(out)["ranks"]
    assert (part["error"], part["finished"]) == (None, True)
    assert [(cell["launcher"], cell["steps"]) for cell in part["cells"]] == [
        (name, 4) for name in ("DDP, 1 rank", "FSDP2, 1 rank", "device_map")
    ]
