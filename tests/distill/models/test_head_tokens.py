"""`student.head_tokens`: which tokens are counted as frequent, what the config says, and the rows of the others in an export."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from refusals import refused
from tiny_models import VOCAB, logits, tiny_model
from tiny_training import TOKENS, forget_accelerators, run_config, small_config, tiny_tokenizer

from data.batches.collate import Example
from data.batches.examples import as_examples
from distill import train
from distill.commands.export import export_run
from distill.commands.options import ExportOptions
from distill.config.layout import best_student, step_folder
from distill.config.load import dump_config, load_config
from distill.models.draft import as_exported, load_draft
from distill.models.head_tokens import fill_other_rows, give_head_tokens
from distill.models.load import load_model
from distill.models.student import make_student, refuse_impossible
from distill.models.target import Target
from speculative.engine.frequent_head import HEAD_IDS, FrequentHead, trim_head


def example(ids: list[int], prompt: int) -> Example:
    return Example(np.array(ids), np.arange(len(ids)) >= prompt)


def test_the_most_frequent_tokens_of_the_responses_are_kept_and_the_end_tokens() -> None:
    student = tiny_model()
    texts = as_examples([example([9, 9, 9, 4, 4, 7], 3), example([8, 4, 7, 12], 1), example([30, 30, 5], 2)])
    notes = give_head_tokens(student, 5, texts, [2])
    # 4 three times, 7 twice, 5 and 12 once (the lower first); 9 is only in prompts.
    assert getattr(student.config, HEAD_IDS) == [2, 4, 5, 7, 12]
    assert notes == {"tokens": 5, "of": VOCAB, "share": 1.0}
    assert give_head_tokens(student, 4, texts, [2])["share"] == round(6 / 7, 5)
    give_head_tokens(student, 7, texts, [2])
    assert getattr(student.config, HEAD_IDS) == [2, 4, 5, 7, 9, 12, 30], "then those of the prompts"


@pytest.mark.parametrize(("text", "count"), [("16k", 16384), ("1K", 1024), ("500", 500), ("null", None)])
def test_the_config_takes_thousands_and_writes_numbers(tmp_path: Path, text: str, count: int | None) -> None:
    config = load_config(small_config(tmp_path), [f"student.head_tokens={text}"])
    assert config.student.head_tokens == count
    (tmp_path / "again.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize("text", ["3", "k", "-1k", "16kb", "1.5k", "0"])
def test_other_values_are_refused(tmp_path: Path, text: str) -> None:
    assert "student.head_tokens" in refused(load_config, small_config(tmp_path), [f"student.head_tokens={text}"])


def test_more_tokens_than_the_target_has_are_refused_before_it_answers(tmp_path: Path) -> None:
    student = run_config(tmp_path, student={"head_tokens": TOKENS + 1}).student
    config = tiny_model(vocab_size=TOKENS).config
    assert f"head_tokens = {TOKENS + 1}: the target has {TOKENS}" in refused(refuse_impossible, student, config)


def test_quantised_exports_are_refused(tmp_path: Path) -> None:
    more = ["student.head_tokens=64", "export.quantize=int8"]
    assert "cannot be combined" in refused(load_config, small_config(tmp_path), more)


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("phi", False)])
def test_other_rows_are_never_the_argmax(kind: str, tied: bool) -> None:
    whole = tiny_model(kind, tie_word_embeddings=tied)
    setattr(whole.config, HEAD_IDS, kept := [*range(3, 20), 40])
    trimmed, embedding = trim_head(copy.deepcopy(whole)), whole.get_input_embeddings().weight.clone()
    assert f"{len(kept)} of {VOCAB} tokens" in fill_other_rows(whole)[0]
    torch.testing.assert_close(whole.get_input_embeddings().weight, embedding, rtol=0, atol=0)
    assert not whole.config.tie_word_embeddings
    for ids in (range(1, 13), range(20, 45)):
        found, expected = logits(whole, ids), logits(trimmed, ids)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
        torch.testing.assert_close(found[..., kept], expected[..., kept], rtol=1e-5, atol=1e-5)


def test_rows_of_a_head_that_engines_load_as_tied_are_refused() -> None:
    model = tiny_model("gpt2")
    setattr(model.config, HEAD_IDS, [1, 2, 3, 4])
    assert "engines load gpt2 as tied only" in refused(fill_other_rows, model)
    texts = as_examples([example([1, 2, 3], 1)])
    assert "engines load gpt2 as tied only" in refused(give_head_tokens, model, 4, texts, [2]), "before it trains"


def test_a_head_with_an_adapter_is_refused_by_name() -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    student = get_peft_model(tiny_model(tie_word_embeddings=False), lora)
    assert "an adapter" in refused(give_head_tokens, student, 4, as_examples([example([1, 2, 3], 1)]), [2])


def test_a_whole_head_has_nothing_to_fill() -> None:
    model = tiny_model()
    before = logits(model)
    assert fill_other_rows(model) == []
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("student", [{}, {"lora": {"rank": 4}}])
def test_a_run_trains_judges_and_keeps_such_a_draft(tmp_path: Path, student: dict[str, Any]) -> None:
    path = small_config(
        tmp_path,
        student={"layers": [0, 1], "head_tokens": 40, **student},
        train={"steps": 2, "batch_size": 4},
        judge={"every": 2, "prompts": 4, "gamma": 2, "speed_prompts": 2, "speed_seconds": 0.1},
        tracking={"trackers": []},
    )
    forget_accelerators()
    assert train.main([str(path)]) == 0
    run = load_config(path).folder
    notes = json.loads((run / "student.json").read_text())["head_tokens"]
    assert (notes["tokens"], notes["of"]) == (40, TOKENS)
    saved = load_model("draft", str(best_student(run)))
    assert saved.get_output_embeddings().weight.shape[0] == TOKENS, "the saved head is whole"
    assert len(getattr(saved.config, HEAD_IDS)) == 40
    target = Target(load_config(path).target, torch.device("cpu"))
    drafts = [load_draft(str(run), target), as_exported(saved, target)]
    if "lora" in student:
        export_run(ExportOptions(step_folder(run, 2), tmp_path / "out", adapter=True))
        drafts.append(load_draft(str(tmp_path / "out" / "adapter"), target))
    for loaded in drafts:
        assert isinstance(loaded.get_output_embeddings(), FrequentHead)
    check = json.loads((run / "checkpoints" / "step-000002" / "judgement.json").read_text())["live_check"]
    assert abs(check["replay"]["z"]) < 4


def test_a_head_of_a_pretrained_start_is_counted_too(tmp_path: Path) -> None:
    student = tiny_model(vocab_size=TOKENS)
    setattr(student.config, HEAD_IDS, [200, 201, 202, 203])
    student.save_pretrained(tmp_path / "draft")
    tiny_tokenizer().save_pretrained(tmp_path / "draft")
    config = run_config(tmp_path, student={"init": "pretrained", "path": str(tmp_path / "draft"), "head_tokens": 8})
    made = make_student(config.student, tiny_model(vocab_size=TOKENS), tiny_tokenizer())
    assert not hasattr(made.config, HEAD_IDS), "what an earlier run kept does not count"
    give_head_tokens(made, 8, as_examples([example([1, 2, 3], 1)]), [])
    assert getattr(made.config, HEAD_IDS) == list(range(8))
