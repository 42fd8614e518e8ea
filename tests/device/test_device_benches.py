"""The programs for a GPU run to their end on the pretend device; what they measure there is nothing."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_modules import bench
from pretend_cuda.ledger import LEDGER

pytestmark = pytest.mark.device


def test_the_decoders_bench_runs(tmp_path: Path) -> None:
    LEDGER.clear()
    bench("gpu_decode").main(
        out=tmp_path / "decode.json", device="cuda", alpha=0.8, gamma=2, max_tokens=4, batches="2", repeats=1, tiny=True
    )
    cells = json.loads((tmp_path / "decode.json").read_text())["cells"]
    assert {(cell["device"], cell["runner"], cell["mode"]) for cell in cells} == {
        ("cuda", runner, mode) for runner in ("eager", "graph") for mode in ("greedy", "sample")
    }
    assert LEDGER.replays > 0


def test_the_trainers_bench_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = bench("gpu_train")
    # Its peers' imports and the garbage collector take longer than all of ours.
    nothing = SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr(module, "importlib", SimpleNamespace(util=nothing, metadata=module.importlib.metadata))
    monkeypatch.setattr(module, "gc", SimpleNamespace(collect=lambda: 0))
    module.main(
        out=tmp_path / "train.json",
        device="cuda",
        rounds=1,
        steps=1,
        batch=2,
        compile_too=False,
        minutes=1.0,
        tiny=True,
    )
    cells = json.loads((tmp_path / "train.json").read_text())["cells"]
    ours = [cell for cell in cells if cell["contestant"] == "ours"]
    assert ours
    assert all(cell["device"] == "cuda" and cell["error"] is None and cell["tokens_per_second"] > 0 for cell in ours)
