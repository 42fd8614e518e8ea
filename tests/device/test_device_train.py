"""On the pretend device whole runs end with a verdict, and a step waits for the device as often as is written here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_cuda.ledger import LEDGER
from tiny_training import forget_accelerators, small_config, write_target

from data.batches.collate import Batch
from distill import train
from distill.training import micro_batch
from distill.training.trainer import StepResult, Trainer
from distill.verdict import conclusion

pytestmark = pytest.mark.device


def run(folder: Path, *overrides: str) -> int:
    forget_accelerators()
    write_target(folder / "target", num_hidden_layers=2)
    config = small_config(
        folder,
        10,
        name="run",
        student={"layers": [0]},
        serving={"temperature": 0.9, "max_tokens": 5},
        loss={"name": "lk_hybrid", "chunk_tokens": 16},
        train={"steps": 2, "micro_batch_size": 2},
        judge={"prompts": 2, "speed_prompts": 1, "live": "end"},
    )
    try:
        return train.main([str(config), *overrides])
    finally:
        torch.set_float32_matmul_precision("highest")  # of the whole process, which has other tests


VARIANTS = {
    "bf16": ("train.mixed_precision=bf16", "student.gradient_checkpointing=true", "judge.live=checkpoint"),
    "packed and captured": ("train.packing=64", "loss.name=forward_kl", "signal.source=capture"),
    "rollouts": ("data.mix={target: 0.5, speculative: 0.5}", "data.rollouts.prompts=4", "optim.name=muon"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_trains_and_judges(variant: str, tmp_path: Path, without_verdict: None) -> None:
    LEDGER.clear()
    assert run(tmp_path, *VARIANTS[variant]) == 0
    assert LEDGER.replays > 0


def test_what_a_training_step_asks_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three values are read: the window's tokens, the gradient's norm, the sums; the host waits for two uploads, of a few numbers."""
    asked, step = [], Trainer.step

    def counted(loop: Trainer, window: Sequence[Batch]) -> StepResult:
        LEDGER.clear()
        result = step(loop, window)
        uploads = [sum(n for (waits, _), n in LEDGER.uploads.items() if waits is kind) for kind in (True, False)]
        asked.append((sum(LEDGER.reads.values()), sum(LEDGER.synchronized.values()), *uploads))
        return result

    monkeypatch.setattr(Trainer, "step", counted)
    monkeypatch.setattr(conclusion, "conclude_run", lambda *_: None)
    assert run(tmp_path, "judge.live=never") == 0
    reads, micro_batches, tensors = 3, 2, 3  # ids, rows, labels
    assert asked == [(reads, 1, 2, micro_batches * tensors)] * 2


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose run is started again and again: the target answers once."""
    return tmp_path_factory.mktemp("answered")


@pytest.mark.parametrize(("gib_each", "refused_from", "expected"), [(30, 99, 2), (1, 4, 2), (1, 99, 8), (90, 99, 1)])
def test_the_micro_batch_is_the_largest_that_a_trial_step_fits(
    gib_each: int,
    refused_from: int,
    expected: int,
    answered: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """80 GiB are free, nine tenths of them used; a trial of so many rows takes so much, or is out of memory."""
    sizes, trial_step = [0], micro_batch.trial_step

    def trial(accelerator: Any, module: Any, teacher: Any, batch: Batch) -> None:
        sizes.append(len(batch.input_ids_BT))
        if sizes[-1] >= refused_from:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        trial_step(accelerator, module, teacher, batch)

    trained = []
    monkeypatch.setattr(micro_batch, "trial_step", trial)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: sizes[-1] * gib_each * 2**30)
    monkeypatch.setattr(train, "judge_all", lambda loop, _: trained.append(len(loop.micro_batches(0)[0].input_ids_BT)))
    monkeypatch.setattr(conclusion, "conclude_run", lambda *_: None)
    assert run(answered, "judge.live=never", "train.micro_batch_size=null", "train.batch_size=8") == 0
    assert trained == [expected]
    printed = capsys.readouterr().out
    assert f"micro-batch: {expected} sequences" in printed
    assert "autocast bf16, float32 products in TF32" in printed
