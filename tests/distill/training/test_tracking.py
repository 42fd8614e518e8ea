"""metrics.jsonl, wandb without a login, and tensorboard."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
from refusals import refused
from tiny_training import fit, fresh_accelerator, make_loop, metrics_of, run_config
from wandb_records import records_of

from distill.config.layout import METRICS, WANDB_ID
from distill.training.tracking import Metrics, judged_scalars, start_trackers, tracked


def metrics_in(folder: Path, **options: Any) -> Metrics:
    return Metrics(folder, fresh_accelerator(folder), **{"has_trackers": False, **options})


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]


def test_trackers_get_the_numbers_of_a_line() -> None:
    line = {"loss": 0.5, "skipped": True, "seconds": {"data": 0.1}, "judge/tau_replay": 2.5, "note": "no number"}
    assert tracked(4, line) == {
        "train/step": 4,
        "train/loss": 0.5,
        "train/skipped": True,
        "time/data": 0.1,
        "judge/tau_replay": 2.5,
    }


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


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    metrics_in(tmp_path).write(1, {"loss": 0.5})
    other = Metrics(tmp_path, SimpleNamespace(is_main_process=False), has_trackers=True)  # type: ignore[arg-type]
    other.write(10, {"loss": 0.5}, always=True)
    other.cut_after(0)
    assert lines_of(tmp_path) == [{"step": 1, "loss": 0.5}]


def test_a_judgement_is_logged_with_its_intervals() -> None:
    record = {
        "alpha": 0.6,
        "alpha_ci": [0.5, 0.7],
        "tau": 2.0,
        "tau_ci": None,
        "domains": {},
        "rule": "sample",
        "ranks": 2,
        "live": False,
    }
    by_replay = {
        "judge/alpha": 0.6,
        "judge/alpha_low": 0.5,
        "judge/alpha_high": 0.7,
        "judge/tau_replay": 2.0,
        "judge/ranks": 2,
        "judge/live_prompts": 0,
    }
    assert judged_scalars(record) == by_replay
    check = {"prompts": 32, "tau": 2.1, "tau_ci": [1.9, 2.3], "accepted_per_drafted": 0.4, "replay": {"z": -0.5}}
    assert judged_scalars(record | {"live_check": check}) == by_replay | {
        "judge/tau_live": 2.1,
        "judge/tau_live_low": 1.9,
        "judge/tau_live_high": 2.3,
        "judge/accepted_per_drafted_live": 0.4,
        "judge/live_prompts": 32,
        "judge/z": -0.5,
    }
    without_law = judged_scalars(record | {"live_check": check | {"replay": None}})
    assert "judge/z" not in without_law


def tracked_run(folder: Path, tracker: str) -> None:
    config = run_config(folder, train={"steps": 10}, judge={"every": 10}, tracking={"trackers": [tracker]})
    config.folder.mkdir(parents=True, exist_ok=True)
    accelerator = fresh_accelerator(config.folder, log_with=[tracker])
    values = config.model_dump(mode="json")
    start_trackers(accelerator, config.tracking.trackers, config.name, values)
    fit(make_loop(config, accelerator=accelerator))
    accelerator.end_training()
    assert [line["step"] for line in metrics_of(config)] == [0, *range(1, 11), 10], (
        "metrics.jsonl is written all the same"
    )


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
    assert {"train/loss", "train/alpha_train", "judge/score", "train/tokens_per_second"} <= tags


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
    metrics = [record.metric for record in records if record.HasField("metric")]
    assert {metric.name or metric.glob_name: metric.step_metric for metric in metrics} == {
        "train/step": "",
        "*": "train/step",
    }
    logged = {item.key or item.nested_key[0] for r in records if r.HasField("history") for item in r.history.item}
    assert {"train/step", "train/loss", "train/alpha_train", "train/grad_norm", "judge/score"} <= logged
    tracked_run(tmp_path, "wandb")
    wandb.teardown()
    resumed = set((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert {path.name for path in resumed} == {files[0].name}, "the same run in wandb, perhaps in another folder"
    assert {"optim.lr", "loss.name", "train.steps"} <= {item.key for r in records for item in keys_of(r)}


def keys_of(record: Any) -> list[Any]:
    return [*record.run.config.update, *record.config.update]


def test_a_missing_tracker_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    available = accelerate.tracking.get_available_trackers()
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [one for one in available if str(one) == "wandb"])
    said = refused(start_trackers, fresh_accelerator(tmp_path), ("wandb", "tensorboard"), "run", {})
    assert said.startswith("tracking.trackers: tensorboard is not installed; run `pip install tensorboard`")


def test_a_judgement_has_names_for_domains_and_survival() -> None:
    parts = {"maths+code": {"alpha": 0.5, "alpha_ci": [0.4, 0.6]}, "a/b é": {"alpha": 0.2}}
    assert judged_scalars({"domains": parts, "survival": [0.5, 0.25]}) == {
        "judge/live_prompts": 0,
        "judge/survival_1": 0.5,
        "judge/survival_2": 0.25,
        "domains/maths+code/alpha": 0.5,
        "domains/maths+code/alpha_low": 0.4,
        "domains/maths+code/alpha_high": 0.6,
        "domains/a/b é/alpha": 0.2,
    }
