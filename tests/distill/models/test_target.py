"""The target as everybody gets it: one object, its facts known without its weights."""

from dataclasses import replace
from pathlib import Path

import torch
from tiny_training import write_prompts, write_target

from distill.config.run import RunConfig
from distill.config.sections import TargetConfig
from distill.models.target import Target
from distill.run.prompts import load_prompts
from distill.run.responses import decode_settings
from distill.run.session import context_limit
from speculative.decode import decode

CPU = torch.device("cpu")
LONGROPE = {
    "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 10000.0, "rope_type": "longrope",
    "original_max_position_embeddings": 40,
}  # fmt: skip


def test_prompts_that_the_decoder_would_refuse_are_dropped_before(tmp_path: Path) -> None:
    """LongRoPE's position codes change at 40 tokens: that is the context, whatever max_position_embeddings says."""
    write_target(tmp_path / "phi", kind="phi3", original_max_position_embeddings=40, rope_parameters=LONGROPE)
    target = Target(TargetConfig(path=str(tmp_path / "phi")), CPU)
    assert target.facts.context_length == 40
    assert target.model.config.max_position_embeddings > 40
    config = RunConfig.model_validate(
        {
            "name": "long", "target": {"path": str(tmp_path / "phi")}, "serving": {"max_tokens": 20, "temperature": 0.0},
            "data": {
                "train": ({"path": str(write_prompts(tmp_path / "prompts.jsonl", 30))},), "too_long": "drop",
                "template": {"mode": "plain"},
            },
        }
    )  # fmt: skip
    unlimited = load_prompts(config.data, target.tokenizer, 1 << 20, 20, 30)
    assert max(len(prompt.prompt_ids) for prompt in [*unlimited.train, *unlimited.heldout]) > 20
    sets = load_prompts(config.data, target.tokenizer, context_limit(target.facts.context_length), 20, 30)
    prompts = [(prompt.prompt_id, prompt.prompt_ids) for prompt in [*sets.train, *sets.heldout]]
    responses, _ = decode(target.model, None, prompts, decode_settings(config.serving, 0, target))
    assert len(responses) == len(prompts) > 2


def test_facts_outlive_the_weights(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    first = Target(TargetConfig(path=str(tmp_path / "target")), CPU, tmp_path)
    facts = first.facts
    first.remember()
    again = Target(TargetConfig(path=str(tmp_path / "target")), CPU, tmp_path)
    assert again.facts == facts
    assert not again.in_memory
    other = Target(TargetConfig(path=str(tmp_path / "target"), dtype="bfloat16"), CPU, tmp_path)
    assert (facts.dtype, other.facts.dtype) == ("float32", "bfloat16")
    assert replace(other.facts, dtype=facts.dtype, fingerprint=facts.fingerprint) == facts
    assert other.in_memory, "facts of another dtype were asked for: the weights tell"
