"""The training benches run at tiny sizes and write what they promise; all contestants minimise the same thing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_modules import bench

from data.batches.collate import collate
from distill.loss.definitions import Objective
from distill.training.module import DraftModule

CELL = {"device", "objective", "policy", "tokens_per_second", "vs_floor", "vs_trl", "peak_memory_mb"}


def race_of(tiny_target: Path, **options: Any) -> Any:
    module = bench("train_step")
    settings = {"target": str(tiny_target), "batch_size": 2, "length": 24, "prompt_tokens": 8, "examples": 4} | options
    return module.Race(module.Settings(**settings))


def test_a_step_has_a_cell_for_every_policy_and_objective(tiny_target: Path, tmp_path: Path) -> None:
    module, out = bench("train_step"), tmp_path / "step.json"
    module.main(
        out=out,
        pair="random",
        target=str(tiny_target),
        draft=None,
        batch_size=2,
        length=24,
        prompt_tokens=8,
        rounds=1,
        objectives="forward_kl,forward_kl+ce",
        policies="off,store,on",
        memory=False,
        compile_ours=False,
        trl=True,
        threads=0,
        device="cpu",
        memory_job=None,
    )
    result = json.loads(out.read_text())
    cells = {(c["policy"], c["objective"], c.get("rollout_every")): c for c in result["cells"]}
    reading = {(policy, name, None) for policy in ("off", "store") for name in ("forward_kl", "forward_kl+ce")}
    writing = {("on", "forward_kl", every) for every in (1, 50)}
    assert set(cells) == reading | writing
    for (_, objective, _), cell in cells.items():
        assert set(cell) >= CELL
        assert (cell["vs_trl"] is not None) == (objective in module.BETA)
        assert cell["peak_memory_mb"] is None
    # Speed of the baseline and time over its time are one measurement.
    baseline = result["contestants"]["floor/off/forward_kl"]["tokens_per_second"]
    for (policy, *_), cell in cells.items():
        if policy != "on":
            assert cell["vs_floor"] == pytest.approx(baseline / cell["tokens_per_second"])
    assert {"commit", "versions", "threads"} <= set(result["machine"])


@pytest.mark.parametrize(
    "objective", ["forward_kl", "reverse_kl", "jsd", "tv", "neg_log_alpha", "lk_hybrid", "forward_kl+ce"]
)
def test_the_baseline_and_ours_minimise_the_same(tiny_target: Path, objective: str) -> None:
    module, race = bench("train_step"), race_of(tiny_target)
    weights = module.OBJECTIVES[objective]
    batch = collate(race.examples[:2], 0)
    mask_BT = torch.from_numpy(race.examples[0].loss_mask).expand(2, -1)
    baseline = module.naive_loss(race.target, race.student, batch.input_ids_BT, mask_BT, weights)
    baseline.backward()
    expected = [parameter.grad.clone() for parameter in race.student.parameters()]
    race.student.zero_grad()
    draft = DraftModule(race.student, Objective(weights))
    loss, *_ = draft(batch, race.teacher.signal(batch))
    (loss / batch.labels_R.numel()).backward()
    found = [parameter.grad for parameter in race.student.parameters()]
    # Float32 sums in another order; gradients of a mean over 32 tokens are far above 1e-5.
    torch.testing.assert_close(loss / batch.labels_R.numel(), baseline, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("objective", ["forward_kl", "jsd", "reverse_kl"])
def test_trl_minimises_the_same(objective: str) -> None:
    from trl.experimental import gkd

    module = bench("train_step")
    torch.manual_seed(0)
    target_BTV, student_BTV = torch.randn(2, 2, 5, 30).unbind(0)
    labels_BT = torch.randint(0, 30, (2, 5))
    theirs = gkd.GKDTrainer.generalized_jsd_loss(student_BTV, target_BTV, labels_BT, beta=module.BETA[objective])
    ours_BT = module.plain_losses(target_BTV.log_softmax(-1), student_BTV.log_softmax(-1), labels_BT, {objective: 1.0})
    torch.testing.assert_close(ours_BT.mean(), theirs)


def test_memory_is_measured_in_a_process_of_its_own(tiny_target: Path, capfd: pytest.CaptureFixture[str]) -> None:
    module = bench("train_step")
    settings = module.asdict(race_of(tiny_target).settings)
    found = module.growth_in_processes({"step": [settings, "ours/off/forward_kl", 1]}, 1, lambda text: None)
    assert found["step"] > 0
    assert capfd.readouterr().err == "", "torchao warns while transformers imports it: here of what only CUDA needs"


def test_stored_signals_come_back_in_the_order_of_a_step(tiny_target: Path) -> None:
    module, race = bench("train_step"), race_of(tiny_target)
    stored = module.stored_teacher(race.teacher, race.examples, 8)
    batch = collate([race.examples[2], race.examples[0]], 0, [2, 0])
    dense = race.teacher.signal(batch)
    most = dense.head(dense.hidden_RD).argmax(-1)
    assert torch.equal(stored.signal(batch).ids_RK[:, 0], most)


def test_growth_is_what_the_work_takes() -> None:
    module = bench("train_step")
    few = module.growth_of(lambda: torch.ones(1_000_000).sum(), "cpu")
    many = module.growth_of(lambda: torch.ones(25_000_000).sum(), "cpu")
    assert few < 20
    assert 90 < many < 120  # 25 M float32 are 100 MB
