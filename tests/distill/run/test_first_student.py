"""The draft before training: which ranks make it, and when it is saved and loaded again as a check."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import tiny_model
from tiny_training import fresh_accelerator, run_config, tiny_tokenizer

from distill.config.layout import CHECKPOINTS, FIRST_STUDENT
from distill.run import first_student as module
from distill.run.first_student import first_student
from distill.run.run import Run


def data_of(folder: Path, **target: Any) -> Any:
    """A run's data with a held-out prompt; the target has only what is given."""
    config = run_config(folder, student={"init": "carved", "layers": [0]}, target={"path": "embedded", "shard": True})
    run = Run(config, fresh_accelerator(folder))
    run.folder.mkdir(parents=True, exist_ok=True)
    heldout = [SimpleNamespace(prompt_ids=[1, 2, 3])]
    there = SimpleNamespace(tokenizer=tiny_tokenizer(), facts=SimpleNamespace(eos_ids=(0,)), **target)
    sets = SimpleNamespace(train=[], heldout=heldout)
    return SimpleNamespace(run=run, target=there, prompts=sets, chosen_by_text=False)


def test_a_trial_draft_reads_the_target_on_the_main_process_only(tmp_path: Path) -> None:
    data = data_of(tmp_path)
    data.run.main = False
    assert first_student(data, trial=True) is None
    data.run.main = True
    with pytest.raises(AttributeError, match="loaded"):
        first_student(data, trial=True)


def test_the_draft_is_saved_as_a_check_until_there_are_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Path] = []
    real = module.check_saved

    def noted(folder: Path, *more: Any) -> Any:
        checked.append(folder)
        return real(folder, *more)

    monkeypatch.setattr(module, "check_saved", noted)
    data = data_of(tmp_path, loaded=lambda on_host: nullcontext(tiny_model()))
    folder = data.run.folder / FIRST_STUDENT
    folder.mkdir()
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"of a killed start")
    first_student(data)
    assert checked == [folder]
    assert not folder.exists()
    (data.run.folder / CHECKPOINTS).mkdir()
    first_student(data)
    assert checked == [folder]
