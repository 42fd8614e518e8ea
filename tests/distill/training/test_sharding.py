"""Two ranks: the same training plain or sharded, resumed by another number of ranks, and after the death of one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.utils import FullyShardedDataParallelPlugin
from processes import free_port, run_ranks
from sharding_worker import STEPS, STOP, cases, new_accelerator, new_loop, steps_config, trained
from tiny_models import tiny_model
from tiny_training import (
    ScriptedJudge,
    examples_of,
    final_weights,
    fit,
    forget_accelerators,
    make_loop,
    metrics_of,
    run_config,
)

from distill.config.layout import step_folder
from distill.config.load import dump_config
from distill.config.run import RunConfig
from distill.run import checkpoint
from distill.training import sharding
from speculative.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = ROOT / "tests" / "support"
# In float64 only the order of sums differs between arrangements: 1e-16 of each number, 1e-14 after AdamW's divisions.
EXACT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(autouse=True)
def _no_launcher() -> Iterator[None]:
    yield
    for name in list(os.environ):
        if name.startswith(("FSDP_", "ACCELERATE_")):
            del os.environ[name]
    forget_accelerators()


def torchrun(config: Path) -> subprocess.Popen[str]:
    """Two CPU ranks of the worker, in a process group of their own."""
    paths = os.pathsep.join([str(SUPPORT), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            "2",
            "--master_addr",
            "127.0.0.1",
            "--master_port",
            str(free_port()),
            str(SUPPORT / "sharding_worker.py"),
            str(config),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], limit: float) -> str:
    """What it printed; kills it and all of its ranks when it takes longer than ``limit`` seconds."""
    try:
        return process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"ranks still running after {limit:g} s:\n{process.communicate()[0][-3000:]}") from None


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The worker's cases as the main process saw them; `folder` has the runs, `rank 1` what the other one saw."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("scale")
    trained(steps_config(folder / "one-stopped", 2), until=STOP)
    run_ranks(cases, folder, limit=150)
    return torch.load(folder / "rank0.pt") | {"folder": folder, "rank 1": torch.load(folder / "rank1.pt")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same training by one process, the batch in one piece; `1x4` in four micro-batches."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        "1x4": trained(steps_config(folder / "1x4", 2)),
        "": trained(steps_config(folder / "plain", 8)),
        "tied": trained(steps_config(folder / "tied", 8), "tied"),
        "lora": trained(steps_config(folder / "lora", 8), "lora"),
        "lora blocks": trained(steps_config(folder / "lora-blocks", 8), "lora blocks"),
    }


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert expected
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


ARRANGEMENTS = [
    ("ddp", ""),
    ("fsdp", ""),
    ("fsdp tied recomputed", "tied"),
    ("fsdp lora", "lora"),
    ("fsdp lora blocks", "lora blocks"),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "variant"), [("1x4", ""), *ARRANGEMENTS])
def test_gradients_losses_and_weights_do_not_depend_on_the_arrangement(
    ranks: dict[str, Any], alone: dict[str, dict[str, Any]], case: str, variant: str
) -> None:
    shared, whole = (alone if case == "1x4" else ranks)[case], alone[variant]
    assert shared["kind"] == {"1x4": "NO", "ddp": "MULTI_CPU"}.get(case, "FSDP")
    assert_same_tensors(shared["gradients"], whole["gradients"])
    assert_same_tensors(shared["weights"], whole["weights"])  # what is exported, after all steps
    for step, expected in zip(shared["logged"], whole["logged"], strict=True):
        assert step["tokens"] == expected["tokens"]
        # A micro-batch's loss is handed on in float32.
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        for key in ("alpha", "grad_norm"):
            assert step[key] == pytest.approx(expected[key], rel=1e-9)


@pytest.mark.ranks
def test_the_whole_model_is_put_together_on_the_main_process_only(ranks: dict[str, Any]) -> None:
    assert_same_tensors(ranks["fsdp"]["weights"], ranks["ddp"]["weights"])
    assert ranks["rank 1"]["fsdp"]["weights"] == {}
    assert any(step["grad_norm"] > 0.5 for step in ranks["fsdp"]["logged"]), "clipping was tried"


@pytest.mark.ranks
def test_a_sharded_run_goes_on_where_it_stood(ranks: dict[str, Any]) -> None:
    resumed = ranks["fsdp resumed"]
    assert len(resumed["logged"]) == STEPS - STOP
    torch.testing.assert_close(resumed["weights"], ranks["fsdp"]["weights"], rtol=0, atol=0)


@pytest.mark.ranks
@pytest.mark.parametrize("stopped", ["ddp-stopped", "fsdp-stopped"])
def test_one_rank_goes_on_from_what_two_wrote(
    ranks: dict[str, Any], alone: dict[str, dict[str, Any]], stopped: str
) -> None:
    config = steps_config(ranks["folder"] / stopped, 2)
    state = step_folder(config.folder, STOP) / "state"
    assert (state / sharding.SHARDED_STATE).exists() == stopped.startswith("fsdp")
    resumed = trained(config)
    assert resumed["kind"] == "NO"
    assert len(resumed["logged"]) == STEPS - STOP
    for step, expected in zip(resumed["logged"], alone[""]["logged"][STOP:], strict=True):
        assert step["tokens"] == expected["tokens"], "another global batch"
        assert step["lr"] == expected["lr"]
    assert_same_tensors(resumed["weights"], alone[""]["weights"])


@pytest.mark.ranks
def test_two_ranks_go_on_from_what_one_wrote(ranks: dict[str, Any], alone: dict[str, dict[str, Any]]) -> None:
    grown = ranks["ddp grown"]
    assert len(grown["logged"]) == STEPS - STOP
    assert [step["tokens"] for step in grown["logged"]] == [step["tokens"] for step in alone[""]["logged"][STOP:]]
    assert_same_tensors(grown["weights"], alone[""]["weights"])


@pytest.mark.ranks
def test_a_sharded_teacher_says_the_same_and_keeps_half(ranks: dict[str, Any]) -> None:
    for seen in (ranks["teacher"], ranks["rank 1"]["teacher"]):
        kept, whole = seen.pop("kept").tolist()
        layers = whole - sum(
            weight.numel()
            for name, weight in tiny_model(vocab_size=300, tie_word_embeddings=True).named_parameters()
            if ".layers." not in name
        )
        assert whole - kept == layers / 2
        for name, hidden_RD in seen.items():
            torch.testing.assert_close(
                hidden_RD, seen["whole"], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.ranks
def test_a_dead_rank_ends_the_run_with_advice_and_the_last_checkpoint_serves(tmp_path: Path) -> None:
    def config(name: str) -> RunConfig:
        return run_config(tmp_path / name, train={"steps": 12}, judge={"every": 3})

    killed, whole = config("killed"), config("whole")
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(killed), encoding="utf-8")
    process = torchrun(path)
    metrics, pid = killed.folder / "metrics.jsonl", killed.folder / "rank1.pid"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and '"step": 4' in metrics.read_text(encoding="utf-8")):
        time.sleep(0.02)
    os.kill(int(pid.read_text(encoding="utf-8")), signal.SIGKILL)
    printed = finish(process, 40)
    assert process.returncode != 0
    good = checkpoint.last_resumable(killed.folder)
    assert good in (3, 6)
    assert "understudy: another rank failed" in printed
    assert "the same command" in printed

    def fit_alone(one: RunConfig) -> None:
        forget_accelerators()
        fit(make_loop(one, ScriptedJudge(), examples=examples_of([9, 12, 7, 15, 10, 8, 11, 14, 6, 13])))

    fit_alone(killed)
    fit_alone(whole)
    losses = [[(line["step"], line["loss"]) for line in metrics_of(one) if "loss" in line] for one in (killed, whole)]
    assert [step for step, _ in losses[0]] == list(range(1, 13)), "each step once"
    assert [loss for _, loss in losses[0]] == pytest.approx([loss for _, loss in losses[1]], rel=1e-4)
    for name, value in final_weights(whole).items():
        # float32: where a gradient is nearly zero, rounding decides the sign of AdamW's step of 1e-2
        assert float((final_weights(killed)[name] - value).abs().mean()) < 1e-4, name


def launched(kind: str) -> Any:
    """Stands for the accelerator of one of two ranks."""
    kind = sharding.DistributedType[kind]
    return SimpleNamespace(distributed_type=kind, num_processes=2, state=SimpleNamespace(), is_fsdp2=False)


@pytest.mark.parametrize(
    ("settings", "optim", "kind", "words"),
    [
        ({"FSDP_VERSION": "1"}, {}, "MULTI_CPU", "fsdp_version: 2"),
        ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, {}, "MULTI_CPU", "fsdp_cpu_ram_efficient_loading"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}, "MULTI_CPU", "student.gradient_checkpointing: true"),
        ({}, {"name": "muon"}, "MULTI_CPU", "optim.name: muon"),
        ({}, {"name": "adamw8bit"}, "MULTI_CPU", "optim.name: adamw8bit"),
        ({}, {}, "DEEPSPEED", "the launcher asks for DEEPSPEED"),
    ],
)
def test_settings_that_would_train_something_else_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    optim: dict[str, Any],
    kind: str,
    words: str,
) -> None:
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **settings}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        sharding.settle_launcher(launched(kind), run_config(tmp_path, optim=optim).optim, sharding.launched_plugin())


def test_one_process_under_fsdp_settings_trains_plainly(tmp_path: Path) -> None:
    assert new_accelerator(steps_config(tmp_path, 8), "FSDP").distributed_type.value == "NO"


def test_a_whole_state_is_not_read_by_sharded_ranks(tmp_path: Path) -> None:
    config = steps_config(tmp_path, 8)
    trained(config, until=STOP)
    loop = new_loop(config)
    loop.accelerator.state.distributed_type = sharding.DistributedType.FSDP
    loop.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(UserError, match="written without FSDP2"):
        sharding.load_state(
            loop.accelerator, loop.wrapped, loop.optimizers, step_folder(loop.run.folder, STOP) / "state"
        )


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs" / "accelerate").glob("*.yaml")))
def test_shipped_launcher_files_are_read_by_accelerate(name: str) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    path = ROOT / "configs" / "accelerate" / name
    config = ClusterConfig.from_yaml_file(str(path))
    assert config.distributed_type in ("MULTI_GPU", "FSDP")
    assert config.mixed_precision == "no", "train.mixed_precision is the one place"
    text = path.read_text(encoding="utf-8")
    assert "Tested" in text, "says what was tested where"
    settings = yaml.safe_load(text)
    if config.distributed_type == "FSDP":
        assert settings["fsdp_config"]["fsdp_version"] == 2
        assert settings["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is False
