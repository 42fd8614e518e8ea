"""Every weight of the files is used and every weight of the model is in them, or one line says which is not."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers.utils import logging as transformers_logging

from distill.models.load import load_model, read_config

Weights = dict[str, torch.Tensor]
LAYER = "model.layers.0."
ONE = torch.ones(1)


def saved(folder: Path, change: Callable[[Weights], Weights], kind: str = "llama", **config: Any) -> str:
    """A tiny model's folder with its weights changed, and keys of its config.json."""
    tiny_model(kind).save_pretrained(folder)
    weights = change(load_file(folder / "model.safetensors"))
    save_file({name: value.clone() for name, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return str(folder)


def drafting_layer(weights: Weights) -> Weights:
    return weights | {re.sub(r"layers\.0", "layers.2", name): value for name, value in weights.items() if LAYER in name}


def adding(*names: str) -> Callable[[Weights], Weights]:
    return lambda weights: weights | dict.fromkeys(names, ONE)


def unchanged(weights: Weights) -> Weights:
    return weights


def under_another_name(weights: Weights) -> Weights:
    return {f"base_model.model.{name}": value for name, value in weights.items()}


def without_head(weights: Weights) -> Weights:
    return {name: value for name, value in weights.items() if name != "lm_head.weight"}


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (adding(f"{LAYER}self_attn.rotary_emb.inv_freq", f"{LAYER}self_attn.masked_bias"), {}),
        (adding(f"{LAYER}self_attn.k_scale", f"{LAYER}self_attn.v_proj.output_scale"), {}),
        (adding("v_head.summary.weight", "mtp.fc.weight", "model.mtp_layers.0.norm.weight"), {}),
        (adding("model.visual.blocks.0.weight", "vision_tower.embeddings.weight"), {}),
        (drafting_layer, {"num_nextn_predict_layers": 1}),
        (without_head, {"tie_word_embeddings": True}),
    ],
)
def test_weights_that_change_no_logit_are_left_out(change: Any, config: dict[str, Any], tmp_path: Path) -> None:
    assert tiny_model().config.num_hidden_layers == 2
    load_model("target", saved(tmp_path, change, **config))


SCALE, FP8 = f"{LAYER}mlp.up_proj.weight_scale", {"quant_method": "modelopt", "quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("change", "config", "text"),
    [
        (adding("lm_head.bias"), {}, "weight lm_head.bias is in the files, and .*LlamaForCausalLM does not use it"),
        (drafting_layer, {}, r"weight model\.layers\.2\.\S+ is in the files"),
        (unchanged, {"num_hidden_layers": 3}, r"layers\.2\.\S+ is missing in the files \(of 9 that do not fit\)"),
        (unchanged, {"intermediate_size": 24}, r"\S+proj.weight has shape .* in the files, .*24.* by config.json"),
        (under_another_name, {}, "weight base_model.model.lm_head.weight is in"),
        (
            adding(SCALE, f"{LAYER}mlp.up_proj.input_scale"),
            {"quantization_config": FP8},
            r"input_scale .*quantised in a way .* \(modelopt\); give the model before",
        ),
        (adding(SCALE), {}, r"weight_scale .*\(config.json does not say how\)"),
        (adding("fc.weight", "d2t"), {}, r"is a draft head, .*\(weight d2t\)"),
    ],
)
def test_weights_that_do_not_fit_are_one_line(
    change: Any, config: dict[str, Any], text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert re.search(text, refused(load_model, "target", saved(tmp_path, change, **config)))
    assert "REPORT" not in "".join(capfd.readouterr())


@pytest.fixture
def verbosity() -> Iterator[Callable[[int], None]]:
    """Sets what transformers shows."""
    before = transformers_logging.get_verbosity()
    yield transformers_logging.set_verbosity
    transformers_logging.set_verbosity(before)


def test_an_expert_that_is_missing_is_named(verbosity: Callable[[int], None], tmp_path: Path) -> None:
    def without_expert(weights: Weights) -> Weights:
        name = next(name for name in weights if "experts.1." in name)
        return {key: value for key, value in weights.items() if key != name}

    verbosity(transformers_logging.WARNING)
    path = saved(tmp_path, without_expert, "mixtral")
    assert re.search(
        r"weight model\.layers\.0\.mlp\.experts\.\w+ cannot be made of those in the files \(\w*Error: ",
        refused(load_model, "target", path),
    )
    verbosity(transformers_logging.ERROR)
    assert "set TRANSFORMERS_VERBOSITY=warning to see which" in refused(load_model, "target", path)


def test_a_pad_token_without_a_row_names_the_key(tmp_path: Path) -> None:
    text = refused(load_model, "target", saved(tmp_path, unchanged, pad_token_id=5000))
    assert "config.json: pad_token_id has no row in the embedding; set it to an id below vocab_size" in text


@pytest.mark.parametrize(
    ("config", "sign"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "LlamaForCausalLMEagle3"),
        (
            {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_config": {}},
            "Eagle3Speculator",
        ),
        ({"speculators_config": {"algorithm": "x"}}, "speculators_config"),
        ({"architectures": ["MedusaModel"], "model_type": "medusa"}, "MedusaModel"),
        ({"architectures": ["DeepseekV3ForCausalLMNextN"], "model_type": "deepseek_v3"}, "DeepseekV3ForCausalLMNextN"),
    ],
)
def test_a_draft_head_is_named_as_what_it_is(config: dict[str, Any], sign: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for read in (load_model, read_config):
        assert f"is a draft head, which reads hidden states of its target (config.json: {sign})" in refused(
            read, "draft", str(tmp_path)
        )


def test_a_multimodal_model_named_eagle_is_no_head(tmp_path: Path) -> None:
    config = {"architectures": ["Eagle2ForConditionalGeneration"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config("target", str(tmp_path)).model_type == "llama"
