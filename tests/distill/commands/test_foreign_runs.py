"""Runs and exports of others: their code does not run unless this command line says so, and ours say nothing of our machine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers.dynamic_module_utils
from refusals import refused
from rich.console import Console

from distill.commands import options as of
from distill.commands.compare.compare import compare
from distill.commands.compare.options import CompareOptions
from distill.commands.drift.drift import drift
from distill.commands.drift.options import DriftOptions
from distill.commands.evaluate.evaluate import evaluate_command
from distill.commands.evaluate.options import EvaluateOptions
from distill.commands.export import check_export, export, export_run
from distill.commands.readback.options import ReadbackOptions
from distill.commands.readback.readback import readback
from distill.commands.show import show
from distill.config.load import load_config
from distill.live.options import ExportTrafficOptions, RefreshOptions
from distill.live.refresh.refresh import refresh_command
from distill.live.traffic.export import export_command
from distill.live.traffic.record import prepare_directory
from distill.models.target import Target
from distill.run.heldout_set import load_heldout_set


@pytest.fixture
def foreign(tmp_path: Path, tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a target whose code leaves a file where it ran; its config says that such code is trusted."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    config = load_config(tiny_run / "config.yaml")
    run, target = tmp_path / "run", tmp_path / "target"
    shutil.copytree(tiny_run, run, symlinks=True)
    shutil.copytree(config.target.path, target)
    evil = "import transformers\nclass Evil(transformers.LlamaConfig):\n    pass\n"
    (target / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{evil}")
    saved = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(saved | {"auto_map": {"AutoConfig": "evil.Evil"}}))
    text = (run / "config.yaml").read_text().replace(config.target.path, str(target))
    (run / "config.yaml").write_text(text.replace("trust_remote_code: false", "trust_remote_code: true"))
    assert load_config(run / "config.yaml").target.trust_remote_code
    prepare_directory(tmp_path / "log")
    return run


def _written(path: Path) -> Path:
    path.write_text(
        json.dumps({"domain": "x", "response": {"timings": {"draft_n": 6, "draft_n_accepted": 3, "predicted_n": 5}}})
        + "\n"
    )
    return path


COMMANDS: dict[str, Callable[[Path, Path], Any]] = {
    "readback": lambda run, to: readback(ReadbackOptions("http://127.0.0.1:9", run)),
    "export": lambda run, to: export(of.ExportOptions(run, to / "out")),
    "evaluate": lambda run, to: evaluate_command(
        EvaluateOptions(str(run), str(run / "config.yaml"), out=to / "r.json")
    ),
    "export --check": lambda run, to: check_export(of.ExportOptions(run), run),
    "compare": lambda run, to: compare(CompareOptions([str(run), "prompt-lookup"]), Console(quiet=True)),
    "drift": lambda run, to: drift(DriftOptions(run, log=_written(to / "log.jsonl"))),
    "refresh": lambda run, to: refresh_command(RefreshOptions(run), Console(quiet=True)),
    "traffic export": lambda run, to: export_command(
        ExportTrafficOptions(to / "log", run, to / "out"), Console(quiet=True)
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_remote_code_is_trusted_on_this_command_line_alone(command: str, foreign: Path, tmp_path: Path) -> None:
    text = refused(COMMANDS[command], foreign, tmp_path)
    assert f"{foreign / 'config.yaml'}: target.trust_remote_code is true" in text
    assert "--trust-remote-code" in text
    assert not (tmp_path / "ran").exists()


def test_showing_a_run_loads_nothing_of_its_target(foreign: Path, tmp_path: Path) -> None:
    show(of.ShowRunOptions(foreign))
    assert not (tmp_path / "ran").exists()


def test_it_runs_where_the_message_says(foreign: Path, tmp_path: Path) -> None:
    """So the attack above is one."""
    assert load_heldout_set(foreign, trusted=True).target.side
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
    overrides = ["target.trust_remote_code=false"]
    assert Target(load_config(foreign / "config.yaml", overrides).target, "cpu").tokenizer  # type: ignore[arg-type]
    assert not (tmp_path / "ran").exists()


def test_an_export_says_nothing_of_this_machine(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths in the run's config, its command line, the student and the prompts are of a temporary folder and a home in it."""
    config = load_config(tiny_run / "config.yaml")
    run = tmp_path / "home" / "someone" / "my run"
    shutil.copytree(tiny_run, run, symlinks=True)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("base: null", f"base: {run}"))
    for path in run.glob("checkpoints/*/provenance.json"):
        told = json.loads(path.read_text()) | {
            "argv": [f"{run}/train.py", f"a={{path: {run}}}", f"x={run.parent}/y", "~/secret/z", "/höme/my secret/y"]
        }
        path.write_text(json.dumps(told))
    made = export_run(of.ExportOptions(run, run / "export"))
    said = {path: path.read_text(errors="replace") for path in made.path.rglob("*") if path.is_file()}
    secrets = [
        str(tmp_path),
        str(tmp_path.parent),
        config.target.path,
        str(Path.home()) + os.sep,
        str(Path(config.target.path).parent),
        "secret",
    ]
    found = [(path.name, secret) for path, text in said.items() for secret in secrets if secret in text]
    assert found == []
    serving = json.loads((made.path / "serving.json").read_text())
    assert serving["target"]["name"] == Path(config.target.path).name
    assert json.loads((made.path / "provenance.json").read_text())["argv"][2:] == ["x=y", "z", "y"]
