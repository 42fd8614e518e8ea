"""`understudy export --push-dataset`: prompts and responses of a run as a dataset."""

import shutil
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from tiny_training import forget_accelerators

from data.prompts.prompt import PromptSource
from data.prompts.sources import load_source
from data.responses.store import Store
from distill import respond
from distill.config.layout import CONFIG, HELDOUT, HELDOUT_GREEDY, RESPONSES, TRAINING, best_student
from distill.config.load import dump_config, load_config
from distill.export.hub import write_responses
from distill.models.load import load_tokenizer


def test_the_dataset_holds_the_stored_responses(tiny_run: Path, tmp_path: Path) -> None:
    folder = write_responses(tiny_run)
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


def test_the_dataset_of_a_greedy_run_has_its_held_out_responses(tiny_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(tiny_run, tmp_path / "greedy", symlinks=True))
    config = load_config(run / CONFIG, ["serving.temperature=0"])
    (run / CONFIG).write_text(dump_config(config))
    shutil.rmtree(run / RESPONSES / HELDOUT)  # such a run makes none
    folder = write_responses(run)
    made = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert len(made["heldout"]) == len(Store(run / RESPONSES / HELDOUT_GREEDY).read()) > 0


@pytest.mark.parametrize("place", ["in the run", "as it was pushed"])
def test_a_run_answers_the_dataset_of_another_with_the_same_responses(
    tiny_run: Path, tiny_config: Path, tmp_path: Path, place: str
) -> None:
    folder = write_responses(tiny_run)
    if place == "as it was pushed":
        folder = Path(shutil.copytree(folder, tmp_path / "answers"))
    forget_accelerators()
    sources = f"data.train=[{{path: {folder}}}]", f"data.heldout=[{{path: {folder}, split: heldout}}]"
    respond.run(tiny_config, [f"output={tmp_path}", "name=again", *sources])
    for name in (TRAINING, HELDOUT):
        again = {row.prompt_id: row for row in Store(tmp_path / "again" / RESPONSES / name).read()}
        for row in Store(tiny_run / RESPONSES / name).read():
            assert again.pop(row.prompt_id).input_ids == row.input_ids, "the same prompt, settings and seed"
        assert not again
