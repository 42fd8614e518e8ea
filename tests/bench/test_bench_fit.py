"""The bench that asks whether a found shape beats the one chosen by hand: what it starts, and its arithmetic."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench_modules import bench
from tiny_training import small_config

from speculative.errors import UserError

LAYERS, SPEEDS = ([0], [0, -1]), {"by_hand": 1.5, "found": 1.65}


class Program:
    """`understudy`, as far as this bench needs it."""

    def __init__(self, folder: Path, fastest: list[int]) -> None:
        self.folder, self.fastest, self.trained = folder, fastest, list[list[str]]()

    def run(self, words: list[Any], check: bool) -> None:
        assert check
        command, *rest = map(str, words[1:])
        if command == "sweep":
            rows = [
                {"values": {"student.layers": layers}, "measured": [
                    {"way": "target alone", "concurrency": 1, "speed_up": 9.0}, {"way": "draft", "concurrency": 1},
                    {"way": "draft", "concurrency": 8, "speed_up": 9.0}, {"way": "draft", "concurrency": 1, "speed_up": speed},
                ]}
                for layers, speed in ((LAYERS[0], 1.2), (LAYERS[1], 1.1))
            ]  # fmt: skip
            if self.fastest == LAYERS[1]:
                rows[1]["measured"][-1]["speed_up"] = 1.4
            rung = [{"name": str(layers), "values": {"student.layers": layers}} for layers in LAYERS]
            fit = {"rungs": [rung], "step_seconds": {str(LAYERS[0]): 0.5, str(LAYERS[1]): 1.0}}
            place = self.folder / "shapes-fit"
            place.mkdir()
            (place / "sweep.json").write_text(json.dumps({"rows": rows, "fit": fit, "failed": {}}))
        elif command == "train":
            self.trained.append(rest)
        else:
            names = [Path(one).name.split("-")[0] for one in rest[: rest.index("--out")]]
            ways = [
                {"best_gamma": 3, "best_speed_up": SPEEDS[one], "cost_ratio": 0.1, "parameters": 1} for one in names
            ]
            gain = {"alpha": {"gain": 0.0}, "speed_up": {"gain": 0.15, "ci": [0.1, 0.2]}}
            told = [{"text": "held-out", "alpha": 0.8} for _ in names]
            found = {"ways": ways, "measured": told, "differences": [gain | {"text": "held-out"}]}
            Path(rest[-1]).write_text(json.dumps(found))


def measured(folder: Path, fastest: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[Program, Any]:
    module, program = bench("fit"), Program(folder, fastest)
    monkeypatch.setattr(module, "subprocess", program)
    base = str(small_config(folder))
    grid = [f"student.layers={json.dumps(LAYERS)}"]
    module.main(base, grid, train_minutes=1.0, seeds="0,7", folder=folder / "shapes", out=folder / "fit.json")
    return program, json.loads((folder / "fit.json").read_text())


def test_both_shapes_train_equally_long_and_are_compared_by_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, found = measured(tmp_path, LAYERS[1], monkeypatch)
    assert found["steps"] == {"by_hand": 120, "found": 60}
    trained = [{key: json.loads(value) for key, value in (word.split("=") for word in words[1:] if "name" not in word and "output" not in word)} for words in program.trained]  # fmt: skip
    asked = [(one["student.layers"], one["train.steps"], one["seed"]) for one in trained]
    assert asked == [([0], 120, 0), ([0, -1], 60, 0), ([0], 120, 7), ([0, -1], 60, 7)]
    assert found["ratio"] == {"mean": pytest.approx(0.1), "half_width": pytest.approx(0.0, abs=1e-12)}
    assert [row["speed_up_gain"]["ci"] for row in found["seeds"]] == [[0.1, 0.2]] * 2


def test_a_search_that_finds_the_shape_chosen_by_hand_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="found the shape chosen by hand"):
        measured(tmp_path, LAYERS[0], monkeypatch)
