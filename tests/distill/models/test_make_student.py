"""The draft before training, from a config: every way to start, and pairs of keys that cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from tiny_models import logits, prompts_of, tiny_model
from tiny_training import TOKENS, run_config, tiny_tokenizer, train_tokenizer
from torch import nn

from distill.models.carving.layers import carve
from distill.models.load import load_tokenizer
from distill.models.student import from_architecture, make_student, with_adapters
from distill.models.transplant import match_tokens
from distill.models.vocabulary import compare_vocabularies, require_agreement, vocabulary_rows

TEXTS = [ids for _, ids in prompts_of([12, 20, 7, 16], vocab_size=TOKENS)]
ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}


def target_of(**options: Any) -> Any:
    return tiny_model(**{"num_hidden_layers": 4, "vocab_size": TOKENS, **options})


def student_of(folder: Path, student: dict[str, Any], target: Any = None, **options: Any) -> Any:
    config = run_config(folder, student=student)
    student = make_student(
        config.student,
        target_of() if target is None else target,
        tiny_tokenizer(),
        seed=config.seed,
        **options,
    )
    return with_adapters(student, config.student.lora)


def same_weights(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_a_narrow_mlp_keeps_the_channels_that_work(tmp_path: Path) -> None:
    target = target_of()
    active = [3, 17, 40]
    with torch.no_grad():
        silent = torch.ones(64, dtype=torch.bool)
        silent[active] = False
        target.model.layers[3].mlp.up_proj.weight[silent] = 0.0
        target.model.layers[0].mlp.down_proj.weight[:, silent] = 0.0
    notes: dict[str, Any] = {}
    student = student_of(tmp_path, {"layers": [0, -1], "intermediate_size": 3}, target, calibration=TEXTS, notes=notes)
    assert student.config.intermediate_size == 3
    torch.testing.assert_close(
        student.model.layers[1].mlp.gate_proj.weight, target.model.layers[3].mlp.gate_proj.weight[active]
    )
    # Sums over 3 channels instead of 64; weights ten times the usual.
    torch.testing.assert_close(logits(student), logits(carve(target, (0, -1))), rtol=1e-4, atol=1e-4)
    assert notes["intermediate_size"]["activity_kept"] == pytest.approx([1.0, 1.0])
    assert (notes["intermediate_size"]["channels"], notes["intermediate_size"]["of"]) == (3, 64)
    json.dumps(notes)


def test_measuring_needs_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="are chosen on text"):
        student_of(tmp_path, {"layers": [0, -1], "intermediate_size": 8})


def test_random_and_fitted_embeddings(tmp_path: Path) -> None:
    plain = student_of(tmp_path, {"init": "config", "architecture": ARCHITECTURE})
    same_weights(plain, from_architecture(ARCHITECTURE, tiny_tokenizer(), TOKENS, seed=0))
    notes: dict[str, Any] = {}
    options = {"init": "config", "architecture": ARCHITECTURE, "embeddings": "target"}
    fitted = student_of(tmp_path, options, notes=notes)
    assert not torch.equal(fitted.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    assert 0 < notes["embeddings"]["variance_kept"] < 1
    json.dumps(notes)
    same_weights(student_of(tmp_path, options), fitted)


def donor(folder: Path) -> Any:
    """A donor of another tokenizer family, on disk."""
    tokenizer = train_tokenizer(["The quick brown fox.\n" * 9, "three hundred answers" * 5], 320, max_length=256)
    model = tiny_model(vocab_size=len(tokenizer), seed=7)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def test_a_donor_of_another_family(tmp_path: Path) -> None:
    donor(tmp_path / "donor")
    options = {"init": "pretrained", "path": str(tmp_path / "donor"), "layers": [0, -1]}
    assert "do not share a vocabulary" in refused(student_of, tmp_path, options)
    notes: dict[str, Any] = {}
    student = student_of(tmp_path, {**options, "vocabulary": "transplant"}, notes=notes)
    assert require_agreement(
        compare_vocabularies(tiny_tokenizer(), TOKENS, tiny_tokenizer(), vocabulary_rows(student.config))
    )
    assert student.get_input_embeddings().weight.shape[0] == TOKENS
    found = notes["vocabulary"]
    assert found == match_tokens(tiny_tokenizer(), load_tokenizer(str(tmp_path / "donor"))).as_dict()
    assert found["exact"] > 256, "all bytes and some words"
    assert found["exact"] + found["averaged"] + found["fallback"] == len(tiny_tokenizer())
    json.dumps(notes)


def test_a_donors_mask_token_is_not_a_token_of_the_target(tmp_path: Path) -> None:
    model = donor(tmp_path / "donor")
    model.config.pard_token = 310
    model.save_pretrained(tmp_path / "donor")
    options = {"init": "pretrained", "path": str(tmp_path / "donor"), "vocabulary": "transplant", "parallel": {}}
    notes: dict[str, Any] = {}
    student = student_of(tmp_path, options, notes=notes)
    assert student.config.pard_token == notes["parallel"]["mask_token"] < TOKENS


@pytest.mark.parametrize(
    ("student", "said"),
    [
        (
            {"init": "pretrained", "path": "x", "intermediate_size": 9},
            "intermediate_size: 9 needs student.init: carved",
        ),
        ({"embeddings": "target"}, "embeddings: target needs student.init: config"),
        ({"vocabulary": "transplant"}, "vocabulary: transplant needs student.init: pretrained"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(tmp_path: Path, student: dict[str, Any], said: str) -> None:
    assert said in refused(student_of, tmp_path, student, calibration=TEXTS)


def test_adapters_by_default_are_on_every_linear_layer_but_the_head(tmp_path: Path) -> None:
    adapted = student_of(tmp_path, {"layers": [0, -1], "lora": {}})
    lora = adapted.peft_config["default"]
    assert (lora.r, lora.lora_alpha) == (64, 128)
    linear = {name for name, module in carve(target_of(), (0, -1)).named_modules() if isinstance(module, nn.Linear)} - {
        "lm_head"
    }
    found = {
        name.removeprefix("base_model.model.") for name, module in adapted.named_modules() if hasattr(module, "lora_A")
    }
    assert found == linear
    trained = {name for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
