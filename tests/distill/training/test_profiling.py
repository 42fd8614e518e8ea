"""The profiler's files, peak memory, and the arithmetic of MFU."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from distill.training.profiling import FlopMeter, peak_flops, traced
from speculative.engine.memory import peak_bytes

CPU = torch.device("cpu")


def train(folder: Path, steps: int, *, recorded: int, main: bool = True) -> None:
    with traced(folder, recorded, CPU, main) as step_ended:
        for _ in range(steps):
            with torch.profiler.record_function("one_step"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            step_ended()


def recorded_steps(folder: Path) -> int:
    with gzip.open(folder / "profile" / "trace.json.gz", "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return sum(event.get("name") == "one_step" for event in events)


def test_so_many_steps_are_traced_after_the_warm_up(tmp_path: Path) -> None:
    train(tmp_path, 8, recorded=3)
    assert recorded_steps(tmp_path) == 3
    table = (tmp_path / "profile" / "operations.txt").read_text(encoding="utf-8")
    assert "aten::mm" in table
    assert not list((tmp_path / "profile").glob(".*"))


def test_training_that_ends_early_leaves_what_was_recorded(tmp_path: Path) -> None:
    train(tmp_path, 4, recorded=10)
    assert recorded_steps(tmp_path) == 2


def test_training_that_fails_is_not_hidden(tmp_path: Path) -> None:
    def failing() -> None:
        with traced(tmp_path, 3, CPU, True) as step_ended:
            for _ in range(3):
                step_ended()
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        failing()
    assert (tmp_path / "profile" / "trace.json.gz").exists()


@pytest.mark.parametrize(("recorded", "main"), [(0, True), (3, False)])
def test_off_or_another_rank_writes_nothing(tmp_path: Path, recorded: int, main: bool) -> None:
    train(tmp_path, 8, recorded=recorded, main=main)
    assert list(tmp_path.iterdir()) == []


def test_peak_memory_of_a_cpu_process_rises_with_what_it_holds() -> None:
    before = peak_bytes(CPU)
    held = torch.ones(64 * 2**20 // 4)
    after = peak_bytes(CPU)
    assert held.numel()
    assert 20 * 2**20 < before <= after < 2**40
    # An earlier peak of this process may have been higher; then nothing rises.
    assert after >= 64 * 2**20


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 125.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
    ],
)
def test_the_peak_of_a_device_name(name: str, tflops: float) -> None:
    assert peak_flops(name, torch.bfloat16) == peak_flops(name, "bf16") == pytest.approx(tflops * 1e12)
    assert peak_flops(name, "no") is None
    assert peak_flops(name, torch.float32) is None


@pytest.mark.parametrize(
    "name", ["Someone's New GPU", "NVIDIA RTX A4000", "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla T4"]
)
def test_a_name_that_only_resembles_is_unknown(name: str) -> None:
    assert peak_flops(name, torch.bfloat16) is None


def test_mfu_is_of_what_the_first_step_multiplies_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA A100-SXM4-40GB")
    gpu, model, ids = torch.device("cuda", 0), tiny_model(), torch.randint(1, 50, (4, 8))
    meter = FlopMeter(gpu, torch.bfloat16)
    for _ in range(2):  # the second step is not counted
        with meter.counted(ids.numel()):
            model(ids).logits.sum().backward()
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2) - model.get_input_embeddings().weight.numel()
    # Each weight twice forward, four times backward; attention multiplies a few per cent beside: 8 tokens against width 32.
    assert meter.per_position == pytest.approx(6 * matrices, rel=0.1)
    assert 6 * matrices <= meter.per_position
    assert meter.mfu(100_000, 1) == pytest.approx(100_000 * meter.per_position / 312e12)
    assert meter.mfu(100_000, 4) == pytest.approx(meter.mfu(100_000, 1) / 4)
    for unknown in (FlopMeter(CPU, torch.bfloat16), FlopMeter(gpu, torch.bfloat16, compiled=True)):
        with unknown.counted(8):
            pass
        assert unknown.mfu(1e4, 1) is None
