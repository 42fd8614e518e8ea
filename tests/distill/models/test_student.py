"""Where a draft's first weights come from: carved, random, ready-made; adapters and what is exported of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from tiny_models import logits, tiny_model
from tiny_training import tiny_tokenizer
from torch import Tensor

from distill.config.sections import LoraConfig, StudentConfig
from distill.loss.definitions import Objective
from distill.models.carving.layers import carve
from distill.models.load import load_model, load_tokenizer
from distill.models.student import add_lora, check_saved, from_architecture, refuse_impossible
from distill.training.module import DraftModule

ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}


def test_carved_layers_come_in_the_order_that_is_asked_for() -> None:
    target = tiny_model("qwen2", num_hidden_layers=4, dtype=torch.bfloat16)
    draft, source = carve(target, [3, 1, -4]), target.state_dict()
    for name, value in draft.state_dict().items():
        layer = re.match(r"model\.layers\.(\d)\.", name)
        origin = name if layer is None else name.replace(layer[0], f"model.layers.{(3, 1, 0)[int(layer[1])]}.")
        torch.testing.assert_close(value, source[origin].float(), rtol=0, atol=0, msg=name)
    assert logits(draft).isfinite().all()


def test_carving_keeps_a_tied_head_tied() -> None:
    draft = carve(tiny_model(num_hidden_layers=3, tie_word_embeddings=True), [0, 2])
    assert draft.lm_head.weight is draft.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("layers", "said"), [([0, 3], "0 to 2"), ([-4], "-3"), ([], "0 to 2"), ([0, -3], "twice"), ([1, 1], "twice")]
)
def test_impossible_layers_are_refused(layers: list[int], said: str) -> None:
    text = refused(carve, tiny_model(num_hidden_layers=3), layers)
    assert "student.layers" in text
    assert said in text


def test_random_weights_follow_the_seed_alone() -> None:
    tokenizer = tiny_tokenizer()
    first = from_architecture(ARCHITECTURE, tokenizer, 320, seed=5)
    torch.manual_seed(99)
    again, other = (from_architecture(ARCHITECTURE, tokenizer, 320, seed=seed) for seed in (5, 6))
    torch.testing.assert_close(again.state_dict(), first.state_dict(), rtol=0, atol=0)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.config.vocab_size == 320
    assert first.config.eos_token_id == tokenizer.eos_token_id


def test_the_rotation_of_an_older_config_file_is_a_field_too() -> None:
    draft = from_architecture(ARCHITECTURE | {"rope_theta": 5e5}, tiny_tokenizer(), 320, seed=5)
    assert draft.config.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize(
    "change", [{"attention_dropout": 0.5}, {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1}]
)
def test_a_draft_with_dropout_is_itself_when_loaded_again(tmp_path: Path, change: dict[str, Any]) -> None:
    architecture = ARCHITECTURE | change if "model_type" not in change else change
    draft = from_architecture(architecture, tiny_tokenizer(), 320, seed=5)
    assert not draft.training
    draft.save_pretrained(tmp_path)
    check_saved(tmp_path, draft.train())
    assert draft.training


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "lama"}, "lama"),
        ({"model_type": None}, "None"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 3, "hidden_size": 16, "head_dim": None}, "heads"),
        ({"hiden_size": 32}, "hiden_size: llama has no such field: did you mean hidden_size"),
    ],
)
def test_impossible_architectures_are_refused_in_one_line(change: dict[str, Any], said: str) -> None:
    text = refused(from_architecture, ARCHITECTURE | change, tiny_tokenizer(), 320, seed=0)
    assert text.startswith("student.architecture")
    assert said in text


def test_unknown_adapter_module_is_refused() -> None:
    assert re.search(r"target_modules.*q_prj", refused(add_lora, tiny_model(), 4, 8.0, ["q_prj"]))


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_an_adapter_on_a_head_that_stays_tied_is_refused(kind: str) -> None:
    model = tiny_model(kind, tie_word_embeddings=True)
    assert f"{kind} as tied only; leave the head" in refused(add_lora, model, 4, 8, ["lm_head"])
    carved = StudentConfig(lora=LoraConfig(target_modules=("lm_head",)))
    assert "as tied only" in refused(refuse_impossible, carved, model.config)  # before the target has answered anything
    add_lora(model, 4, 8, "all-linear")
    assert model.config.tie_word_embeddings


def moved(adapted: Any) -> Tensor:
    """Logits once the adapters are no longer zero."""
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.2)
    return logits(adapted)


@pytest.mark.parametrize("modules", [["q_proj", "lm_head"], ["embed_tokens"]])
def test_adapters_on_tied_tables_are_exported_apart(tmp_path: Path, modules: list[str]) -> None:
    torch.manual_seed(0)
    adapted = add_lora(tiny_model(tie_word_embeddings=True), 4, 8, modules)
    plain = logits(adapted)
    expected = moved(adapted)
    assert (expected - plain).abs().max() > 0.1, "the adapters do something"
    DraftModule(adapted, Objective({"ce": 1.0})).exported().save_pretrained(tmp_path)
    loaded = load_model("draft", str(tmp_path))
    assert not loaded.config.tie_word_embeddings
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)  # merged weights: one product, not two


@pytest.mark.parametrize("tied", [False, True])
def test_export_of_adapters_is_the_adapted_model(tied: bool) -> None:
    torch.manual_seed(0)
    adapted = add_lora(tiny_model(tie_word_embeddings=tied), 4, 8.0, "all-linear")
    plain = logits(adapted)
    expected = moved(adapted)
    module = DraftModule(adapted, Objective({"ce": 1.0}))
    exported = module.exported()
    assert (expected - plain).abs().max() > 0.1, "the adapters do something"
    torch.testing.assert_close(logits(exported), expected, rtol=1e-4, atol=1e-4)  # merged weights: one product, not two
    assert not any("lora" in name for name, _ in exported.named_parameters())
    assert any("lora" in name for name, _ in module.named_parameters()), (
        "a copy was merged, the module goes on training"
    )


@pytest.mark.parametrize("load", [lambda path: load_model("target.path", path), load_tokenizer])
@pytest.mark.parametrize("path", ["./nowhere", "{tmp}/nowhere", "nobody/no-such-model", "no-such-model", "a/b/c/d"])
def test_models_that_are_not_there(load: Any, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    path = path.format(tmp=tmp_path)
    text = refused(load, path)
    assert repr(path) in text
    if path.startswith("no"):
        assert "hf download" in text


@pytest.mark.parametrize("asked", [".", "best"])
def test_a_runs_folder_names_the_draft_inside(asked: str, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "best" / "student")
    text = refused(load_model, "student.path", str(tmp_path / asked))
    assert text.endswith(f"the draft of this run is {tmp_path / 'best' / 'student'}")


def test_a_folder_without_a_model_and_one_with_broken_weights(tmp_path: Path) -> None:
    assert "no config.json" in refused(load_model, "target.path", str(tmp_path))
    tiny_model().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "cannot be loaded" in refused(load_model, "target.path", str(tmp_path))
    weights.unlink()
    assert "cannot be loaded" in refused(load_model, "target.path", str(tmp_path))
