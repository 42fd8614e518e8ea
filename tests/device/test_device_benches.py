"""The program for a GPU runs to its end on the pretend device; what it measures there is nothing."""

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_modules import bench
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
    cells = list(decoding.cells("Qwen3 8B, 0.6B", here))
    assert [(cell["runner"], cell["batch"]) for cell in cells] == [("auto", 1), ("eager", 4)]
    assert not any("error" in cell for cell in cells)
    assert LEDGER.replays > 0
    assert cells[0]["marks"] == {"floor_share": 0.7, "vs_hf_assisted": 3.0}


def test_the_trainers_part_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    here = place()
    from gpu import training

    # Its peers' imports and the garbage collector take longer than all of ours.
    monkeypatch.setattr(training, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    monkeypatch.setattr(sys.modules["gpu.place"], "gc", SimpleNamespace(collect=lambda: 0))
    cells = {cell["contestant"]: cell for cell in training.cells(here)}
    assert cells["ours"]["tokens_per_second"] > 0
    assert cells["ours"]["mfu_of_matmul"] > 0
    assert cells["liger"]["skipped"] == "liger_kernel is not installed"
