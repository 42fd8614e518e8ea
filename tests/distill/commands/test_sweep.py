"""Sweeps: what a file says, which runs it means, that they survive kills and failures, and the table at the end."""

from __future__ import annotations

import contextlib
import datetime
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from processes import forked, until
from refusals import refused
from rich.console import Console
from scipy import stats

from distill.commands.sweep.frontier import SizeAndSpeed, marked, recommended
from distill.commands.sweep.options import SweepOptions
from distill.commands.sweep.plan import Trial, finished, plan
from distill.commands.sweep.sweep import run_sweep, share_stores
from distill.commands.sweep.table import Combination, summarise, sweep_table, t_interval
from distill.commands.training_process import error_line
from distill.config.load import dump_config, load_config
from distill.faults import Interrupted
from distill.report.table import Cell
from speculative.errors import UserError
from speculative.measure.measured import DRAFT, Measured

BASE = """
name: base
output: {folder}/runs
target: {{path: nowhere}}
data: {{train: [{{path: prompts.jsonl}}]}}
tracking: {{trackers: []}}
"""
# Stands for `python -m distill.train`: takes the same arguments, leaves the same files, imports nothing heavy. The config that a
# run resolves to is put beside it by `lab`.
TRAINER = """
import json, os, shutil, signal, sys, time
from pathlib import Path

module, base, *overrides = sys.argv[2:]
values = dict(item.split("=", 1) for item in overrides)
name, seed = values["name"], int(values.get("seed", 0))
control = Path(__file__).parent
folder = control / "runs" / name
folder.mkdir(parents=True, exist_ok=True)
with (control / "calls.txt").open("a") as calls:
    calls.write(f"{name} {module} {os.environ.get('WANDB_RUN_GROUP')}\\n")
shutil.copyfile(control / "resolved" / f"{name}.yaml", folder / "config.yaml")
store = folder / "responses" / "train"
if not store.exists():
    store.mkdir(parents=True)
    (store / "manifest.json").write_text("{}")
    (store / "shard-00000.arrow").write_text(f"seed {seed}")
    (control / f"decoded-{name}").touch()
if (control / f"fail-{name}").exists():
    print("some line", file=sys.stderr)
    print("understudy: optim.lr is silly; lower it", file=sys.stderr)
    print("a line of the launcher", file=sys.stderr)
    sys.exit(2)
def stop(*_):
    (folder / "stopped").touch()
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
(folder / "started").touch()
while (control / f"hang-{name}").exists():
    time.sleep(0.01)
alpha = {"tv": 0.8, "forward_kl": 0.6, "jsd": 0.79}[json.loads(values["loss.name"])] + 0.01 * seed
ci = lambda value, half: [value - half, value + half]
row = {"way": "DRAFT", "rule": "sample", "gamma": 3, "how": {}}
judged = row | {"alpha": alpha, "alpha_ci": ci(alpha, 0.02), "tau": 4 * alpha, "tau_ci": ci(4 * alpha, 0.1)}
timed = row | {"gamma": 2, "speed_up": 2 * alpha, "speed_up_ci": ci(2 * alpha, 0.3)}
told = {"format": 2, "version": "0.2.0", "rule": "sample", "gamma": 3, "prompts": 8, "tokens": 99, "outcome": "no_speed", "headline": "No."}
alone = {"way": "target alone", "rule": "sample", "gamma": 0, "how": {}, "speed_up": 1.0, "tokens_per_second": 100.0}
timed["tokens_per_second"] = 100.0 * timed["speed_up"]
at_8 = timed | {"concurrency": 8, "speed_up": alpha, "speed_up_ci": None}
weights = folder / "best" / "student"
weights.mkdir(parents=True, exist_ok=True)
(weights / "model.safetensors").write_bytes(bytes(5000 if alpha > 0.75 else 2000))
told |= {"seconds": {"train": 1800.0, "train/forward": 900.0, "respond": 1800.0}, "run": {"1": "draft", "8": "draft"}}
(folder / "verdict.json").write_text(json.dumps(told | {"drafts": [{"way": "DRAFT"}], "measured": [judged, timed, at_8, alone]}))
"""


