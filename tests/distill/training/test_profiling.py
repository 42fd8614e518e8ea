"""Peak memory, and the arithmetic of MFU."""

import pytest
import torch
from tiny_models import tiny_model

from distill.training.profiling import FlopMeter, peak_flops
from speculative.engine.memory import peak_bytes

CPU = torch.device("cpu")


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
