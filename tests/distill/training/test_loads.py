"""How often a run reads the target's weights: a large target takes minutes each time."""

import contextlib
import sys
from pathlib import Path

import pytest

from distill import cli, respond, train
from distill.config.layout import best_student
from distill.models import target


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


SHORT = ["train.steps=2", "judge.every=2", "judge.prompts=4", "judge.live_prompts=2"]


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(
    ("overrides", "first", "again"),
    [
        ([], 1, 1),
        (["signal.source=capture", "judge.live=end"], 1, 1),
        # Before training, at each of two checkpoints, and for the verdict.
        (["loss.name=ce"], 4, 2),
        (["student.intermediate_size=24", "data.mix={target: 0.5, student: 0.5}", "judge.live=never"], 1, 1),
    ],
)
def test_a_run_loads_its_target(
    overrides: list[str], first: int, again: int, tiny_config: Path, tmp_path: Path, loads: list[str]
) -> None:
    counts = []
    for _ in range(2):
        loads.clear()
        assert train.main([str(tiny_config), f"output={tmp_path}", *SHORT, *overrides]) == 0
        counts.append(len(loads))
    assert counts == [first, again]


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(
    ("overrides", "first", "again"),
    [
        # To carve the draft, at each of two checkpoints, and for the verdict.
        ([], 4, 2),
        (["judge.live=end"], 2, 2),
        (["judge.live=never"], 1, 1),
        (["judge.live=never", "student.init=pretrained"], 0, 0),
    ],
)
def test_a_run_from_stored_probabilities_loads_its_target(
    overrides: list[str], first: int, again: int, tiny_config: Path, tiny_run: Path, tmp_path: Path, loads: list[str]
) -> None:
    overrides = [f"output={tmp_path}", "signal.k=8", "signal.source=store", *SHORT, *overrides]
    overrides += [f"student.path={best_student(tiny_run)}", "student.layers=[0, -1]"] * (
        "student.init=pretrained" in overrides
    )
    respond.run(tiny_config, overrides)
    counts = [len(loads)]
    for _ in range(2):
        loads.clear()
        assert train.main([str(tiny_config), *overrides]) == 0
        counts.append(len(loads))
    assert counts == [1, first, again]


def test_a_command_on_a_finished_run_loads_the_target_once(
    tiny_run: Path, tiny_target: Path, tmp_path: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, student = str(tiny_run / "config.yaml"), str(best_student(tiny_run))
    for words in (
        ["evaluate", str(tiny_run), "--config", config, "--out", str(tmp_path / "result.json")],
        ["evaluate", str(tiny_run), "--config", config, "--losslessness", "--prompts", "4"],
        ["show", str(tiny_run)],
        ["compare", str(tiny_run), "prompt-lookup", str(tiny_run / "checkpoints" / "step-000000")],
        ["generate", str(tiny_target), "--prompt", "def f(", "--draft", str(tiny_run), "--max-tokens", "8"],
        ["probe", str(tiny_target), student, "--count", "4", "--max-tokens", "16"],
    ):
        loads.clear()
        monkeypatch.setattr(sys, "argv", ["understudy", *words])
        with contextlib.suppress(SystemExit):
            cli.main()
        assert len(loads) == 1, words[0]