def lab(tmp_path: Path, **sections: Any) -> tuple[Path, str]:
    """(a sweep file, the launcher that stands for training)."""
    if not (tmp_path / "base.yaml").exists():
        (tmp_path / "base.yaml").write_text(BASE.format(folder=tmp_path), encoding="utf-8")
    (tmp_path / "trainer.py").write_text(TRAINER.replace("DRAFT", DRAFT), encoding="utf-8")
    tree = {
        "base": str(tmp_path / "base.yaml"),
        "name": "s",
        "grid": {"loss.name": ["tv", "forward_kl"], "seed": [0, 1]},
    }
    path = tmp_path / "sweep.yaml"
    written = {key: value for key, value in (tree | sections).items() if value is not None}
    path.write_text(yaml.safe_dump(written, sort_keys=False))
    resolved = tmp_path / "resolved"
    resolved.mkdir(exist_ok=True)
    with contextlib.suppress(UserError):
        for trial in plan(path)[1]:
            (resolved / f"{trial.config.name}.yaml").write_text(dump_config(trial.config), encoding="utf-8")
    return path, shlex.join([sys.executable, "-S", "-E", str(tmp_path / "trainer.py")])


def run(path: Path, launcher: str = "", dry_run: bool = False) -> tuple[list[Combination], str]:
    """(the rows, what was printed)."""
    file = io.StringIO()
    rows = run_sweep(SweepOptions(path, launcher, dry_run), Console(file=file, width=200))
    return rows, file.getvalue()


def calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "calls.txt"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def test_every_combination_is_trained_seeds_outermost_and_a_second_start_trains_nothing(tmp_path: Path) -> None:
    path, launcher = lab(tmp_path)
    rows, said = run(path, launcher)
    names = ["s-tv-seed0", "s-forward_kl-seed0", "s-tv-seed1", "s-forward_kl-seed1"]
    assert calls(tmp_path) == names
    assert all((tmp_path / "runs" / name / "verdict.json").exists() for name in names)
    assert "4 runs, 0 finished, by tau" in said
    best, other = rows
    assert (best.values, best.note, best.seeds) == ({"loss.name": "tv"}, "best", 2)
    figures = [best.figure("alpha"), best.figure("speed_up"), other.figure("alpha")]
    assert [figure.value for figure in figures if figure] == pytest.approx([0.805, 1.61, 0.605])
    written = json.loads((tmp_path / "runs" / "s" / "sweep.json").read_text())
    assert [(one["gamma"], one.get("speed_up")) for one in written["rows"][0]["measured"]] == [
        (3, None),
        (2, pytest.approx(1.61)),
    ]
    # The runs of a sweep are a group in wandb.
    assert {line.split()[2] for line in (tmp_path / "calls.txt").read_text().splitlines()} == {"s"}
    assert run(path, launcher)[0] == rows
    assert len(calls(tmp_path)) == 4


def test_a_longer_grid_trains_only_what_is_new(tmp_path: Path) -> None:
    path, launcher = lab(tmp_path)
    run(path, launcher)
    path, launcher = lab(tmp_path, grid={"loss.name": ["tv", "forward_kl", "jsd"], "seed": [0, 1]})
    rows, _ = run(path, launcher)
    assert calls(tmp_path)[4:] == ["s-jsd-seed0", "s-jsd-seed1"]
    assert [row.values["loss.name"] for row in rows] == ["tv", "jsd", "forward_kl"]
    assert [row.note for row in rows] == ["best", "within noise of the best", ""]
    base = tmp_path / "base.yaml"
    base.write_text(base.read_text() + "train: {steps: 7}\n")
    with pytest.raises(UserError, match="finished with another config"):
        run(path, launcher)
    assert len(calls(tmp_path)) == 6


def test_a_failed_run_is_noted_and_tried_again_the_next_time(tmp_path: Path) -> None:
    path, launcher = lab(tmp_path)
    (tmp_path / "fail-s-tv-seed0").touch()
    rows, said = run(path, launcher)
    assert len(calls(tmp_path)) == 4
    assert "failed: s-tv-seed0: optim.lr is silly; lower it" in said
    row = next(row for row in rows if row.values["loss.name"] == "tv")
    assert (row.seeds, row.missing) == (1, 1)
    assert "1 of 2" in said
    (tmp_path / "fail-s-tv-seed0").unlink()
    rows, said = run(path, launcher)
    assert calls(tmp_path)[4:] == ["s-tv-seed0"]
    assert "failed:" not in said
    assert [row.seeds for row in rows] == [2, 2]


def sweep(path: Path, launcher: str) -> None:
    try:
        run(path, launcher)
    except Interrupted:
        os._exit(130)


