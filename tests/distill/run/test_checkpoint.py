"""A run's folder: claimed once, written whole or not at all, pruned, pointed at."""

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from failures import Killed, files_no_larger_than, full_disk, killed
from file_modes import other_modes, umask
from refusals import refused
from tiny_training import fresh_accelerator, make_loop, run_config, tiny_tokenizer

from data import files
from distill.config.layout import PROGRESS, list_steps, step_folder
from distill.config.load import dump_config, load_config
from distill.config.run import RunConfig
from distill.run import checkpoint
from distill.run import run as module
from distill.run.checkpoint import load_judgements
from distill.run.run import claim_folder
from speculative.errors import UserError

# --- claiming ----------------------------------------------------------------------------------------------------------


def test_claim_writes_the_resolved_config(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    claim_folder(config)
    assert load_config(config.folder / "config.yaml") == config
    assert {path.name for path in config.folder.iterdir()} == {"began.txt", "config.yaml"}


@pytest.mark.parametrize("content", ["{", "[]", '{"alpha": NaN}'])
def test_a_damaged_record_of_a_run_is_one_line(tmp_path: Path, content: str) -> None:
    run, path = module.Run(run_config(tmp_path), fresh_accelerator(tmp_path)), tmp_path / "self_checks.json"
    path.write_text(content)
    said = refused(run.record, path, dict)
    assert said.startswith(f"{path}: ")
    assert said.endswith("; delete it, and start the command again")


def claim_and_produce(config: RunConfig) -> None:
    """A run's folder as a run leaves it that got somewhere."""
    claim_folder(config)
    (config.folder / "checkpoints").mkdir(exist_ok=True)


def test_what_does_not_reach_the_training_may_change(tmp_path: Path) -> None:
    claim_and_produce(run_config(tmp_path))
    claim_folder(run_config(tmp_path, tracking={"trackers": ["wandb"]}, judge={"batch_size": 2}))
    claim_folder(run_config(tmp_path, train={"micro_batch_size": 1}))


def test_where_a_run_lies_how_it_is_cut_and_which_url_answers_may_change(tmp_path: Path) -> None:
    first = run_config(tmp_path / "here", judge={"live": "end"})
    claim_and_produce(first)
    shutil.move(tmp_path / "here", tmp_path / "there")
    for laid_out in ({"shard": True}, {"device_map": "auto"}):
        moved = run_config(
            tmp_path / "there", target=laid_out, student={"gradient_checkpointing": True}, judge={"live": "end"}
        )
        claim_folder(moved)
        assert load_config(moved.folder / "config.yaml") == moved
    served: dict[str, Any] = {
        "student": {"init": "pretrained", "path": "x"},
        "judge": {"live": "never"},
        "signal": {"source": "store"},
    }
    for url, model, fine in (("http://a/v1", "m", True), ("http://b/v1", "m", True), ("http://b/v1", "n", False)):
        config = run_config(
            tmp_path / "served", target={"endpoint": {"urls": [url], "weights": "server", "model": model}}, **served
        )
        with contextlib.nullcontext() if fine else pytest.raises(UserError, match=r"endpoint\.model"):
            claim_and_produce(config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optim": {"lr": 5e-4}}, ["lr", "0.01", "0.0005"]),
        ({"seed": 7}, ["seed", "0", "7"]),
        ({"data": {"train": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}}, ["unused.jsonl", "a.jsonl"]),
        ({"serving": {"temperature": 0.5}}, ["temperature", "1.0", "0.5"]),
    ],
)
def test_claim_with_another_config_names_the_difference(
    tmp_path: Path, change: dict[str, Any], said: list[str]
) -> None:
    claim_and_produce(run_config(tmp_path))
    before = (tmp_path / "run" / "config.yaml").read_text()
    text = refused(claim_folder, run_config(tmp_path, **change))
    assert all(part in text for part in ("another config", str(tmp_path / "run"), *said)), text
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder should be")
    text = refused(claim_folder, run_config(blocked))
    assert "cannot be written" in text
    assert "output=" in text

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "Permission denied" in refused(claim_folder, run_config(tmp_path))


# --- saving ------------------------------------------------------------------------------------------------------------


class Run:
    """A loop after its first checkpoint, and what to save at the next."""

    def __init__(self, folder: Path) -> None:
        self.config: RunConfig = run_config(folder)
        self.loop = make_loop(self.config)
        self.loop.save()
        self.loop.step(self.loop.micro_batches(0))
        self.loop.progress.step = 1

    def save(self) -> Path:
        loop = self.loop
        return checkpoint.save_checkpoint(loop.run, {"student": loop.module.student}, loop.tokenizer, loop.provenance)

    def assert_only_the_first_is_there(self) -> None:
        assert list_steps(self.config.folder) == [0]
        assert checkpoint.last_resumable(self.config.folder) == 0
        assert [
            path.name for path in (self.config.folder / "checkpoints").iterdir() if not path.name.startswith(".")
        ] == ["step-000000"]
        again = make_loop(self.config)
        assert again.progress.step == 0


