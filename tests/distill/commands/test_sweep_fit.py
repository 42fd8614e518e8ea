"""`sweep --fit`: the schedule of the search, real tiny runs through all rungs, a kill in every place, and mistakes."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from rich.console import Console
from safetensors.torch import load_file
from tiny_training import TOKENS, forget_accelerators, small_config, tiny_tokenizer

from distill import train
from distill.commands import training_process
from distill.commands.compare.compare import CompareOptions, compare_command
from distill.commands.options import SweepOptions
from distill.commands.sweep import fit, sweep
from distill.commands.sweep.fit import Rung, minutes_of, rungs_of, steps_at
from distill.commands.sweep.plan import plan
from distill.config.layout import best_student, list_steps
from distill.faults import Interrupted
from distill.models.student import from_architecture
from distill.run.verdict_record import load_verdict
from speculative.drafters.draft import Draft
from speculative.engine.windows import attention_windows

pytestmark = pytest.mark.usefixtures("without_figures")  # of the runs
MINUTES = 0.2
SHAPES = {"student.layers": [[0], [0, 1], [0, 1, 2]]}


@given(st.integers(2, 200), st.floats(1e-3, 1e4))
def test_rungs_halve_the_shapes_and_spend_the_minutes_evenly(shapes: int, minutes: float) -> None:
    rungs = rungs_of(shapes, minutes)
    assert rungs[0].shapes == shapes
    assert rungs[-1].shapes == 2
    assert len(rungs) == math.ceil(math.log2(shapes))
    for one, other in itertools.pairwise(rungs):
        assert other.shapes == math.ceil(one.shapes / 2)
        assert other.minutes >= one.minutes
    assert [rung.shapes * rung.minutes for rung in rungs] == pytest.approx([minutes / len(rungs)] * len(rungs))


@given(st.integers(2, 200), st.floats(1e-2, 1e3), st.floats(1e-3, 10.0))
def test_a_shape_never_trains_longer_than_its_share(shapes: int, minutes: float, step_seconds: float) -> None:
    rungs = rungs_of(shapes, minutes)
    steps, spent = steps_at(rungs, step_seconds), 0.0
    for rung, step in zip(rungs, steps, strict=True):
        spent += 60 * rung.minutes
        assert step * step_seconds <= spent * (1 + 1e-6)
        assert (step + 1) * step_seconds > spent * (1 - 1e-6)
    assert steps == sorted(steps)


def test_steps_do_not_depend_on_how_minutes_are_summed() -> None:
    assert steps_at([Rung(4, 0.1), Rung(2, 0.2)], 0.1) == [60, 180]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", ""])
def test_minutes_must_be_a_positive_number(text: str) -> None:
    assert "--fit" in refused(minutes_of, text)


class Children:
    """Runs the commands of a sweep in this process. ``kill``: the number of the command that is interrupted instead."""

    def __init__(self) -> None:
        self.words: list[list[str]] = []
        self.kill: int | None = None

    def __call__(self, words: Sequence[str], name: str, log: Path, group: str = "") -> None:
        self.words.append(list(words))
        if len(self.words) == self.kill:
            raise Interrupted("stopped")
        if "compare" in words:
            at, trusted = words.index("--out"), "--trust-remote-code" in words
            paths, out = words[words.index("compare") + 1 : at], Path(words[at + 1])
            compare_command(CompareOptions(list(paths), out=out, trust_remote_code=trusted))
            return
        forget_accelerators()
        status = train.main(words[words.index("distill.train") + 1 :])
        if status:
            raise training_process.TrainingFailed(f"status {status}")


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    made = Children()
    monkeypatch.setattr(training_process, "child", made)
    monkeypatch.setattr(fit, "child", made)
    return made


@pytest.fixture
def without_frontier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "plot_frontier", lambda *_: None)


@pytest.fixture
def timed_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A step takes this long, whatever the machine does."""

    def given(seconds: float) -> None:
        monkeypatch.setattr(fit, "min", lambda values: seconds, raising=False)

    return given


def sweep_file(folder: Path, grid: dict[str, Any] = SHAPES, **sections: Any) -> Path:
    base = small_config(folder, tracking={"trackers": []}, **sections)
    path = folder / "sweep.yaml"
    path.write_text(json.dumps({"base": str(base), "name": "s", "grid": grid, "metric": "speed_up"}), encoding="utf-8")
    return path