def test_a_killed_sweep_goes_on_and_never_trains_twice_at_once(tmp_path: Path) -> None:
    path, launcher = lab(tmp_path)
    hang = tmp_path / "hang-s-forward_kl-seed0"
    hang.touch()
    with forked(sweep, path, launcher):
        until((tmp_path / "runs" / "s-forward_kl-seed0" / "started").exists)
    assert calls(tmp_path) == ["s-tv-seed0", "s-forward_kl-seed0"]
    number = json.loads((tmp_path / "runs" / "s" / "logs" / "s-forward_kl-seed0.pid").read_text())[0]
    with pytest.raises(UserError, match=f"process {number} of a killed sweep still trains it"):
        run(path, launcher)
    psutil.Process(number).kill()
    until(lambda: not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE)
    hang.unlink()
    rows, _ = run(path, launcher)
    assert calls(tmp_path)[2:] == ["s-forward_kl-seed0", "s-tv-seed1", "s-forward_kl-seed1"]
    assert [row.seeds for row in rows] == [2, 2]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_the_run_and_then_the_sweep(tmp_path: Path, number: int) -> None:
    path, launcher = lab(tmp_path)
    hang = tmp_path / "hang-s-tv-seed0"
    hang.touch()
    folder = tmp_path / "runs" / "s-tv-seed0"
    with forked(sweep, path, launcher) as process:
        until((folder / "started").exists)
        os.kill(process.pid, number)
        process.join(30)
        assert process.exitcode == 130
    assert (folder / "stopped").exists()
    assert list((tmp_path / "runs" / "s" / "logs").glob("*.pid")) == []
    hang.unlink()
    assert len(run(path, launcher)[0]) == 2
    assert calls(tmp_path)[:2] == ["s-tv-seed0", "s-tv-seed0"]


def test_responses_are_made_once_per_seed_and_shared_as_files(tmp_path: Path) -> None:
    path, launcher = lab(tmp_path)
    _, said = run(path, launcher)
    assert sorted(file.name for file in tmp_path.glob("decoded-*")) == ["decoded-s-tv-seed0", "decoded-s-tv-seed1"]
    assert said.count("with the responses of an earlier run") == 2
    one, other = (tmp_path / "runs" / f"s-{loss}-seed0/responses/train" for loss in ("tv", "forward_kl"))
    assert (one / "shard-00000.arrow").stat()[stat.ST_INO] == (other / "shard-00000.arrow").stat()[stat.ST_INO]
    assert (one / "manifest.json").stat()[stat.ST_INO] != (other / "manifest.json").stat()[stat.ST_INO]


def test_responses_of_the_base_configs_own_run_are_shared_too(tmp_path: Path) -> None:
    path, launcher = lab(tmp_path, grid={"loss.name": ["tv"]})
    store = tmp_path / "runs" / "base" / "responses" / "train"
    store.mkdir(parents=True)
    for file in ("manifest.json", "shard-00000.arrow"):
        (store / file).write_text("{}")
    assert "with the responses of an earlier run" in run(path, launcher)[1]
    assert not list(tmp_path.glob("decoded-*"))


def trial_with(tmp_path: Path, name: str, *overrides: str) -> Trial:
    (tmp_path / "base.yaml").write_text(BASE.format(folder=tmp_path), encoding="utf-8")
    return Trial({}, (), load_config(tmp_path / "base.yaml", [f"name={name}", *overrides]))


@pytest.mark.parametrize(
    ("override", "shared"),
    [
        ("loss.name=tv", True),
        ("loss.temperature=2.0", True),
        ("loss.prompt_weight=0.1", True),
        ("signal={source: capture, k: 8}", True),
        ("data.mix={target: 0.5, student: 0.5}", True),
        ("train.steps=7", True),
        ("data.train.0.limit=7", True),
        ("seed=1", False),
        ("serving.temperature=0.7", False),
        ("serving.shard_size=128", False),
        ("serving.engine=vllm", True),
        ("judge.prompts=8", False),
        ("target.dtype=bfloat16", False),
        ("data.template={mode: plain}", False),
    ],
)
def test_what_is_shared_depends_on_what_made_it(tmp_path: Path, override: str, shared: bool) -> None:
    donor, taker = trial_with(tmp_path, "donor"), trial_with(tmp_path, "taker", override)
    there, here = donor.config.folder, taker.config.folder
    for store in ("responses/train", "responses/heldout"):
        (there / store).mkdir(parents=True)
        for file in ("topk-0.arrow", ".half.tmp"):
            (there / store / file).write_text(file)
    assert not share_stores(taker, [donor]), "a store without its manifest is not whole"
    for store in ("responses/train", "responses/heldout"):
        (there / store / "manifest.json").touch()
    for file in ("day.txt", "server_identity.json"):
        (there / "responses" / file).write_text("2026-02-28\n")
    assert share_stores(taker, [donor]) is shared
    for file in ("day.txt", "server_identity.json"):
        assert (here / "responses" / file).exists() is shared
    found = sorted(path.relative_to(here).as_posix() for path in here.rglob("topk-*"))
    assert found == [f"responses/{store}/topk-0.arrow" for store in ("heldout", "train") if shared]
    assert not list(here.rglob(".half.tmp"))
    assert not share_stores(taker, [donor]), "what is there stays"


