"""A run says what it is going to do: how long it is, its plan, one prompt as the target sees it, the time that is left."""

import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from rich.filesize import decimal
from tiny_training import run_config

from distill import train
from distill.commands.options import ShowRunOptions
from distill.commands.show import show
from distill.config.layout import METRICS, RESPONSES, TRAINING, list_steps, step_folder
from distill.config.load import dump_config, load_config
from distill.config.run import RunConfig
from distill.models.load import load_model, load_tokenizer
from distill.models.student import outlined_student
from distill.models.target import load_target_side
from distill.run.prompts import load_prompts
from distill.training.plan import prompt_lines
from speculative import progress

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def with_train(tmp_path: Path, **more: Any) -> RunConfig:
    sections: dict[str, Any] = {"data": {"train": [{"path": "unused.jsonl"}], **more.pop("data", {})}, **more}
    tree = {"name": "run", "output": str(tmp_path), **sections}
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(tree), encoding="utf-8")
    return load_config(path)


def test_a_run_makes_three_passes_by_default(tmp_path: Path) -> None:
    config = with_train(tmp_path)
    assert (config.train.epochs, config.train.steps) == (3.0, 0)
    assert config.settled(50_000).train.steps == 4688  # 150,000 / 32, rounded up
    assert with_train(tmp_path, train={"epochs": 0.5}).settled(64).train.steps == 1
    twice = with_train(tmp_path, serving={"samples_per_prompt": 2}, train={"epochs": 1, "batch_size": 10})
    assert twice.settled(50).train.steps == 10
    mixed = {"mix": {"target": 0.25, "student": 0.75}}
    assert with_train(tmp_path, train={"epochs": 1, "batch_size": 8}, data=mixed).settled(50).train.steps == 25
    alone = {"mix": {"target": 0.0, "student": 1.0}}
    assert with_train(tmp_path, train={"epochs": 1, "batch_size": 8}, data=alone).settled(16).train.steps == 2


def test_steps_take_the_place_of_epochs_and_both_or_neither_are_refused(tmp_path: Path) -> None:
    config = with_train(tmp_path, train={"steps": 7})
    assert (config.train.epochs, config.settled(50_000)) == (0.0, config)
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config
    for both in ({"steps": 7, "epochs": 3.0}, {"steps": 0, "epochs": 0.0}):
        text = refused(lambda both=both: with_train(tmp_path, train=both))
        assert "train.steps and train.epochs: set one of them, and the other to 0" in text


def test_shipped_configs_keep_their_number_of_steps() -> None:
    steps = {
        path.stem: load_config(path).train.steps for path in CONFIGS.glob("*.yaml") if "target:" in path.read_text()
    }
    assert steps == {
        "demo": 660,
        "gsm8k": 120,
        "loop": 300,
        "own": 2000,
        "own_lora": 1000,
        "quickstart": 60,
        "own_servers": 2000,
        "smollm2": 0,
    }


@pytest.mark.parametrize(
    "student",
    [
        {"init": "carved", "layers": [0, -1]},
        {"init": "carved", "layers": [1], "intermediate_size": 16},
        {"init": "pretrained", "path": "TARGET"},
        {"init": "config", "architecture": {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2}},
        {"init": "carved", "layers": [0], "lora": {"rank": 4}},
    ],
    ids=str,
)
def test_the_outlined_draft_is_as_large_as_the_one_that_is_made(
    student: dict[str, Any], tiny_target: Path, tmp_path: Path
) -> None:
    from distill.models.student import make_student, with_adapters

    student = {key: str(tiny_target) if value == "TARGET" else value for key, value in student.items()}
    config, side = run_config(tmp_path, student=student).student, load_target_side(str(tiny_target))
    target = load_model("target", str(tiny_target))
    made = with_adapters(make_student(config, target, side.tokenizer, [[1, 5, 9, 7]]), config.lora)
    outlined = outlined_student(config, side.config)
    sizes = [sorted((weight.numel(), weight.requires_grad) for weight in one.parameters()) for one in (made, outlined)]
    assert sizes[0] == sizes[1]
    assert {weight.device.type for weight in outlined.parameters()} == {"meta"}


@pytest.mark.parametrize("fields", [{"hidden_act": "sillu"}, {"num_attention_heads": 0}, {"pad_token_id": 90}])
def test_a_draft_that_cannot_be_made_is_one_line(fields: dict[str, Any], tiny_target: Path, tmp_path: Path) -> None:
    student = {"init": "config", "architecture": {"model_type": "llama", "hidden_size": 16, **fields}}
    config, side = run_config(tmp_path, student=student).student, load_target_side(str(tiny_target))
    said = refused(outlined_student, config, side.config)
    assert said.startswith("student.architecture: ")
    assert "\n" not in said


