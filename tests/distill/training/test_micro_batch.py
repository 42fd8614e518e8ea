"""The micro-batch that nobody named: divides, fits, and is the same on every rank; the arithmetic that nobody named."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from tiny_models import perturbed, tiny_model
from tiny_training import run_config

from distill.config.sections import OptimConfig, TrainConfig
from distill.models import library_state
from distill.training.batches import make_objective
from distill.training.micro_batch import (
    check_batches,
    chosen_micro_batch,
    sizes_of,
    trial_batch,
    trial_step,
)
from distill.training.module import DraftModule
from distill.training.sharding import settled_precision
from distill.training.teacher import Teacher
from speculative.errors import UserError


def test_what_divides() -> None:
    assert sizes_of(TrainConfig(batch_size=48), 4) == [1, 2, 3, 4, 6, 12]
    check_batches(TrainConfig(batch_size=32), 8)
    with pytest.raises(UserError, match="is not divisible by 3 ranks; set it to 33"):
        check_batches(TrainConfig(batch_size=32), 3)
    with pytest.raises(UserError, match=r"remove train\.micro_batch_size"):
        check_batches(TrainConfig(batch_size=32, micro_batch_size=32), 8)


def module_and_teacher(folder: Path) -> tuple[DraftModule, Teacher]:
    target = tiny_model()
    return DraftModule(perturbed(target, 0.1), make_objective(run_config(folder))), Teacher(target)


@pytest.mark.parametrize(
    ("train", "ranks", "expected"),
    [
        ({"batch_size": 64}, 1, 32),
        ({"batch_size": 48}, 1, 24),
        ({"batch_size": 32}, 8, 4),
        ({"batch_size": 6, "micro_batch_size": 3}, 2, 3),
    ],
)
def test_on_a_cpu_nothing_is_measured(tmp_path: Path, train: dict[str, int], ranks: int, expected: int) -> None:
    module, teacher = module_and_teacher(tmp_path)
    # No rank of it is asked anything but where it is and how many there are.
    accelerator: Accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=ranks)  # type: ignore[assignment]
    assert chosen_micro_batch(TrainConfig(**train), OptimConfig(), accelerator, module, teacher, 64) == expected


@pytest.mark.parametrize("online", [True, False])
def test_a_trial_step_is_as_wide_as_a_step_can_be_and_leaves_the_weights(tmp_path: Path, online: bool) -> None:
    module, teacher = module_and_teacher(tmp_path)
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    batch = trial_batch(3, 20, module)
    assert batch.input_ids_BT.shape == (3, 20)
    assert batch.labels_R.numel() == 3 * 19
    trial_step(Accelerator(cpu=True), module, teacher if online else None, batch)
    assert all(weight.grad is not None for weight in module.parameters())
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("wanted", "launcher", "gpu", "expected", "said"),
    [
        ("auto", None, True, "bf16", None),
        ("auto", None, False, "no", None),
        ("auto", "bf16", False, "bf16", None),
        ("no", "bf16", True, "no", "train.mixed_precision is no; using no"),
        ("auto", "fp16", True, "bf16", "the launcher asks for mixed_precision fp16"),
        ("bf16", "no", False, "bf16", None),
    ],
)
def test_bf16_is_the_default_on_a_gpu_and_a_launcher_is_heard_or_answered(
    wanted: str, launcher: str | None, gpu: bool, expected: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if launcher is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: gpu)
    precision, line = settled_precision(wanted)
    assert precision == expected
    assert (line is None) if said is None else (said in (line or ""))


@pytest.mark.parametrize(
    ("avx512", "amx", "vendor", "expected"),
    [
        (False, False, "AuthenticAMD", "no"),
        (True, False, "AuthenticAMD", "bf16"),
        (True, False, "GenuineIntel", "no"),
        (True, True, "GenuineIntel", "bf16"),
    ],
)
def test_native_is_bf16_where_the_processor_is_faster_in_it(
    avx512: bool, amx: bool, vendor: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(library_state, "PROCESSOR", tmp_path / "cpuinfo")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert settled_precision("native") == (expected, None)
