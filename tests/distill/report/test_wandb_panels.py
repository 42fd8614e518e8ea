"""A run and its export with wandb as the tracker, offline: bands, domains, survival, and the draft as an artifact."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_training import small_config
from wandb_records import records_of

from distill import train
from distill.commands.export import export_run
from distill.commands.options import ExportOptions
from distill.config.layout import JUDGEMENT, VERDICT, list_steps, step_folder


def values_logged(records: list[Any]) -> dict[str, list[Any]]:
    """Every value of the run's history by name."""
    found: dict[str, list[Any]] = {}
    for record in records:
        for item in record.history.item if record.HasField("history") else ():
            found.setdefault(item.key or "/".join(item.nested_key), []).append(json.loads(item.value_json))
    return found


def offline_records(run: Path) -> list[Any]:
    import wandb

    wandb.teardown()  # its process has written everything and ended
    return [one for path in sorted(run.glob("wandb/offline-run-*/*.wandb")) for one in records_of(path)]


@pytest.mark.usefixtures("without_figures")
def test_wandb_gets_bands_domains_survival_and_the_exported_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))
    source = {"path": str(tmp_path / "prompts.jsonl"), "prompt_column": "prompt", "domain_column": "kind"}
    path = small_config(
        tmp_path, data={"train": [source]}, tracking={"trackers": ["wandb"]}, train={"steps": 2, "batch_size": 4}
    )
    assert train.main([str(path)]) == 0
    run = tmp_path / "small"
    logged = values_logged(offline_records(run))
    judgements = [json.loads((step_folder(run, step) / JUDGEMENT).read_text()) for step in list_steps(run)]
    assert logged["domains/odd/alpha"] == [one["domains"]["odd"]["alpha"] for one in judgements]
    assert logged["domains/even/alpha_high"] == [one["domains"]["even"]["alpha_ci"][1] for one in judgements]
    assert logged["judge/survival_2"] == [one["survival"][1] for one in judgements]
    assert all(1 >= one["survival"][0] >= one["survival"][1] > 0 for one in judgements)
    (files,) = run.glob("wandb/offline-run-*/files")
    (path,) = logged["bands/alpha_table/path"]
    whole = {tuple(row) for row in json.loads((files / path).read_text())["data"]}
    expected = {(one["step"], "alpha", one["alpha"]) for one in judgements}
    expected |= {
        (one["step"], name, one["alpha_ci"][end]) for one in judgements for end, name in enumerate(("low", "high"))
    }
    assert whole == expected

    export_run(ExportOptions(run, tmp_path / "out"))
    (artifact,) = [
        one.artifact for one in offline_records(run) if one.HasField("artifact") and one.artifact.type == "model"
    ]
    verdict = json.loads((tmp_path / "out" / VERDICT).read_text())
    assert (artifact.name, sorted(artifact.aliases)) == ("small-draft", ["best", "latest"])
    metadata = json.loads(artifact.metadata)
    assert all(verdict[key] == value for key, value in metadata.items())
    assert {"outcome", "headline", "measured"} <= set(metadata)
    held = {entry.path for entry in artifact.manifest.contents}
    assert held == {file.name for file in (tmp_path / "out").iterdir()}

    export_run(ExportOptions(step_folder(run, 0), tmp_path / "first"))
    first = [one.artifact for one in offline_records(run) if one.HasField("artifact") and one.artifact.type == "model"][
        -1
    ]
    assert list(first.aliases) == ["latest"]
    assert not first.metadata
