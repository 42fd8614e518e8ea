"""The target as everybody gets it: one object, its facts known without its weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from tiny_models import tiny_model
from tiny_training import write_prompts, write_target

from distill.config.run import RunConfig
from distill.config.target import TargetConfig
from distill.models.load import _refuse_offloaded
from distill.models.target import Target
from distill.run.prompts import load_prompts
from distill.run.responses import decode_settings
from distill.run.session import context_limit
from speculative.decode import decode
from speculative.errors import UserError

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
    assert again._model is None
    other = Target(TargetConfig(path=str(tmp_path / "target"), dtype="bfloat16"), CPU, tmp_path)
    assert (facts.dtype, other.facts.dtype) == ("float32", "bfloat16")
    assert replace(other.facts, dtype=facts.dtype, fingerprint=facts.fingerprint) == facts
    assert other._model is not None, "facts of another dtype were asked for: the weights tell"


def test_a_target_that_is_not_in_memory_is_borrowed(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    target = Target(TargetConfig(path=str(tmp_path / "target")), CPU)
    whole = target.model
    with target.borrowed():
        assert target.model is whole, "it is in memory"
    with target.arranged():
        with target.borrowed():
            assert target._model is None, "nobody has asked for it yet"
            assert sum(one.numel() for one in target.model.parameters()) == whole.num_parameters()
        assert target._model is None
        with pytest.raises(UserError, match=r"set judge\.live: end"), target.borrowed():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    share = tiny_model()
    with target.arranged(lambda: share):
        with target.borrowed():
            assert target.model is not share
        assert target.model is share
    assert target.model is not whole


def test_a_target_spread_by_accelerate_is_the_same_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without GPUs everything lies on its one device; several processes cannot each have all GPUs."""
    write_target(tmp_path / "target")
    facts = Target(TargetConfig(path=str(tmp_path / "target")), CPU).facts
    spread = Target(TargetConfig(path=str(tmp_path / "target"), device_map="auto"), CPU)
    assert spread.facts == facts
    assert spread.model.device == CPU
    spread._free()
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    with pytest.raises(UserError, match=r"target\.device_map: auto gives one process all GPUs, and 2 were started"):
        _ = spread.model


@pytest.mark.parametrize("left", ["cpu", "disk"])
def test_a_target_that_does_not_fit_on_all_gpus_is_refused(left: str, tmp_path: Path) -> None:
    """accelerate would leave layers in memory or on disk and send them to a GPU for every token."""
    model = write_target(tmp_path)
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": left}
    with pytest.raises(UserError, match="does not fit on the 0 GPUs here"):
        _refuse_offloaded("target.path", str(tmp_path), model)