def test_a_dry_run_needs_no_weights_and_leaves_nothing(
    tiny_config: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_target, bare)
    (bare / "model.safetensors").unlink()
    words = [str(tiny_config), f"target.path={bare}", f"output={tmp_path / 'runs'}", "train.steps=2", "name=dry"]
    assert train.main([*words, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    assert "2 steps of 16 sequences = 0.525 epochs" in text
    assert "warning: 29 of 61 answers are never trained on; raise train.steps to 4 or more" in text
    prompts = load_prompts(load_config(tiny_config).data, load_tokenizer(str(bare)), 128, 16, 10).train
    shown = [int(number) for number in re.findall(r"' (\d+)(?:  |\n|$)", text)]
    ids = list(prompts[0].prompt_ids)
    assert shown == (ids if len(ids) <= 40 else ids[:20] + ids[-20:])
    assert f"as the target sees it, {len(ids)} tokens" in text
    assert "'<|bos|>' 1 " in text, "special tokens are written out"


def test_the_generation_prompt_and_a_doubled_first_token_are_seen(chat_target: Path, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": f"say {word}"}]}) + "\n" for word in "abcdef")
    )
    tokenizer = load_tokenizer(str(chat_target))
    data = run_config(
        tmp_path, data={"train": [{"path": str(tmp_path / "chats.jsonl")}], "template": {"mode": "chat"}}
    ).data
    lines = prompt_lines(load_prompts(data, tokenizer, 128, 16, 2).train[0], tokenizer)
    pieces = re.findall(r"'([^']*)' \d+", " ".join(lines))
    assert "".join(pieces).endswith(";assistant:")


def test_a_run_says_its_plan_and_its_time_and_ends_with_the_screen_of_show(
    tiny_config: Path,
    tiny_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.05)
    words = [f"output={tmp_path}", "train.steps=0", "train.epochs=6", "judge.every=20", "name=six"]
    assert train.main([str(tiny_config), *words]) == 0
    out, err = capsys.readouterr()
    run = tmp_path / "six"
    steps = [json.loads(line)["step"] for line in (run / METRICS).read_text().splitlines()]
    assert max(steps) == 23, "61 answers six times in steps of 16"
    assert load_config(run / "config.yaml").train.epochs == 6, "so that the same command continues it"

    assert "61 to train on (1,927 tokens), 10 held out" in out
    assert "23 steps of 16 sequences = 6.03 epochs; 3 checkpoints" in out
    assert "0.003 (optim.lr), adamw, forward_kl" in out
    assert "never trained on" not in out
    target = load_model("target", str(tiny_target))
    draft = load_model("draft", str(run / "best" / "student"))
    sizes = [decimal(4 * sum(weight.numel() for weight in model.parameters())) for model in (target, draft)]
    assert re.search(
        rf"target float32 {sizes[0]}, cache of 16 answers [\d.]+ kB, draft float32 {sizes[1]}, gradients {sizes[1]}",
        out,
    )
    stored = sum(path.stat().st_size for path in (run / "checkpoints").rglob("*.safetensors"))
    stored += sum(path.stat().st_size for path in (run / "checkpoints").rglob("optimizer.bin"))
    promised = re.search(r"3 checkpoints ([\d.]+) MB, answers ([\d.]+) kB; [\d.,]+ GB free", out)
    assert promised is not None
    assert float(promised[1]) == pytest.approx(stored / 1e6, rel=0.1)
    shards = sum(path.stat().st_size for path in (run / RESPONSES / TRAINING).glob("shard-*"))
    assert float(promised[2]) == pytest.approx(shards / 1e3, rel=0.3), "files of a few rows have more than rows in them"

    forecast = re.search(
        r"after 20 steps: 0:00:\d\d left, for 3 steps of [\d.e-]+ s and 1 judgements of 0:00:\d\d, "
        r"then the verdict; peak memory with activations: ([\d.]+) (MB|GB)\n",
        out,
    )
    assert forecast is not None
    peak = float(forecast[1]) * {"MB": 1e6, "GB": 1e9}[forecast[2]]
    assert 2e8 < peak <= 1.1 * 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "rounded"
    assert list_steps(run) == [0, 20, 23]
    assert step_folder(run, 23).exists()
    for phase in ("distil", "judge", "verdict", "report"):
        assert re.search(rf"^{phase}: ", err, re.M), f"{phase} is silent in a log"
    assert "23 in 0:00:" in err

    show(ShowRunOptions(run))
    assert out.endswith(capsys.readouterr().out)


def test_a_dry_run_imports_no_pictures_servers_or_adapters() -> None:
    heavy = ("matplotlib", "peft", "distill.commands.serve", "distill.report.page")
    code = f"import sys, distill.train; print(*(name for name in {heavy} if name in sys.modules))"
    root = Path(__file__).resolve().parents[3]
    told = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert told.split() == []