def run(path: Path, minutes: Any = MINUTES, dry_run: bool = False) -> str:
    """What was printed."""
    file = io.StringIO()
    sweep.run_sweep(SweepOptions(path, dry_run=dry_run, fit=str(minutes)), Console(file=file, width=240))
    return file.getvalue()


def test_a_search_from_the_grid_to_the_recommendation(
    tmp_path: Path, children: Children, timed_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_at(0.5)  # rung 1: 2 s for each of three, 4 steps; rung 2: 3 s more, 10 steps
    said = run(sweep_file(tmp_path))
    assert "3 runs, 0.2 minutes of training in all" in said
    told = json.loads((tmp_path / "s-fit" / "sweep.json").read_text())
    (rung,), names = told["fit"]["rungs"], told["fit"]["shapes"]
    assert sorted((row["name"], row["steps"]) for row in rung) == [(name, 4) for name in sorted(names)]
    kept = [row["name"] for row in rung if row["kept"]]
    dropped = [row for row in rung if not row["kept"]]
    assert len(kept) == 2
    assert dropped[0]["speed_up"] <= min(row["speed_up"] for row in rung if row["kept"])
    assert [row["speed_up"] for row in rung] == sorted((row["speed_up"] for row in rung), reverse=True)
    for name in names:
        folder = tmp_path / name
        assert list_steps(folder) == ([0, 4, 10] if name in kept else [0, 4])
        assert (folder / "verdict.json").exists() == (name in kept)
    assert sorted(run for row in told["rows"] for run in row["runs"]) == sorted(kept)
    assert [point["c"] is not None for point in told["points"]] == [True, True]
    assert "rung 1 of 2: 3 shapes, 0.03 min of training each" in said
    assert said.count("kept") == 2
    assert "Recommended: layers" in said
    assert (tmp_path / "s-fit" / "frontier.png").exists()
    compared = json.loads((tmp_path / "s-fit" / "rung-1.json").read_text())
    taus = {way["way"]: way["taus"] for way in compared["ways"]}
    for row in rung:
        of_way = next(tau for way, tau in taus.items() if row["name"] in way)
        assert row["tau"] == of_way[row["gamma"]]
    assert load_verdict(tmp_path / kept[0]).headline
    # A pause changes nothing: the same weights as in one go.
    words = next(words for words in reversed(children.words) if f"name={json.dumps(kept[0])[1:-1]}" in words)
    forget_accelerators()
    straight = [word for word in words[words.index("distill.train") + 1 :] if not word.startswith("name=")]
    with monkeypatch.context() as patched:
        patched.setattr(train, "conclude", lambda *_: None)
        assert train.main([*straight, "name=straight"]) == 0
    of_both = [load_file(best_student(tmp_path / name) / "model.safetensors") for name in (kept[0], "straight")]
    assert of_both[0].keys() == of_both[1].keys()
    assert all(torch.equal(value, of_both[1][name]) for name, value in of_both[0].items())
    # The same command again trains nothing and says the same table.
    count = len(children.words)
    assert run(sweep_file(tmp_path)).count("kept") == 2
    assert len(children.words) == count
    assert "this one differs" in refused(run, sweep_file(tmp_path), 0.3)


@pytest.mark.usefixtures("without_frontier")
def test_a_killed_search_goes_on_where_it_was(tmp_path: Path, children: Children, timed_at: Any) -> None:
    timed_at(0.5)
    path = sweep_file(tmp_path)
    for kill in (2, 5, 8, 10, 13):  # while timing, in the first rung, again, in its comparison, in the last rung
        children.kill = kill
        with pytest.raises(Interrupted):
            run(path)
    children.kill = None
    run(path)
    told = json.loads((tmp_path / "s-fit" / "sweep.json").read_text())["fit"]
    # Each command is given once, and once more if it was the killed one.
    given = {tuple(words) for words in children.words}
    assert len(children.words) == len(given) + 5
    assert len(told["rungs"]) == 1
    assert sum(row["kept"] for row in told["rungs"][0]) == 2


@pytest.mark.usefixtures("without_frontier")
def test_a_shape_that_fails_is_dropped_and_the_others_go_on(
    tmp_path: Path, children: Children, timed_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_at(0.5)
    inner = children.__call__

    def failing(words: Sequence[str], *others: Any) -> None:
        if "student.layers=[0, 1, 2]" in words and "train.pause_at=4" in words:
            raise training_process.TrainingFailed("out of memory")
        inner(words, *others)

    monkeypatch.setattr(training_process, "child", failing)
    trusting = {"path": str(tmp_path / "target"), "trust_remote_code": True}
    said = run(sweep_file(tmp_path, target=trusting))
    assert "failed: s-fit-layers-0-1-2-: out of memory" in said.replace("layers-0-1-2:", "layers-0-1-2-:")
    told = json.loads((tmp_path / "s-fit" / "sweep.json").read_text())
    assert len(told["fit"]["rungs"][0]) == 2
    assert len(told["rows"]) == 2


@pytest.mark.parametrize(
    ("grid", "minutes", "words"),
    [
        ({"student.layers": [[0]]}, 1, "one combination"),
        ({**SHAPES, "seed": [0, 1]}, 1, "remove `seed`"),
        ({"train.steps": [5, 9]}, 1, "sets train.steps itself"),
        ({"serving.temperature": [0.5, 1.0]}, 1, "same responses"),
        (SHAPES, "no", "above 0"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(
    tmp_path: Path, children: Children, grid: dict[str, Any], minutes: Any, words: str
) -> None:
    assert words in refused(run, sweep_file(tmp_path, grid), minutes)
    assert children.words == []
    assert not (tmp_path / "s-fit").exists()


def test_too_few_minutes_for_a_step_are_refused_with_the_least(
    tmp_path: Path, children: Children, timed_at: Any
) -> None:
    timed_at(100.0)
    path = sweep_file(tmp_path, judge={"load": [2]})  # which needs live decoding
    said = refused(run, path, 1)
    assert "gives each shape 10 s, but a step of" in said
    assert "more than 10 minutes" in said
    timed_at(0.5)
    assert "more than 10 minutes" in refused(run, path, 1), "steps are timed once"


def test_timed_steps_leave_no_rollouts(tmp_path: Path, children: Children, timed_at: Any) -> None:
    timed_at(0.5)
    children.kill = 3  # the first rung, after both shapes were timed
    path = sweep_file(
        tmp_path,
        {"student.layers": [[0], [0, 1]]},
        data={"mix": {"target": 0.5, "student": 0.5}, "rollouts": {"prompts": 4, "max_tokens": 4}},
    )
    with pytest.raises(Interrupted):
        run(path)
    for name in json.loads((tmp_path / "s-fit" / "sweep.json").read_text())["fit"]["step_seconds"]:
        assert not (tmp_path / name / "rollouts").exists()


def test_a_dry_run_trains_nothing(tmp_path: Path, children: Children) -> None:
    assert "to do     s-fit-layers-0" in run(sweep_file(tmp_path), dry_run=True)
    assert children.words == []


def test_width_and_window_are_shapes_too_and_share_responses(tmp_path: Path) -> None:
    architecture = {"model_type": "mistral", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    student = {
        "init": "config",
        "architecture": architecture | {"num_key_value_heads": 1, "max_position_embeddings": 64},
    }
    grid = {"student.architecture.hidden_size": [32, 64], "student.architecture.sliding_window": [16, None]}
    trials = plan(sweep_file(tmp_path, grid, student=student))[1]
    shapes = [trial.config.student.architecture or {} for trial in trials]
    found = [(one["hidden_size"], one["sliding_window"]) for one in shapes]
    assert found == [(32, 16), (32, None), (64, 16), (64, None)]
    assert len({trial.answers_key for trial in trials}) == 1
    grid = {"student.architecture.max_position_embeddings": [64, 128]}
    assert len({trial.answers_key for trial in plan(sweep_file(tmp_path, grid, student=student))[1]}) == 2
    made = [from_architecture(one, tiny_tokenizer(), TOKENS, 0) for one in shapes[:2]]
    assert [attention_windows(model) for model in made] == [[16], [None]]
    assert Draft(made[0]).shape != Draft(made[1]).shape, "their steps are timed apart"
