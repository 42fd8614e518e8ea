"""A run's relative paths mean the same in every folder."""

from pathlib import Path

import pytest
import yaml
from refusals import refused

from distill.config.layout import CHECKPOINTS, CONFIG, ROLLOUTS
from distill.config.load import load_config
from distill.config.origin import spelled
from distill.run.run import claim_folder

CONFIG_TEXT = """name: r
target: {path: models/target}
student: {init: pretrained, path: org/student}
data:
  train: [{path: prompts.jsonl}, {path: "more/*.jsonl"}, {path: org/set}, {path: stdlib}, {path: gone.jsonl}]
signal: {source: store}
judge: {served: [models/target, org/served], lenience: [2]}
"""


@pytest.fixture
def began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where a run began, with its files; the working directory is another one."""
    folder = tmp_path / "été 1"
    for name in ("models/target", "more", "elsewhere", "stdlib"):
        (folder / name).mkdir(parents=True)
    for name in ("prompts.jsonl", "more/a.jsonl"):
        (folder / name).touch()
    (folder / "run.yaml").write_text(CONFIG_TEXT)
    monkeypatch.chdir(folder)
    claim_folder(load_config("run.yaml"))
    (folder / "runs/r" / CHECKPOINTS).mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    return folder


def test_a_run_is_read_and_continued_from_another_folder(began: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, first = began / "runs/r", (began / "runs/r" / CONFIG).read_text()
    again = load_config(began / "run.yaml", [f"output={began}/runs"])
    for config in (load_config(run / CONFIG), load_config("../runs/r/config.yaml"), again):
        assert config.folder.resolve() == run
        assert config.target.path == f"{began}/models/target"
        paths = [one.path for one in config.data.train]
        assert paths == [f"{began}/prompts.jsonl", f"{began}/more/*.jsonl", "org/set", "stdlib", "gone.jsonl"]
        assert config.student.path == "org/student"
        assert config.judge.served == (f"{began}/models/target", "org/served")
        claim_folder(config)
        written = yaml.safe_load((run / CONFIG).read_text())
        assert written | {"output": "runs"} == yaml.safe_load(first), "the next start is again in the first folder"
    assert "target.path" in refused(claim_folder, load_config(run / CONFIG, ["target.path=org/other"]))
    monkeypatch.chdir(began)
    assert load_config(run / CONFIG).target.path == "models/target"
    claim_folder(load_config("run.yaml"))
    claim_folder(load_config("run.yaml", [f"target.path={began}/models/target"]))


def test_another_config_before_the_first_checkpoint_forgets_what_another_draft_wrote(
    began: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(began)
    folder = load_config("run.yaml").folder
    (folder / CHECKPOINTS).rmdir()
    (folder / ROLLOUTS / "student-g00000").mkdir(parents=True)
    claim_folder(load_config("run.yaml"))
    assert (folder / ROLLOUTS).exists(), "of the same config"
    claim_folder(load_config("run.yaml", ["seed=7"]))
    assert not (folder / ROLLOUTS).exists()


def test_a_run_that_was_moved_with_its_files_keeps_its_paths(began: Path, tmp_path: Path) -> None:
    moved = began.rename(tmp_path / "moved")
    assert load_config(moved / "runs/r" / CONFIG).target.path == str(moved / "models/target")


def test_what_is_compared_has_the_first_spelling(began: Path) -> None:
    sources = {"data": [{"path": f"{began}/prompts.jsonl"}], "sources": [[f"{began}/prompts.jsonl", 3, 4]]}
    run = began / "runs/r"
    assert spelled(sources, run) == {"data": [{"path": "prompts.jsonl"}], "sources": [["prompts.jsonl", 3, 4]]}