def test_a_checkpoint_has_everything(tmp_path: Path) -> None:
    run = Run(tmp_path)
    folder = run.save()
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {
        "progress.json",
        "provenance.json",
        "student/config.json",
        "student/model.safetensors",
        "student/tokenizer.json",
        "state/model.safetensors",
        "state/optimizer.bin",
        "state/random_states_0.pkl",
    } <= found
    assert list_steps(run.config.folder) == [0, 1]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    student = AutoModelForCausalLM.from_pretrained(folder / "student")
    torch.testing.assert_close(student.state_dict(), run.loop.module.student.state_dict(), rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(folder / "student").get_vocab() == tiny_tokenizer().get_vocab()


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_its_files_have_the_mode_that_the_umask_gives(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        folder = Run(tmp_path).save()
    assert other_modes(folder, mask) == []


@pytest.mark.parametrize("where", ["save_state", "student", "tokenizer", "write_json", "rename"])
def test_a_stop_in_the_middle_leaves_the_earlier_checkpoint_and_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    run = Run(tmp_path)

    places: dict[str, tuple[Any, str]] = {
        "save_state": (run.loop.accelerator, "save_state"),
        "student": (type(run.loop.module.student), "save_pretrained"),
        "tokenizer": (type(run.loop.tokenizer), "save_pretrained"),
        "write_json": (checkpoint, "write_json"),
        "rename": (os, "replace"),
    }
    with monkeypatch.context() as patched:
        patched.setattr(*places[where], killed)
        with pytest.raises(Killed):
            run.save()
    run.assert_only_the_first_is_there()
    assert run.save().name == "step-000001", "what was left behind is in nobody's way"
    assert list_steps(run.config.folder) == [0, 1]


# Rust and C++ writers each have their own exception for a full disk.
@pytest.mark.parametrize("writer", ["safetensors", "torch", "tokenizer", "json", "rename"])
def test_a_full_disk_is_one_line_and_harms_no_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    run = Run(tmp_path)
    state = step_folder(run.config.folder, 0) / "state"
    weights = (state / "model.safetensors").stat().st_size

    def full_in_rust(*_: Any, **__: Any) -> None:
        raise Exception("No space left on device (os error 28)")

    failures: dict[str, tuple[Any, str, Any]] = {
        "tokenizer": (type(run.loop.tokenizer), "save_pretrained", full_in_rust),
        "json": (files, "open", full_disk),
        "rename": (os, "replace", full_disk),
    }
    # The optimizer's file is larger than the weights: one limit stops the first writer, the other the second.
    limit = {"safetensors": weights // 2, "torch": weights + 4096}.get(writer, 1 << 40)
    with monkeypatch.context() as patched, files_no_larger_than(limit):
        if writer in failures:
            patched.setattr(*failures[writer], raising=False)
        text = refused(run.save)
    assert all(part in text for part in ("cannot be written", "step-000001", str(step_folder(run.config.folder, 0))))
    assert not list((run.config.folder / "checkpoints").glob(".*")), "a full disk is not left fuller"
    run.assert_only_the_first_is_there()


# --- finding, pruning, pointing ----------------------------------------------------------------------------------------


def fake_checkpoint(run: Path, step: int, *, state: bool = True) -> None:
    folder = step_folder(run, step)
    (folder / "student").mkdir(parents=True)
    if state:
        (folder / "state").mkdir()
    (folder / PROGRESS).write_text("{}")


def test_steps_are_found_in_order_of_number(tmp_path: Path) -> None:
    for step in (1_500_000, 90, 100, 0):
        fake_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / ".step-000200.tmp").mkdir()
    (tmp_path / "checkpoints" / "step-000300").mkdir()  # no progress.json: not ours, or half deleted
    assert list_steps(tmp_path) == [0, 90, 100, 1_500_000]
    assert checkpoint.last_resumable(tmp_path) == 1_500_000
    fake_checkpoint(tmp_path, 2_000_000, state=False)
    assert checkpoint.last_resumable(tmp_path) == 1_500_000, "without state none can go on"
    assert list_steps(tmp_path / "nothing") == []
    assert checkpoint.last_resumable(tmp_path / "nothing") is None


def test_best_is_a_relative_link_that_moves(tmp_path: Path) -> None:
    for step in (0, 10):
        fake_checkpoint(tmp_path / "run", step)
        checkpoint.point_best(tmp_path / "run", step)
        assert (tmp_path / "run" / "best").resolve().name == f"step-{step:06d}"
    (tmp_path / "run").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "best").resolve() == (tmp_path / "moved" / "checkpoints" / "step-000010").resolve()
    (tmp_path / "moved" / ".best.tmp").symlink_to("left/by/a/kill")
    checkpoint.point_best(tmp_path / "moved", 0)
    assert (tmp_path / "moved" / "best").resolve().name == "step-000000"


def test_before_the_first_checkpoint_a_start_may_be_mended(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    claim_folder(config)
    (config.folder / "responses").mkdir()
    (config.folder / "self_checks.json").write_text("{}")
    claim_folder(config)
    assert (config.folder / "self_checks.json").exists()
    mended = run_config(tmp_path, optim={"lr": 0.5})
    claim_folder(mended)
    assert not (config.folder / "self_checks.json").exists()
    assert (config.folder / "config.yaml").read_text() == dump_config(mended)


def judged(run: Path, step: int, text: str) -> None:
    folder = step_folder(run, step)
    folder.mkdir(parents=True)
    (folder / "progress.json").write_text("{}")
    (folder / "judgement.json").write_text(text)


@pytest.mark.parametrize(
    ("step", "text", "words"),
    [
        (0, "{", "cannot be read"),
        (0, "[]", "the file has an invalid value"),
        (4, None, "the draft at step 0 is unknown"),
    ],
)
def test_a_judgement_that_is_not_whole_is_one_line(tmp_path: Path, step: int, text: str | None, words: str) -> None:
    """Without step 0 a later checkpoint would pass for the undistilled baseline."""
    good = json.dumps(
        {"step": step, "score": 2.0, "rule": "greedy", "gamma": 3, "alpha": 0.5, "alpha_ci": [0.4, 0.6], "tau": 2.0}
    )
    judged(tmp_path, step, good if text is None else text)
    said = refused(load_judgements, tmp_path)
    assert words in said
    assert "delete" in said