def test_a_stored_signal_is_made_before_training_unless_it_was_shared(tmp_path: Path) -> None:
    path, launcher = lab(tmp_path, overrides={"signal.source": "store"}, grid={"loss.name": ["tv", "jsd"]})
    run(path, launcher)
    modules = [line.split()[1] for line in (tmp_path / "calls.txt").read_text().splitlines()]
    assert modules == ["distill.respond", "distill.train"] * 2


def test_a_dry_run_only_says_what_it_would_do(tmp_path: Path) -> None:
    path, launcher = lab(tmp_path, overrides={"train.steps": 5})
    _, said = run(path, launcher, dry_run=True)
    assert "4 runs, 0 finished" in said
    assert 'to do     s-tv-seed0  train.steps=5 seed=0 loss.name="tv"' in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"grid": {"loss.nmae": ["tv"]}}, r"unknown key `loss\.nmae`: did you mean `name`"),
        ({"grid": {"loss.name": ["tvv"]}}, "loss.name"),
        ({"overrides": {"train.stesp": 1}}, "did you mean `steps`"),
        ({"gird": {"loss.name": ["tv"]}}, "unknown key `gird`: did you mean `grid`"),
        ({"grid": None}, "`grid` is missing"),
        ({"grid": {}}, "`grid` = {}: dictionary should have at least 1 item"),
        ({"grid": {"loss.name": []}}, "at least one value"),
        ({"grid": {"loss.name": "tv"}}, "should be a list"),
        ({"grid": {"loss.name": ["tv", "tv"]}}, "listed twice"),
        ({"grid": {"name": ["a"]}}, "names its runs itself"),
        ({"overrides": {"seed": 3}}, "both in grid and in overrides"),
        ({"metric": "tua"}, '`metric` = "tua": did you mean `tau`?'),
        ({"name": "a/b"}, '`name` = "a/b": string should match'),
        ({"base": "nowhere.yaml"}, "cannot read the config"),
        (
            {"grid": {"train.steps": [datetime.date(2024, 1, 1)]}},
            r"train.steps: .* date .*; write keys and dates in quotes",
        ),
        ({"overrides": {"train.steps": datetime.date(2024, 1, 1)}}, r"train.steps: .* date "),
        ({"grid": {"target": [None]}}, "`target` = null"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(tmp_path: Path, sections: dict[str, Any], words: str) -> None:
    path, launcher = lab(tmp_path, **sections)
    assert re.search(words, refused(run, path, launcher))
    assert calls(tmp_path) == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("launcher", ["acclerate launch", 'accelerate "launch'])
def test_a_launcher_that_cannot_start_is_one_line(tmp_path: Path, launcher: str) -> None:
    path, _ = lab(tmp_path)
    assert refused(run, path, launcher).startswith(f"--launcher {launcher}: ")


def test_a_sweep_named_like_a_run_is_refused(tmp_path: Path) -> None:
    path, _ = lab(tmp_path, name="base")
    (tmp_path / "runs" / "base").mkdir(parents=True)
    (tmp_path / "runs" / "base" / "config.yaml").touch()
    with pytest.raises(UserError, match="contains a training run"):
        plan(path)


def test_names_are_readable_and_distinct_and_values_reach_the_config(tmp_path: Path) -> None:
    grid = {
        "loss.temperature": [1.0, 0.5],
        "loss.mix": [{"tv": 0.5, "forward_kl": 1.0}, {"tv": 1.0}],
        "optim.lr": [1e-5],
        "student.layers": [[0, -1], [0, 5, -1]],
    }
    path, _ = lab(tmp_path, grid=grid)
    trials = plan(path)[1]
    names = [trial.config.name for trial in trials]
    assert names[0] == "s-temperature1.0-mix-tv-0.5-forward_kl-1.0-layers-0--1"
    assert len(set(names)) == 8
    assert (trials[0].config.optim.lr, trials[0].config.loss.mix) == (1e-5, {"tv": 0.5, "forward_kl": 1.0})
    path, _ = lab(tmp_path, grid={"data.train.0.path": ["a/x.jsonl", "b/x.jsonl", "y" * 300]})
    names = [trial.config.name for trial in plan(path)[1]]
    assert len(set(names)) == 3
    assert all(len(name) < 120 for name in names)


def test_the_shipped_examples_are_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[3])
    assert len(plan(Path("configs/sweeps/grid.yaml"))[1]) == 18
    assert len(plan(Path("configs/sweeps/shapes.yaml"))[1]) == 3
    assert len(plan(Path("configs/sweeps/prompts.yaml"))[1]) == 4
    assert len(plan(Path("configs/sweeps/smollm2.yaml"))[1]) == 4


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_the_interval_over_seeds_is_students(values: list[float]) -> None:
    low, high = t_interval(values) or [0.0, 0.0]
    spread = np.std(values, ddof=1) / math.sqrt(len(values))
    wanted = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=spread) if spread > 0 else (low, high)
    assert (low, high) == pytest.approx(wanted, abs=1e-9)
    assert low <= np.mean(values) + 1e-9
    assert t_interval(values[:1]) is None


