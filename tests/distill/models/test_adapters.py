"""One shared draft with an adapter for each domain: read apart from its base, and served by switching."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from refusals import refused
from tiny_models import tiny_model
from tiny_training import TOKENS, tiny_tokenizer, write_target

from distill.config.target import TargetConfig
from distill.models.draft import load_draft
from distill.models.target import Target
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.rules.sampling import SamplingSettings

PROMPTS = [(f"key{index}", [5 + index, 9, 11 + index]) for index in range(4)]


@pytest.fixture
def shared(tmp_path: Path) -> tuple[Target, Path]:
    """A target, and a folder with `base` and the peft directories `one` and `two` on it, the base named by its place beside them."""
    write_target(tmp_path / "target")
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    tiny_model(num_hidden_layers=1, vocab_size=TOKENS, **ids).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    target = Target(TargetConfig(path=str(tmp_path / "target")), torch.device("cpu"))
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        base = load_draft(str(tmp_path / "base"), target)
        lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        get_peft_model(base, lora).save_pretrained(tmp_path / name, save_embedding_layers=False)
        path = tmp_path / name / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "../base"}))
    return target, tmp_path


def test_an_adapter_is_a_draft_and_our_decoder_serves_several_by_switching(shared: tuple[Target, Path]) -> None:
    target, folder = shared
    settings = DecodeSettings(SamplingSettings(0.0), 3, "greedy", 12, target.facts.eos_ids, 0)
    plain, _ = decode(target.model, None, PROMPTS, settings.under("greedy", 0))
    both = PeftModel.from_pretrained(
        load_draft(str(folder / "base"), target), folder / "one", adapter_name="one"
    ).eval()
    both.load_adapter(folder / "two", adapter_name="two")
    logits = {}
    for name in ("two", "one"):
        both.set_adapter(name)
        merged = load_draft(str(folder / name), target)
        apart, one = (
            decode(target.model, ModelDrafter(draft), PROMPTS, settings)[0] for draft in (both.get_base_model(), merged)
        )
        assert [(text.response_ids, text.blocks) for text in apart] == [
            (text.response_ids, text.blocks) for text in one
        ]
        assert [text.response_ids for text in apart] == [text.response_ids for text in plain]
        with torch.no_grad():
            logits[name] = merged(input_ids=torch.arange(3, 9)[None]).logits
    assert not torch.allclose(logits["one"], logits["two"], atol=0.01)


def test_an_adapter_of_another_base_is_one_line(shared: tuple[Target, Path]) -> None:
    target, folder = shared
    write_target(folder / "base", hidden_size=16)
    assert re.search("the adapter does not fit its base .*base", refused(load_draft, str(folder / "one"), target))
