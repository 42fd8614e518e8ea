"""A draft made for shorter texts than its target: refused by name, or kept within its own."""

from pathlib import Path
from typing import Any

from refusals import refused
from tiny_training import write_target

from distill.config.load import parse_config
from distill.config.run import RunConfig
from distill.models.student import run_context


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
    assert all(part in text for part in (made, "start from another draft", "data.context_length: 64")), text
    assert context_for(config_of(student, context_length=64), 256) == 64
    assert context_for(config_of(student), 64) == 64
    assert context_for(config_of(student), None) == 64
    random = {"init": "config", "architecture": {"model_type": "llama", "max_position_embeddings": 64}}
    text = refused(context_for, config_of(random), 256)
    assert "student.architecture is made for 64" in text
    assert "set its max_position_embeddings to 256" in text
    assert context_for(config_of({"init": "carved"}), 256) == 256
