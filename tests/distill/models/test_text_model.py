"""Multimodal checkpoints: loaded as their text model, which decodes, carves, trains and saves as a causal LM of its own."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import COMMON, VOCAB, generated, logits, perturbed, prompts_of, texts
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from distill.models.carving.layers import carve, layers_only
from distill.models.load import load_model
from distill.models.text_model import auto_class, text_only
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.errors import UserError
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY

TEXT = COMMON | {
    "vocab_size": VOCAB,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
BLOCKS = {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
KINDS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            "model_type": "gemma3_text",
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": LAYERS,
        "image_token_index": 40,
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral"},
        "vision_config": LAYERS | {"model_type": "pixtral"},
        "image_token_index": 40,
    },
    "qwen2_5_vl": {
        "text_config": {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}},
        "vision_config": BLOCKS,
        "image_token_id": 40,
    },
    "qwen3_vl": {
        "text_config": {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        "vision_config": BLOCKS | {"deepstack_visual_indexes": [0]},
        "image_token_id": 40,
    },
}
TEXT_CLASSES = {
    "gemma3": "Gemma3ForCausalLM",
    "mistral3": "MistralForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen3_vl": "Qwen3ForCausalLM",
}


def multimodal(kind: str, **text: Any) -> PreTrainedModel:
    options = copy.deepcopy(KINDS[kind])
    options["text_config"] = TEXT | options["text_config"] | text
    options["vision_config"] = VISION | options["vision_config"]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**options)
    return auto_class(config).from_config(config).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_multimodal_checkpoint_is_loaded_as_its_text_model(kind: str, tmp_path: Path) -> None:
    whole = multimodal(kind)
    whole.save_pretrained(tmp_path / "whole")
    target = load_model("target", str(tmp_path / "whole"))
    assert type(target).__name__ == TEXT_CLASSES[kind]
    torch.testing.assert_close(logits(target), logits(whole), rtol=0, atol=0)
    assert not any("vision" in name or "visual" in name or "projector" in name for name, _ in target.named_parameters())

    prompts, settings = prompts_of([5, 1, 12]), DecodeSettings(GREEDY, 3, Rule.named("greedy"), max_tokens=12)
    responses, _ = decode(target, ModelDrafter(perturbed(target)), prompts, settings)
    assert texts(responses) == generated(whole, prompts, 12)

    draft = carve(target, (0, 1))
    torch.testing.assert_close(logits(draft), logits(whole), rtol=0, atol=0)
    draft.train()(input_ids=torch.arange(1, 9).unsqueeze(0)).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in draft.parameters())  # DDP waits for each of them
    draft.save_pretrained(tmp_path / "draft")
    torch.testing.assert_close(logits(load_model("draft", str(tmp_path / "draft"))), logits(whole), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "own"),
    [("gemma3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}), ("qwen3_vl", {})],
)
def test_a_text_model_with_some_layers_is_the_carved_draft(kind: str, own: dict[str, Any]) -> None:
    target = text_only(multimodal(kind, num_hidden_layers=3, **own))
    for kept in ((1, 2), (0, 2)):
        with layers_only(target, kept):
            inside = logits(target)
        torch.testing.assert_close(inside, logits(carve(target, kept)), rtol=0, atol=0)


def test_a_text_model_that_says_something_else_is_not_taken() -> None:
    whole = multimodal("gemma3")
    whole.lm_head.register_forward_hook(lambda module, inputs, output: output)  # moves along with the head
    assert text_only(whole) is not whole
    whole = multimodal("gemma3")
    whole.register_forward_hook(lambda module, inputs, output: setattr(output, "logits", output.logits.tanh()))
    assert text_only(whole) is whole
    with pytest.raises(
        UserError, match=r"Gemma3ForConditionalGeneration is multimodal.*student\.init: pretrained or config"
    ):
        carve(whole, (0,))


def test_a_text_model_is_itself() -> None:
    config = CONFIG_MAPPING["llama"](**TEXT)
    model = AutoModelForCausalLM.from_config(config)
    assert text_only(model) is model
    assert auto_class(config) is AutoModelForCausalLM
