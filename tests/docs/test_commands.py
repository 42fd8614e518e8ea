"""The commands of the quickstart and of README run in the order of the page: shorter, and with the stub engine in vLLM's place."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Timed
from page_commands import ROOT, blocks, commands
from processes import forked, free_port, until
from running_app import running_app
from tiny_training import forget_accelerators
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from distill.cli import app
from distill.commands.probe import probe
from distill.commands.readback import clock
from distill.engines.protocol import process
from distill.models.carving.layers import carve
from distill.models.load import load_tokenizer
from speculative.measure.cost import measure_costs
from speculative.measure.engine_costs import EngineCosts

# Below an <!-- needs ... --> in the quickstart.
NEEDS_AN_ENGINE = {"serve", "readback"}
INSTALLS = {"make", "source"}
SHORT = [
    "data.heldout_count=4",
    "serving.max_tokens=8",
    "serving.samples_per_prompt=1",
    "train.steps=2",
    "train.batch_size=4",
    "train.micro_batch_size=4",
    "judge.every=2",
    "judge.prompts=4",
    "judge.speed_prompts=2",
    "judge.speed_seconds=0.1",
]
# What makes each command short. An option that is given twice has its last value.
MORE = {
    "probe": ["--count", "2", "--max-tokens", "8", "--temperatures", "0.7", "--gammas", "1", "--batch-sizes", "1"],
    "train": SHORT,
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files of the repository that the pages use."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copytree(ROOT / "distill" / "models" / "embedded", tmp_path / "distill" / "models" / "embedded")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe, "measure_costs", functools.partial(measure_costs, seconds=0.1))
    return tmp_path


def understudy(words: list[str]) -> str:
    """Runs a command in this process; its output."""
    forget_accelerators()
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"understudy {' '.join(words)}: {done.output[-2000:]} {done.exception!r}"
    return done.output


@pytest.mark.usefixtures("without_figures")
def test_the_quickstart_runs(place: Path) -> None:
    ran = []
    for program, *words in commands("docs/quickstart.md", marked=False):
        if program == "understudy":
            ran.append(words[0])
            understudy([*words, *MORE.get(words[0], [])])
        elif program not in INSTALLS:
            subprocess.run([program, *words], check=True)
    assert ran == ["probe", "train", "show", "export", "export"]
    assert {words[1] for words in commands("docs/quickstart.md", marked=True)} == NEEDS_AN_ENGINE
    for file in ("verdict.json", "export/SERVING.md", "export/model.safetensors"):
        assert (place / "runs" / "quickstart" / file).is_file(), file


@pytest.fixture
def pair(place: Path, chat_target: Path) -> tuple[str, str]:
    """(a tiny target, a draft carved from it)."""
    draft = carve(AutoModelForCausalLM.from_pretrained(chat_target), [0])
    draft.save_pretrained(place / "draft")
    load_tokenizer(str(chat_target)).save_pretrained(place / "draft")
    return str(chat_target), str(place / "draft")


@pytest.fixture
def stub_vllm(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program `vllm` that is the first in PATH."""
    program = place / "bin" / "vllm"
    program.parent.mkdir()
    stub = shlex.join([sys.executable, f"{ROOT}/bench/stub_engine.py"])
    program.write_text(f'#!/bin/sh\nexec {stub} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(process, "POLL_SECONDS", 0.05)


def _serve(words: list[str], out: Path) -> None:
    """Runs the command in a forked process; its output goes to a file."""
    sys.stdout = sys.stderr = out.open("w", buffering=1)
    try:
        app(words)
    finally:
        sys.stdout.flush()


@pytest.mark.usefixtures("stub_vllm", "without_figures")
def test_the_commands_of_the_readme_run(place: Path, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "time_serving_engine", lambda run: None)  # README's next command
    monkeypatch.setattr(clock, "REPEATS", 2)
    (config,) = blocks("README.md", "yaml")
    (place / "support.yaml").write_text(config, encoding="utf-8")
    shutil.copy("configs/examples/chats.jsonl", "prompts.jsonl")
    target, draft = pair
    here = [f"target.path={target}", "target.dtype=float32", f"student.path={draft}"]
    more = MORE | {"train": [*here, "data.template.mode=chat", "data.too_long=drop", *SHORT]}
    port, out = str(free_port()), place / "serve.txt"
    out.touch()
    put = {"TARGET": target, "DRAFT": draft, "http://127.0.0.1:8000": f"http://127.0.0.1:{port}"}
    (ran,) = [block for block in blocks("README.md", "bash") if "understudy" in block]
    lines = commands("README.md")[-len(ran.splitlines()) :]
    with contextlib.ExitStack() as stack:
        # Answers of the stub are too short for two of them to be decoded at once.
        timed = [stack.enter_context(running_app(FakeEngine(Timed(gamma)).app())) for gamma in (0, 1, 3)]
        more["time"] = ["--load", "1,2", "--plain", timed[0], "--url", timed[1], "--url", timed[2]]
        for program, command, *words in lines:
            assert program == "understudy"
            given = [command, *(put.get(word, word) for word in words)]
            if command == "serve":
                server = stack.enter_context(forked(_serve, [*given, "--port", port], out))
                until(lambda: "answers at" in out.read_text(encoding="utf-8"), 120)
            else:
                said = understudy([*given, *more.get(command, [])])
            Path("runs/support", EngineCosts.FILE).unlink(missing_ok=command != "time")  # the stub's gamma is the run's
        assert command == "readback"
        assert "agree with replay" in said.replace("\n", " ")
        server.terminate()
        server.join(30)
        assert server.exitcode == 0, out.read_text(encoding="utf-8")
