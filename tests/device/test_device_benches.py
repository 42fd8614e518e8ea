"""The program for a GPU runs to its end on the pretend device; what it measures there is nothing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_modules import ROOT, bench
from pretend_cuda.ledger import LEDGER

pytestmark = pytest.mark.device


def place() -> Any:
    bench("gpu_all")  # the modules of its folder can be imported from here on
    from gpu.place import Place

    return Place(torch.device("cuda"), True, time.monotonic() + 60)


def test_the_decoders_part_runs() -> None:
    here = place()
    from gpu import decoding

    LEDGER.clear()
    cells = list(decoding.cells(here))
    assert [(cell["batch"], cell["rule"]) for cell in cells[:6]] == [
        (batch, rule) for batch in (1, 4) for rule in ("sample", "greedy-draft", "block")
    ]
    assert not any("error" in cell for cell in cells)
    assert LEDGER.replays > 0
    assert [cell["marks"]["limit_share"] for cell in cells if "marks" in cell] == [0.7] * 3 + [0.85] * 3


def test_the_trainers_part_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    here = place()
    from gpu import training

    # The garbage collector takes longer than all of ours.
    monkeypatch.setattr(sys.modules["gpu.place"], "gc", SimpleNamespace(collect=lambda: 0))
    cells = {cell["contestant"]: cell for cell in training.cells(here)}
    assert cells["ours"]["tokens_per_second"] > 0
    assert cells["ours"]["mfu_of_matmul"] > 0
    assert cells["ours"]["predicted_mb"] > 0


SITE = """
import sys
sys.path.insert(0, {support!r})
from pretend_cuda import library
library.load()
from pretend_cuda.device import pretend_cuda
DEVICE = pretend_cuda()
DEVICE.__enter__()
"""


@pytest.mark.timeout(600)  # Four programs, one after the other.
def test_a_whole_run_is_killed_continued_and_exported(tmp_path: Path) -> None:
    """`understudy train` in bfloat16, in processes each of which has the device."""
    (tmp_path / "sitecustomize.py").write_text(SITE.format(support=str(ROOT / "tests" / "support")))
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(ROOT / "bench" / "gpu_all.py"), "--tiny", "--only", "embedded", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--seconds", "560"], env=environment, timeout=590, check=True)
    part = json.loads(out.read_text())["parts"]["embedded"]
    assert (part["error"], part["device"]) == (None, "NVIDIA H100 80GB HBM3")
    _, trained, exported = part["cells"]
    assert (trained["resumed_from"], trained["each_step_once"]) == (2, 1.0)
    assert trained["runner"] == "CUDA graphs"  # Triton's kernels need a real one.
    assert "SERVING.md" in exported["files"]
