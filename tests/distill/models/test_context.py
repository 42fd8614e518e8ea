"""A draft made for shorter texts than its target: refused by name, kept within its own, or stretched."""

from pathlib import Path
from typing import Any

import torch
from refusals import refused
from tiny_training import tiny_tokenizer, write_target
from transformers import AutoConfig, AutoModelForCausalLM

from distill.config.load import parse_config
from distill.config.run import RunConfig
from distill.models.student import extend_context, make_student, run_context
from speculative.engine.models import max_positions


def config_of(student: dict[str, Any], **data: Any) -> RunConfig:
    return parse_config(
        {"name": "run", "student": student, "data": {"train": [{"path": "unused.jsonl"}], **data}}, "test"
    )


def context_for(config: RunConfig, target: int | None) -> int:
    return run_context(config.student, config.data.context_length, target)


def pretrained(folder: Path, **keys: Any) -> dict[str, Any]:
    write_target(folder, num_hidden_layers=1, max_position_embeddings=64)
    return {"init": "pretrained", "path": str(folder), **keys}


def test_a_shorter_draft_is_refused_by_name_unless_the_run_keeps_within_it(tmp_path: Path) -> None:
    student = pretrained(tmp_path / "draft")
    text = refused(context_for, config_of(student), 256)
    made = f"{str(tmp_path / 'draft')!r} is made for 64 tokens, but the run needs 256"
    assert all(part in text for part in (made, "student.extend_context: true", "data.context_length: 64")), text
    assert context_for(config_of(student, context_length=64), 256) == 64
    assert context_for(config_of(student), 64) == 64
    assert context_for(config_of(student), None) == 64
    assert context_for(config_of({**student, "extend_context": True}), 256) == 256
    random = {"init": "config", "architecture": {"model_type": "llama", "max_position_embeddings": 64}}
    text = refused(context_for, config_of(random), 256)
    assert "student.architecture is made for 64" in text
    assert "set its max_position_embeddings to 256" in text
    assert context_for(config_of({"init": "carved"}), 256) == 256


def test_a_stretched_draft_reaches_as_far_as_the_target_and_stays_so_on_disk(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    config = config_of(pretrained(tmp_path / "draft", extend_context=True))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    draft = make_student(config.student, target, tiny_tokenizer())
    assert max_positions(draft.config) == max_positions(target.config) == 256
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in plain.state_dict().items())
    before, after = plain.model.rotary_emb.inv_freq, draft.model.rotary_emb.inv_freq
    # The fastest turns as it did, the slowest four times as slowly: 256 / 64.
    torch.testing.assert_close(after[0], before[0])
    torch.testing.assert_close(after[-1], before[-1] / 4)
    draft.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.rope_parameters["rope_type"] == "yarn"
    ids = torch.arange(200)[None] % 250
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, draft(ids).logits)


def test_what_cannot_be_stretched_is_refused(tmp_path: Path) -> None:
    positions = AutoConfig.for_model("gpt2", n_positions=64)
    scaled = AutoConfig.for_model("llama", max_position_embeddings=64)
    scaled.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    open_ended = AutoConfig.for_model("llama", max_position_embeddings=64)
    for config, length, what in (
        (positions, 256, "this one has none"),
        (scaled, 256, "this one has linear"),
        (open_ended, None, "known context length (None)"),
    ):
        text = refused(extend_context, config, length)
        assert what in text
        assert "data.context_length: 64" in text
    student = config_of({"init": "carved", "extend_context": True}).student
    text = refused(make_student, student, write_target(tmp_path), tiny_tokenizer())
    assert "needs student.init: pretrained" in text