def rows_from(tmp_path: Path, taus: dict[str, list[float]]) -> tuple[Any, list[Combination]]:
    seeds = list(range(max(map(len, taus.values()))))
    path, _ = lab(tmp_path, grid={"loss.name": list(taus), "seed": seeds})
    sweep, trials = plan(path)
    found: dict[str, list[Measured]] = {}
    for trial in trials:
        values = taus[trial.values["loss.name"]]
        if trial.values["seed"] < len(values):
            tau = values[trial.values["seed"]]
            found[trial.config.name] = [Measured(DRAFT, "sample", alpha=0.5, tau=tau, tau_ci=(tau - 0.1, tau + 0.1))]
    return sweep, summarise(sweep, trials, found)


def test_what_cannot_be_distinguished_from_the_best_is_marked(tmp_path: Path) -> None:
    taus = {"tv": [2.0, 2.1, 2.2], "jsd": [2.05, 2.1, 2.0], "forward_kl": [1.0, 1.05, 1.1], "ce": []}
    sweep, rows = rows_from(tmp_path, taus)
    notes = [(row.values["loss.name"], row.note) for row in rows]
    assert notes == [("tv", "best"), ("jsd", "within noise of the best"), ("forward_kl", ""), ("ce", "")]
    console = Console(file=io.StringIO(), width=200)
    console.print(sweep_table(sweep, rows))
    said = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "within noise of the best" in said
    assert "0 of 3" in said
    assert "picked out of 3;" in " ".join(said.split())


def test_a_sweep_ends_in_a_frontier_of_size_and_speed(tmp_path: Path) -> None:
    path, launcher = lab(tmp_path, grid={"loss.name": ["tv", "jsd", "forward_kl"]}, price_per_hour=3.6)
    _, said = run(path, launcher)
    told = json.loads((tmp_path / "runs/s/sweep.json").read_text())["points"]
    assert [(one["values"]["loss.name"], one["bytes"], one["frontier"]) for one in told] == [
        ("forward_kl", 2000, True),
        ("tv", 5000, True),
        ("jsd", 5000, False),
    ]
    first = told[0]
    assert first["speed_ups"] == {"1": [1.2, pytest.approx([0.9, 1.5])], "8": [0.6, None]}
    assert first["hours"] == pytest.approx(1.0)
    assert first["million"] == pytest.approx(1e6 * 3.6 / 3600 / 120)
    assert "Recommended: name forward_kl: 1.20x" in said
    assert "not certainly slower than the fastest (name tv, 1.60x)" in said
    assert (tmp_path / "runs/s/frontier.png").read_bytes().startswith(b"\x89PNG")


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=12))
def test_the_frontier_is_what_no_other_point_beats(pairs: list[tuple[int, int]]) -> None:
    points = [SizeAndSpeed({}, None, None, None, {1: (float(speed), None)}, size, 0.0, None) for size, speed in pairs]
    found = [one for one in marked(points) if one.frontier]
    for point in points:
        assert any(one.bytes <= point.bytes and one.speed_up >= point.speed_up for one in found)
    # Along the frontier, larger drafts are faster.
    sizes = sorted({(one.bytes, one.speed_up) for one in found})
    assert all(small[0] < large[0] and small[1] < large[1] for small, large in itertools.pairwise(sizes))


