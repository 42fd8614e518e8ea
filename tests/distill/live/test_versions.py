"""Versions of a draft: complete, unchanged, numbered once; only unneeded ones are pruned."""

import json
import stat
from pathlib import Path

import pytest
from live_arms import write_version

from distill.live import versions
from distill.live.versions import (
    current_version,
    history,
    list_versions,
    make_current,
    next_name,
    prune,
    publish,
    read_version,
    reject,
    waiting_version,
)
from speculative.errors import UserError


def test_a_run_becomes_a_version_that_loads_and_cannot_be_written(tiny_run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    drafts = tmp_path / "drafts" / "tiny"
    first = publish(tiny_run, drafts, {"approved_by": "Ann"}, name="v0001")
    assert (first.name, first.parent, first.provenance["approved_by"]) == ("v0001", None, "Ann")
    assert first.provenance["run"] == str(tiny_run)
    assert first.provenance["target_fingerprint"]
    assert json.loads((first.folder / "serving.json").read_text())["draft"]["name"] == "v0001"
    assert str(tiny_run) not in (first.folder / "README.md").read_text()
    AutoModelForCausalLM.from_pretrained(first.folder)
    assert not [path for path in (first.folder, *first.folder.rglob("*")) if path.stat().st_mode & stat.S_IWUSR]
    second = publish(tiny_run, drafts, {}, parent="v0001", name=next_name(drafts))
    assert (second.name, second.parent) == ("v0002", "v0001")
    # An export killed before its end is completed under its number; another run does not get it.
    second.folder.chmod(0o755)
    (drafts / "history.jsonl").unlink()
    assert publish(tiny_run, drafts, {"approved_by": "Bob"}, name="v0002") == second
    assert not second.folder.stat().st_mode & stat.S_IWUSR
    assert [event["version"] for event in history(drafts)] == ["v0002"]
    with pytest.raises(UserError, match="never changes"):
        publish(tiny_run / "checkpoints" / "step-000004", drafts, {}, name="v0002")


def test_a_killed_export_leaves_no_version(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("distill.export.export._write_pages", killed)
    with pytest.raises(KeyboardInterrupt):
        publish(tiny_run, tmp_path, {}, name="v0001")
    assert list_versions(tmp_path) == history(tmp_path) == []


def test_current_is_a_link_and_its_moves_are_in_the_history(tmp_path: Path) -> None:
    assert current_version(tmp_path) is None
    write_version(tmp_path, "v0001", None)
    write_version(tmp_path, "v0002", "v0001")
    make_current(tmp_path, "v0001", "Ann")
    assert (tmp_path / "current").readlink() == Path("v0001")
    assert read_version(tmp_path / "current").name == "v0001"
    make_current(tmp_path, "v0002", "rollout")
    make_current(tmp_path, "v0002", "rollout")
    assert [(event["version"], event["by"]) for event in history(tmp_path)] == [("v0001", "Ann"), ("v0002", "rollout")]
    with pytest.raises(UserError, match="not a draft version"):
        make_current(tmp_path, "v0003", "Ann")


def test_one_version_waits_until_it_is_served_or_rejected(tmp_path: Path) -> None:
    write_version(tmp_path, "v0001", None)
    assert waiting_version(tmp_path) is None
    make_current(tmp_path, "v0001", "Ann")
    assert waiting_version(tmp_path) is None
    write_version(tmp_path, "v0002", "v0001")
    assert (waiting_version(tmp_path) or pytest.fail("it waits")).name == "v0002"
    reject(tmp_path, "v0002", "rollout")
    assert waiting_version(tmp_path) is None


def test_versions_in_use_are_not_pruned(tmp_path: Path) -> None:
    for number in range(1, 7):
        write_version(tmp_path, f"v{number:04d}", f"v{number - 1:04d}" if number > 1 else None)
    make_current(tmp_path, "v0004", "Ann")
    # Current is 4 and its parent 3; an arm still serves 1; 5 and 6 are the newest two.
    assert prune(tmp_path, keep=2, in_use=["v0001"]) == ["v0002"]
    assert [version.name for version in list_versions(tmp_path)] == ["v0001", "v0003", "v0004", "v0005", "v0006"]
    assert prune(tmp_path, keep=0) == ["v0001", "v0005", "v0006"]
    assert next_name(tmp_path) == "v0007"  # the number of a removed version is not reused


def test_pruning_that_was_killed_leaves_no_half_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, parent in (("v0001", None), ("v0002", "v0001"), ("v0003", "v0002")):
        write_version(tmp_path, name, parent)
        (tmp_path / name).chmod(0o555)
    make_current(tmp_path, "v0003", "Ann")

    def killed(folder: Path) -> None:
        (folder / "provenance.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, keep=1)
    assert [version.name for version in list_versions(tmp_path)] == ["v0002", "v0003"]
    assert prune(tmp_path, keep=1) == []
    assert not list(tmp_path.glob("*v0001*")), "what was left is gone too"


def test_a_repeated_switch_completes_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_version(tmp_path, "v0001", None)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(versions, "_append", killed)
        with pytest.raises(KeyboardInterrupt):
            make_current(tmp_path, "v0001", "Ann")
    make_current(tmp_path, "v0001", "Ann")
    assert [event["event"] for event in history(tmp_path)] == ["current"]


def test_a_folder_that_is_no_version_is_refused(tmp_path: Path) -> None:
    write_version(tmp_path, "v0001", None)
    (tmp_path / "v0001").rename(tmp_path / "v0009")
    with pytest.raises(UserError, match="v0009: not a draft version"):
        list_versions(tmp_path)
    assert versions.next_name(tmp_path) == "v0010"
