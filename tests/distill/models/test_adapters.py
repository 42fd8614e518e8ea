"""One shared draft with an adapter for each domain: read apart from its base, and served by switching."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from refusals import refused
from tiny_models import tiny_model
from tiny_training import TOKENS, tiny_tokenizer, write_target

from distill.config.sections import StudentConfig
from distill.config.target import TargetConfig
from distill.export.pair import check_pair
from distill.models.draft import load_draft
from distill.models.load import load_model, model_files
from distill.models.student import context_of
from distill.models.target import Target
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.rules.rule import Rule
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
    settings = DecodeSettings(SamplingSettings(0.0), 3, Rule.named("greedy"), 12, target.facts.eos_ids, 0)
    with target.loaded() as model:
        plain, _ = decode(model, None, PROMPTS, settings.under(Rule.named("greedy"), 0))
    both = PeftModel.from_pretrained(
        load_draft(str(folder / "base"), target), folder / "one", adapter_name="one"
    ).eval()
    both.load_adapter(folder / "two", adapter_name="two")
    logits = {}
    for name in ("two", "one"):
        both.set_adapter(name)
        merged = load_draft(str(folder / name), target)
        apart, one = (
            decode(model, ModelDrafter(draft), PROMPTS, settings)[0] for draft in (both.get_base_model(), merged)
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


def test_an_adapter_is_loaded_with_its_base_wherever_a_model_is(shared: tuple[Target, Path]) -> None:
    _, folder = shared
    path = str(folder / "one")
    own = Target(TargetConfig(path=path), torch.device("cpu"))
    with own.loaded() as whole:
        assert all(weight.requires_grad for weight in whole.parameters()), "a student trains all of it"
    ids_BT = torch.arange(3, 9)[None]
    adapted = PeftModel.from_pretrained(load_model("base", str(folder / "base")), path).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            whole(input_ids=ids_BT).logits, adapted(input_ids=ids_BT).logits, atol=1e-5, rtol=1e-5
        )  # order of sums
    assert own.tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    assert own.side.generation_config.eos_token_id == 2
    assert (
        own.facts.fingerprint != Target(TargetConfig(path=str(folder / "base")), torch.device("cpu")).facts.fingerprint
    )
    assert {file.parent.name for file in model_files(path)} == {"one", "base"}
    assert context_of(StudentConfig(init="pretrained", path=path)) == own.facts.context_length
    broken, _ = check_pair(path, str(folder / "base"))
    assert any("is an adapter of" in line and "merge_and_unload" in line for line in broken)


def test_an_adapter_with_a_larger_table_brings_its_rows(shared: tuple[Target, Path]) -> None:
    _, folder = shared
    base = load_model("base", str(folder / "base"))
    base.resize_token_embeddings(TOKENS + 3)
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    get_peft_model(base, lora).save_pretrained(folder / "wide")
    path = folder / "wide" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "../base"}))
    assert load_model("target", str(folder / "wide")).config.vocab_size == TOKENS + 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"base_model_name_or_path": "/nowhere/base"},
            r"target '.*one': its base \(adapter_config.json: .*\) '/nowhere/base': no config.json there",
        ),
        ({"base_model_name_or_path": "../gone"}, r"its base .* '../gone': no config.json there"),
        ({"base_model_name_or_path": "."}, "is the adapter itself"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is empty"),
        ({"target_modules": ["q_proj"]}, "the adapter does not fit its base .*is only in one of the two"),
        (
            {"target_modules": ["q_proj", "up_proj", "down_proj"]},
            "the adapter does not fit its base .*is only in one of the two",
        ),
    ],
)
def test_an_adapter_that_cannot_be_used_is_one_line(
    change: dict[str, object], text: str, shared: tuple[Target, Path]
) -> None:
    path = shared[1] / "one" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert re.search(text, refused(load_model, "target", str(path.parent)))


def test_prompt_tuning_cannot_be_merged(shared: tuple[Target, Path]) -> None:
    _, folder = shared
    tuned = get_peft_model(
        load_model("base", str(folder / "base")), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    tuned.save_pretrained(folder / "prompt")
    path = folder / "prompt" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "../base"}))
    assert "cannot be merged" in refused(load_model, "target", str(folder / "prompt"))
