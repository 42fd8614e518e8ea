"""metrics.jsonl, wandb without a login, tensorboard."""

import builtins
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused
from tiny_training import fit, fresh_accelerator, make_loop, metrics_of, run_config
from wandb_records import records_of

from distill.config.layout import METRICS, WANDB_ID
from distill.training.tracking import (
    SECTIONS,
    SUMMARIES,
    TRACKED_NAMES,
    Metrics,
    flat_config,
    judged_scalars,
    notes_of,
    start_trackers,
    tracked,
)


def metrics_in(folder: Path, **options: Any) -> Metrics:
    return Metrics(folder, fresh_accelerator(folder), **{"log_every": 1, "has_trackers": False, **options})


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "torn", ['{"step": 3, "lo', '{"step": 3', "{", '{"step": 3, "loss": 0.12', '{"step": 3, "loss": 1.0}']
)
def test_a_torn_last_line_does_not_survive_a_resume(tmp_path: Path, torn: str) -> None:
    metrics = metrics_in(tmp_path)
    for step in (1, 2):
        metrics.write(step, {"loss": 1.0 / step})
    with (tmp_path / METRICS).open("a") as file:
        file.write(torn)
    metrics.cut_after(2)
    metrics.write(3, {"loss": 0.3})
    assert lines_of(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": 0.3}]


def test_lines_past_the_resumed_step_are_cut(tmp_path: Path) -> None:
    metrics = metrics_in(tmp_path)
    metrics.cut_after(0)  # no file yet
    for step in range(1, 6):
        metrics.write(step, {"loss": 1.0})
    metrics.cut_after(3)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    class Other:
        is_main_process = False

    metrics = Metrics(tmp_path, Other(), 1, False)  # type: ignore[arg-type]
    metrics.write(1, {"loss": 0.5})
    metrics.cut_after(0)
    assert not (tmp_path / METRICS).exists()


class RecordingTracker:
    def __init__(self, name: str) -> None:
        self.name = name
        self.logged: list[tuple[int | None, dict[str, Any]]] = []

    def log(self, values: dict[str, Any], step: int | None) -> None:
        self.logged.append((step, values))


def test_trackers_get_other_names_than_the_file() -> None:
    line = {
        "loss": 0.5, "alpha_train": 0.7, "lr": 1e-3, "grad_norm": 2.0, "skipped": True, "tokens_per_second": 900.0, "mfu": 0.4,
        "peak_memory_mib": 512.0, "seconds": {"data": 0.1, "teacher": 0.2}, "judge/tau_replay": 2.5, "judge/judging_seconds": 3.0, "new_key": 1,
        "note": "no number",
    }  # fmt: skip
    assert tracked(4, line) == {
        "train/step": 4, "train/loss": 0.5, "train/alpha": 0.7, "train/lr": 1e-3, "train/grad_norm": 2.0, "train/skipped": True,
        "speed/tokens_per_second": 900.0, "speed/mfu": 0.4, "memory/peak_mib": 512.0, "time/data": 0.1, "time/teacher": 0.2,
        "judge/tau_replay": 2.5, "time/judge": 3.0, "train/new_key": 1,
    }  # fmt: skip


def test_a_judgement_is_logged_with_its_intervals() -> None:
    record = {
        "alpha": 0.6,
        "alpha_ci": [0.5, 0.7],
        "tau": 2.0,
        "tau_ci": None,
        "domains": {},
        "rule": "sample",
        "ranks": 2,
    }
    by_replay = {
        "judge/alpha": 0.6, "judge/alpha_low": 0.5, "judge/alpha_high": 0.7, "judge/tau_replay": 2.0, "judge/ranks": 2,
    }  # fmt: skip
    assert judged_scalars(record) == by_replay
    check = {"prompts": 32, "tau": 2.1, "tau_ci": [1.9, 2.3], "replay": {"z": -0.5}}
    assert judged_scalars(record | {"live_check": check}) == by_replay | {
        "judge/tau_live": 2.1, "judge/tau_live_low": 1.9, "judge/tau_live_high": 2.3, "judge/live_prompts": 32, "judge/z": -0.5,
    }  # fmt: skip
    without_law = judged_scalars(record | {"live_check": check | {"replay": None}})
    assert "judge/z" not in without_law


def test_every_name_lies_in_a_section_that_has_panels() -> None:
    names = {*TRACKED_NAMES.values(), *SUMMARIES}
    assert {name.split("/")[0] for name in names} <= set(SECTIONS)


def test_a_config_becomes_leaves_with_dotted_names() -> None:
    tree = {"name": "x", "loss": {"name": None, "mix": {"tv": 0.5}}, "data": {"train": [1, 2], "kwargs": {}}}
    assert flat_config(tree) == {
        "name": "x", "loss.name": "null", "loss.mix.tv": 0.5, "data.train": "[1, 2]", "data.kwargs": "{}"
    }  # fmt: skip


def test_notes_say_what_a_run_is(tmp_path: Path) -> None:
    notes = notes_of(run_config(tmp_path, loss={"name": "jsd"}, seed=3).model_dump(mode="json"))
    assert notes == "target embedded, draft carved, objective jsd, serving temperature 1.0, seed 3"
    assert "None" in notes_of({"target": None})


def test_trackers_get_numbers_every_so_often_and_judgements_always(tmp_path: Path) -> None:
    trackers = RecordingTracker("tensorboard"), RecordingTracker("wandb")
    accelerator = SimpleNamespace(is_main_process=True, trackers=trackers)
    metrics = Metrics(tmp_path, accelerator, log_every=3, has_trackers=True)  # type: ignore[arg-type]
    for step in range(1, 7):
        metrics.write(step, {"loss": float(step), "text": "no number"})
    metrics.write(7, {"judge/tau_replay": 2.0}, always=True)
    assert trackers[0].logged == [
        (3, {"train/step": 3, "train/loss": 3.0}),
        (6, {"train/step": 6, "train/loss": 6.0}),
        (7, {"train/step": 7, "judge/tau_replay": 2.0}),
    ]
    # wandb drops a step below its last one, as a resumed run logs it.
    assert trackers[1].logged == [(None, values) for _, values in trackers[0].logged]


def tracked_run(folder: Path, tracker: str) -> None:
    config = run_config(folder, train={"steps": 2, "log_every": 1}, tracking={"trackers": [tracker]})
    config.folder.mkdir(parents=True, exist_ok=True)
    accelerator = fresh_accelerator(config.folder, log_with=[tracker])
    values = config.model_dump(mode="json")
    start_trackers(accelerator, config.tracking.trackers, config.tracking.project, config.name, values)
    fit(make_loop(config, accelerator=accelerator))
    accelerator.end_training()
    assert [line["step"] for line in metrics_of(config)] == [0, 1, 2, 2], "metrics.jsonl is written all the same"


def test_tensorboard_gets_the_run(tmp_path: Path) -> None:
    tracked_run(tmp_path, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = list((tmp_path / "run").rglob("events.out.tfevents*"))
    assert events
    tags: set[str] = set()
    for path in events:
        reader = EventAccumulator(str(path))
        reader.Reload()
        tags |= set(reader.Tags()["scalars"])
    assert {"train/loss", "train/alpha", "judge/score", "speed/tokens_per_second"} <= tags


def test_wandb_runs_offline_without_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    tracked_run(tmp_path, "wandb")
    files = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 1
    known = (tmp_path / "run" / WANDB_ID).read_text().strip()
    assert files[0].name == f"run-{known}.wandb"
    wandb.teardown()  # its process has written everything and ended
    records = records_of(files[0])
    defined = {
        record.metric.name or record.metric.glob_name: record.metric for record in records if record.HasField("metric")
    }
    assert set(defined) == {"train/step", *SUMMARIES, *(f"{section}/*" for section in SECTIONS)}
    assert all(metric.step_metric == "train/step" for name, metric in defined.items() if name != "train/step")
    assert defined["judge/tau_replay"].summary.max
    assert defined["train/loss"].summary.min
    assert not defined["train/loss"].summary.max
    logged = {item.key or item.nested_key[0] for r in records if r.HasField("history") for item in r.history.item}
    assert {"train/step", "train/loss", "train/alpha", "train/grad_norm", "judge/score"} <= logged
    assert "loss" not in logged
    run = next(record.run for record in records if record.HasField("run"))
    assert run.notes.startswith("target embedded, draft carved, objective lk_hybrid")
    tracked_run(tmp_path, "wandb")
    wandb.teardown()
    resumed = set((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert {path.name for path in resumed} == {files[0].name}, "the same run in wandb, perhaps in another folder"
    assert {"optim.lr", "loss.name", "train.steps"} <= {item.key for r in records for item in keys_of(r)}


def keys_of(record: Any) -> list[Any]:
    return [*record.run.config.update, *record.config.update]


def test_a_missing_tracker_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = builtins.__import__

    def without_wandb(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "wandb":
            raise ImportError("No module named 'wandb'")
        return import_module(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_wandb)
    said = refused(start_trackers, fresh_accelerator(tmp_path), ("wandb",), "understudy", "run", {})
    assert "pip install wandb" in said
