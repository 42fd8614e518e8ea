"""How often a run reads the target's weights: a large target takes minutes each time."""

import contextlib
import sys
from pathlib import Path

import pytest

from distill import cli, respond, train
from distill.config.layout import best_student
from distill.models import target

SHORT = ["train.steps=2", "judge.every=2", "judge.prompts=4", "judge.live_prompts=2"]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the targets that were loaded, in order."""
    paths: list[str] = []
    load = target.load_model

    def counted(what: str, path: str, **how: object) -> object:
        paths.append(path)
        return load(what, path, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "load_model", counted)
    return paths


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["student.intermediate_size=24", "data.mix={target: 0.5, student: 0.5}"], 1),
        # Before training, at each of two checkpoints, and for the verdict.
        (["loss.name=ce"], 4),
    ],
)
def test_a_run_loads_a_target_that_steps_use_once(
    overrides: list[str], expected: int, tiny_config: Path, tmp_path: Path, loads: list[str]
) -> None:
    assert train.main([str(tiny_config), f"output={tmp_path}", *SHORT, *overrides]) == 0
    assert len(loads) == expected


@pytest.mark.usefixtures("without_figures")
def test_a_run_from_stored_probabilities_loads_no_target_to_train(
    tiny_config: Path, tiny_run: Path, tmp_path: Path, loads: list[str]
) -> None:
    student = ["student.init=pretrained", f"student.path={best_student(tiny_run)}"]
    overrides = [f"output={tmp_path}", "signal.k=8", "signal.source=store", "judge.live=never", *SHORT, *student]
    respond.run(tiny_config, overrides)
    assert len(loads) == 1
    assert train.main([str(tiny_config), *overrides]) == 0
    assert len(loads) == 1


def test_a_command_on_a_finished_run_loads_the_target_once(
    tiny_run: Path, tiny_target: Path, tmp_path: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, config, student = str(tiny_run), str(tiny_run / "config.yaml"), str(best_student(tiny_run))
    for words in (
        ["evaluate", run, "--config", config, "--out", str(tmp_path / "result.json")],
        ["evaluate", run, "--config", config, "--losslessness", "--prompts", "4"],
        ["compare", run, "prompt-lookup", str(tiny_run / "checkpoints" / "step-000000")],
        ["generate", str(tiny_target), "--prompt", "def f(", "--draft", run, "--max-tokens", "8"],
        ["probe", str(tiny_target), student, "--count", "4", "--max-tokens", "16"],
    ):
        loads.clear()
        monkeypatch.setattr(sys, "argv", ["understudy", *words])
        with contextlib.suppress(SystemExit):
            cli.main()
        assert len(loads) == 1, words[0]
