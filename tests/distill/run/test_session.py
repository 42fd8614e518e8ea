"""A pair is opened in one place, and what training and export need is checked in one place, before the first answer."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import refused
from tiny_models import tiny_model
from tiny_training import small_config, tiny_tokenizer, write_target
from transformers import AutoModelForCausalLM

from distill import respond, train
from distill.config.layout import FILES
from distill.config.load import load_config
from distill.export.export import take_over_ids
from distill.models.load import load_tokenizer
from distill.models.student import from_architecture
from distill.models.target import load_target_side
from distill.run import session
from distill.run.session import open_pair
from distill.run.verdict_record import load_verdict
from speculative.engine.models import max_positions
from speculative.errors import UserError
from speculative.rules.rule import Rule

ROWS = len(tiny_tokenizer())  # no more than it has tokens


def test_a_pair_has_prompts_that_both_models_take(tiny_config: Path, tiny_run: Path) -> None:
    config = load_config(tiny_config)
    with open_pair(config, str(tiny_run), 5, Rule.named("sample")) as pair:
        pass
    assert pair.context == min(max_positions(pair.model.config), max_positions(pair.draft.config))
    assert len(pair.prompts) == 5
    assert max(len(ids) for _, ids in pair.keyed) + config.serving.max_tokens <= pair.context
    assert pair.draft.dtype == pair.target.dtype
    assert (pair.settings.gamma, pair.settings.sampling.temperature) == (0, config.serving.temperature)


def test_the_table_of_files_has_all_that_a_run_leaves(tiny_run: Path) -> None:
    names = {name.rstrip("/") for names, *_ in FILES for name in names.split(", ")}
    assert {path.name for path in tiny_run.iterdir()} - {"checkpoints"} <= names


@pytest.mark.parametrize(
    ("prompts", "rule", "overrides", "words"),
    [
        (0, "greedy", [], "--prompts 0: give at least 1"),
        (5, "sample", ["serving.temperature=0"], "--rule sample samples from the target"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    tiny_config: Path, tiny_run: Path, prompts: int, rule: str, overrides: list[str], words: str
) -> None:
    pair = open_pair(load_config(tiny_config, overrides), str(tiny_run), prompts, Rule.named(rule))
    with pytest.raises(UserError, match=words), pair:
        pass


def with_tokens_without_rows(folder: Path) -> Path:
    """A config whose target has a pad token and a word that were added to its tokenizer only; the fourth of its prompts uses the word."""
    write_target(folder / "target", vocab_size=ROWS)
    tokenizer = load_tokenizer(str(folder / "target"))
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.add_tokens(["<unit>"])
    tokenizer.save_pretrained(folder / "target")
    path = small_config(folder)
    rows = (folder / "prompts.jsonl").read_text().splitlines()
    rows[3] = json.dumps({"prompt": "How many <unit> is that?"})
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    return path


def test_a_token_without_a_row_is_found_in_its_row_before_the_first_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_tokens_without_rows(tmp_path)
    assert respond.main([str(config)]) == 2
    text = capsys.readouterr().err
    assert re.search(
        rf"prompts\.jsonl:4: token '<unit>' has id {ROWS + 1}, but the target has rows 0\.\.{ROWS - 1} only", text
    )
    assert not (tmp_path / "small" / "responses" / "train").exists()


SMALL = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


@pytest.mark.usefixtures("without_figures")
def test_a_run_with_a_pad_token_without_a_row_a_small_student_and_mixed_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_tokens_without_rows(tmp_path)
    words = ["data.bad_rows=drop", "train.steps=4", "judge.every=4", "judge.prompts=4", "judge.live=never"]
    words += ["data.mix={target: 0.5, student: 0.25, speculative: 0.25}", "data.rollouts={every: 2, prompts: 4}"]
    words += ["student.init=config", f"student.architecture={SMALL}", "student.gradient_checkpointing=true"]
    assert train.main([str(config), *words, "optim.name=muon"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"'[PAD]' (id {ROWS})" in next(line for line in lines if line.startswith("warning: the target has"))
    run = tmp_path / "small"
    assert {path.name.split("-")[0] for path in (run / "rollouts").iterdir()} == {"student", "speculative"}
    verdict = load_verdict(run)
    assert [record.step for record in verdict.checkpoints] == [0, 4]
    before, after = (record.alpha for record in verdict.checkpoints)
    assert 0 < before != after > 0, "four steps changed the draft"
    student = AutoModelForCausalLM.from_pretrained(run / "best" / "student")
    # Whatever is built for this target: no id without a row, which an embedding cannot pad with.
    tokenizer = load_tokenizer(str(tmp_path / "target"))
    for built in (student, from_architecture(SMALL, tokenizer, ROWS, 0)):
        assert (built.config.num_hidden_layers, built.config.pad_token_id) == (1, None)
    student, side = tiny_model(vocab_size=ROWS), load_target_side(str(tmp_path / "target"))
    side.config.pad_token_id = side.generation_config.pad_token_id = None
    take_over_ids(student, side, 3, None)
    assert (student.config.pad_token_id, student.config.eos_token_id) == (None, 2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda folder: write_target(folder / "target", vocab_size=ROWS - 9),
            "its tokenizer has token .* give the tokenizer of this model",
        ),
        (lambda folder: None, "target.path .*its tokenizer cannot be saved with a draft: no such rule"),
    ],
)
def test_what_training_and_export_need_is_checked_first(
    change: Callable[[Path], object], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_tokens_without_rows(tmp_path)
    change(tmp_path)
    if "cannot be saved" in text:

        def refuse(place: str, **_: object) -> None:
            raise ValueError("no such rule")

        monkeypatch.setattr(session, "load_tokenizer", refuse)
    assert re.search(text, refused(respond.run, config, ["data.bad_rows=drop"]))
    assert not (tmp_path / "small" / "responses" / "train").exists()
