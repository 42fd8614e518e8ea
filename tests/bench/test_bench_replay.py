"""bench/replay.py runs on any pair and writes the JSON it promises; how it counts is asserted, what it measures is not."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_modules import bench
from tiny_models import perturbed, prompts_of, tiny_model

from speculative.decoder.responses import Response


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    loaded = bench("replay")
    monkeypatch.setattr(loaded, "SHARED", tmp_path / "nothing shared")
    return loaded


@pytest.fixture
def pair(tiny_target: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "pair"
    for name in ("tiny-target", "tiny-draft"):
        shutil.copytree(tiny_target, folder / name)
    return folder


def test_the_quick_run_writes_every_number(module: Any, pair: Path, tmp_path: Path) -> None:
    out, threads = tmp_path / "replay.json", torch.get_num_threads()
    module.main(
        out=out,
        pair=pair,
        quick=True,
        embedded=False,
        parts="coverage,cost,speed,matched",
        rules="sample,block,greedy-draft,greedy",
        cell_seconds=0.0,
        batch=0,
        device="cpu",
        threads=0,
        speed_threads=1,
    )
    result = json.loads(out.read_text())
    assert {"machine", "tau_error_max", "cost_ratio", "coverage", "speedup_error_max", "cells", "versions"} <= set(
        result
    )
    assert set(result["machine"]) == {"coverage", "cost", "speed", "matched"}
    assert [(cell["rule"], cell["gamma"]) for cell in result["cells"]] == [
        (rule, gamma) for rule in ("sample", "block", "greedy-draft", "greedy") for gamma in (1, 4)
    ]
    # The draft is the target: every token is accepted, so live and replay count the same blocks (float32 rounding).
    assert result["tau_error_max"] < 0.01
    shares = result["coverage"]["shares"]
    assert set(shares) == {"alpha", "tau", "alpha gain", "tau gain"}
    assert all(set(own) == {"8", "16"} and 0 <= min(own.values()) <= max(own.values()) <= 1 for own in shares.values())
    assert [cell["gamma"] for cell in result["speed"]] == [1, 3]
    assert result["cost_ratio"] == result["cost"]["one_gamma"]
    assert torch.get_num_threads() == threads
    assert not out.with_name("replay.json.partial").exists()


def tiny_bench(module: Any, **sizes: Any) -> Any:
    target = tiny_model()
    own = module.replace(module.QUICK, **sizes)
    return module.Bench(target, perturbed(target, 0.05), prompts_of([5] * 40), own, ())


def test_a_wrong_interval_does_not_cover(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    texts = [
        Response(key, list(ids), response_ids=rng.integers(1, 50, 12).tolist(), log_target_probs=[-2.0] * 12)
        for key, ids in prompts_of([5] * 40)
    ]
    made = tiny_bench(module, simulations=60, heldout=(20,))
    other = perturbed(made.draft, 0.05, seed=3)
    honest = module.coverage(made, texts, other, gamma=3)
    assert honest["lowest"] > 0.8
    whole = module.intervals_of_sums
    monkeypatch.setattr(module, "intervals_of_sums", lambda *given, **named: whole(*given, confidence=0.3, **named))
    narrow = module.coverage(made, texts, other, gamma=3)
    assert narrow["shares"]["tau"]["20"] < 0.6
    assert narrow["shares"]["tau gain"] == honest["shares"]["tau gain"]
