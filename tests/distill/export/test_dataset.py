"""`understudy export --push-dataset`: prompts and responses of a run as a dataset, and what is asked of the hub."""

from pathlib import Path
from typing import Any

import datasets
import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError

from data.prompts.prompt import PromptSource
from data.prompts.sources import load_source
from data.responses.store import Store
from distill.commands.export import export
from distill.commands.options import ExportOptions
from distill.config.layout import HELDOUT, RESPONSES, TRAINING, best_student
from distill.models.load import load_tokenizer
from speculative.errors import UserError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What the hub is asked for, by the names of its documented client."""
    found: list[tuple[str, dict[str, Any]]] = []

    def create_repo(self: Any, repo_id: str, **options: Any) -> None:
        found.append(("create_repo", {"repo_id": repo_id, **options}))

    def upload_folder(self: Any, **options: Any) -> None:
        found.append(("upload_folder", options))

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    return found


def test_the_dataset_holds_the_stored_responses_and_is_uploaded(
    tiny_run: Path, tmp_path: Path, asked: list[tuple[str, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    export(ExportOptions(tiny_run, tmp_path / "out", push_dataset="org/answers", dry_run=True))
    folder = tiny_run / "dataset"
    assert f"written, not uploaded: {folder} as dataset org/answers" in capsys.readouterr().out
    assert asked == []
    made = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    tokenizer = load_tokenizer(str(best_student(tiny_run)))
    for split, name in (("train", TRAINING), ("heldout", HELDOUT)):
        rows = Store(tiny_run / RESPONSES / name).read()
        assert len(made[split]) == len(rows) > 0
        for row, stored in zip(made[split], rows, strict=True):
            for key in ("prompt_id", "sample", "domain", "finished", "log_target_probs", "prompt_ids", "response_ids"):
                assert row[key] == getattr(stored, key)
            assert row["response"] == tokenizer.decode(stored.response_ids)
    # A config can train on it: the tokens are used unchanged.
    (first, *_) = load_source(PromptSource(path=str(folder)))
    assert list(first.prompt_ids or ()) == made["train"][0]["prompt_ids"]
    card = huggingface_hub.DatasetCard.load(folder / "README.md")
    assert card.data.license == "other"
    assert f"{len(made['train'])} to train on, {len(made['heldout'])} held out" in card.text
    assert str(tiny_run.parent) not in card.content

    export(ExportOptions(tiny_run, tmp_path / "out", overwrite=True, push_dataset="org/answers"))
    assert asked == [
        ("create_repo", {"repo_id": "org/answers", "repo_type": "dataset", "private": True, "exist_ok": True}),
        ("upload_folder", {"repo_id": "org/answers", "repo_type": "dataset", "folder_path": folder}),
    ]


@pytest.mark.parametrize("endpoint", ["refuses", "unreachable"])
def test_a_hub_that_refuses_is_one_line(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    from distill.export.dataset import publish_responses

    def create_repo(self: Any, repo_id: str, **options: Any) -> None:
        request = httpx2.Request("POST", "https://hub.invalid")
        raise HfHubHTTPError("401 Client Error", response=httpx2.Response(401, request=request))

    if endpoint == "refuses":
        monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    else:
        api = huggingface_hub.HfApi(endpoint="http://127.0.0.1:9", token="hf_none")
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    with pytest.raises(UserError, match=r"--push-dataset org/answers: .* is written, but not uploaded"):
        publish_responses(tiny_run, "org/answers")


def test_a_dry_run_of_an_export_writes_nothing(tiny_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--dry-run"):
        export(ExportOptions(tiny_run, tmp_path / "out", dry_run=True))
    assert not (tmp_path / "out").exists()