def test_the_recommended_draft_is_the_smallest_that_may_be_the_fastest() -> None:
    def point(size: int, speed: float, half: float) -> SizeAndSpeed:
        return SizeAndSpeed({"k": size}, None, None, None, {1: (speed, (speed - half, speed + half))}, size, 0.0, None)

    points = marked([point(1, 1.0, 0.1), point(2, 1.4, 0.15), point(4, 1.6, 0.1)])
    found = recommended(points)
    assert found is not None
    assert found[0].bytes == 2
    sure = recommended(marked([point(1, 1.0, 0.01), point(2, 1.4, 0.01), point(4, 1.6, 0.01)]))
    assert sure is not None
    assert sure[0].bytes == 4
    assert "the smallest draft that is the fastest" in sure[1]
    assert recommended([]) is None


def test_one_seed_has_the_judges_interval(tmp_path: Path) -> None:
    sweep, rows = rows_from(tmp_path, {"tv": [2.0], "jsd": [1.85], "forward_kl": [1.0]})
    assert [row.note for row in rows] == ["best", "within noise of the best", ""]
    assert rows[0].figure("tau") == Cell(2.0, (1.9, 2.1))
    assert rows[0].figure("speed_up") is None
    _, rows = rows_from(tmp_path, {"tv": [2.0]})
    assert "picked out of" not in str(sweep_table(sweep, rows).caption)


def test_the_error_line_is_ours_where_there_is_one() -> None:
    assert error_line("a\nunderstudy: mend it\nTraceback\n", 2) == "mend it"
    assert error_line("a\nValueError: x\n\n", 1) == "ValueError: x"
    ranks = (
        "understudy: mend it\nunderstudy: another rank died\nRoot Cause\n  traceback : understudy: mend it\n======\n"
    )
    assert error_line(ranks, 1) == "mend it"
    assert error_line("", 1) == "exit status 1"
    assert error_line("working\n", -9) == "killed by signal 9 (working)"


def test_real_runs_share_the_targets_answers(
    tiny_config: Path, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a project that has a `data` of its own: the process of a run imports nothing from the working directory."""
    (tmp_path / "data.py").write_text("raise SystemExit('the wrong data')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "sweep.yaml"
    # Nothing is timed: that is most of so small a run.
    overrides = {"output": str(tmp_path), "train.steps": 1, "judge.every": 1, "judge.live": "never"}
    grid = {"loss.name": ["tv", "forward_kl"]}
    tree = {"base": str(tiny_config), "name": "real", "grid": grid, "overrides": overrides}
    path.write_text(json.dumps(tree))
    first = plan(path)[1][0].config
    shutil.copytree(tiny_run, first.folder, symlinks=True)
    (first.folder / "config.yaml").write_text(dump_config(first), encoding="utf-8")
    rows, said = run(path)
    assert "2 runs, 1 finished" in said
    assert "failed:" not in said
    assert all(finished(trial) for trial in plan(path)[1])
    shards = [sorted((tmp_path / f"real-{loss}/responses").rglob("shard-*.arrow")) for loss in ("tv", "forward_kl")]
    assert len(shards[0]) == len(shards[1]) > 1
    for one, other in zip(*shards, strict=True):
        assert one.samefile(other)
    assert rows[0].figure("tau") is not None


def test_width_and_window_share_responses_and_a_context_length_does_not(tmp_path: Path) -> None:
    architecture = {"model_type": "mistral", "hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}
    for field, values, keys in (("hidden_size", [32, 64], 1), ("max_position_embeddings", [64, 128], 2)):
        student = {"init": "config", "architecture": architecture}
        grid = {f"student.architecture.{field}": values}
        trials = plan(lab(tmp_path, grid=grid, overrides={"student": student})[0])[1]
        assert [trial.config.student.architecture[field] for trial in trials] == values
        assert len({trial.answers_key for trial in trials}) == keys
