"""Targets with quantised weights: loaded as saved, told apart, carved from their real values, taken through a whole run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from tiny_models import tiny_model
from tiny_training import TOKENS, tiny_tokenizer, write_prompts
from transformers import AutoModelForCausalLM

from distill import train
from distill.config.sections import LoraConfig, StudentConfig
from distill.models.carving.layers import carve
from distill.models.load import load_model, model_fingerprint
from distill.models.quantized import full_weight, is_plain, quantization_name
from distill.models.student import make_student, with_adapters


@pytest.fixture(scope="module")
def int8_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 Llama whose linear layers are int8, weight only, with the scale of each row."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    plain, folder = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("int8")
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    tiny_model(num_hidden_layers=3, vocab_size=TOKENS, dtype=torch.bfloat16, **ids).save_pretrained(plain)
    how = TorchAoConfig(Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16, quantization_config=how).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_weights_stay_as_they_are_saved(int8_target: Path) -> None:
    """Whatever dtype is asked for: what is served is what teaches and judges."""
    target = load_model("target", str(int8_target), dtype=torch.float32)
    assert quantization_name(target.config) == "torchao"
    weight = target.model.layers[0].mlp.up_proj.weight
    assert (type(weight).__name__, weight.qdata.dtype, target.dtype) == ("Int8Tensor", torch.int8, torch.bfloat16)
    before = model_fingerprint(target)
    assert model_fingerprint(load_model("target", str(int8_target))) == before
    with torch.no_grad():
        weight.qdata[0, 0] += 1
    assert model_fingerprint(target) != before


def test_a_quantised_student_trains_on_its_values_with_and_without_adapters(int8_target: Path) -> None:
    lora = LoraConfig(rank=4, target_modules=("q_proj",))
    config = StudentConfig(init="pretrained", path=str(int8_target))
    target, tokenizer = load_model("target", str(int8_target)), tiny_tokenizer()
    whole, adapted = (with_adapters(make_student(config, target, tokenizer), how) for how in (None, lora))
    packed, plain = target.model.layers[1].mlp.up_proj.weight, whole.model.layers[1].mlp.up_proj.weight
    torch.testing.assert_close(plain, full_weight(packed).float(), rtol=0, atol=0)
    assert all(is_plain(weight) for weight in whole.parameters())
    assert all(weight.requires_grad for weight in whole.parameters())
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert len(trained) == 6
    assert all("q_proj.lora_" in name for name in trained)
    carved = StudentConfig(init="carved", layers=(0,), lora=lora)  # of the target's values, so its weights are plain
    assert with_adapters(make_student(carved, target, tokenizer), lora).peft_config


def test_a_carved_draft_has_the_values_of_the_quantised_weights(int8_target: Path) -> None:
    target = load_model("target", str(int8_target))
    draft = carve(target, (0, 1, 2))
    weight = target.model.layers[1].mlp.down_proj.weight
    expected = weight.qdata.float() * weight.scale.float().reshape(-1, 1)
    torch.testing.assert_close(draft.model.layers[1].mlp.down_proj.weight, expected, rtol=2**-8, atol=0)
    torch.testing.assert_close(full_weight(weight).float(), expected, rtol=2**-8, atol=0)
    assert draft.dtype == torch.float32
    assert not hasattr(draft.config, "quantization_config")


@pytest.mark.usefixtures("without_figures")
def test_a_run_on_a_quantised_target(int8_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers, self-checks, online teacher, adapters, live judging, c and an export's worth of draft, without dequantising the target."""
    monkeypatch.chdir(tmp_path)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 20)
    (tmp_path / "run.yaml").write_text(
        f"name: run\ntarget: {{path: {int8_target}}}\n"
        f"student: {{init: pretrained, path: {int8_target}, lora: {{rank: 2}}}}\n"
        f"data: {{train: [{{path: {prompts}, prompt_column: prompt}}], template: {{mode: plain}}}}\n"
        "serving: {temperature: 0.8, max_tokens: 6}\ntrain: {steps: 2, batch_size: 4, micro_batch_size: 4}\n"
        "judge: {every: 2, prompts: 4, gamma: 2, speed_prompts: 2, speed_seconds: 0.5}\n"
    )
    assert train.main(["run.yaml"]) == 0
    run = tmp_path / "runs" / "run"
    result: dict[str, Any] = json.loads((run / "result.json").read_text())
    checks = result["verdict"]["self_checks"]
    assert checks["alpha_live"] == pytest.approx(1.0, abs=0.015)
    assert checks["dtype"] == "bfloat16"
    assert result["verdict"]["costs"]["cost_ratio"] > 0
    saved = json.loads(next(run.glob("**/student/config.json")).read_text())
    assert "quantization_config" not in saved


def test_packed_weights_are_not_carved_and_the_format_is_named() -> None:
    """As AWQ, GPTQ and four-bit weights are: several values in one number, under other names or shapes."""
    target = tiny_model()
    target.config.quantization_config = {"quant_method": "awq", "bits": 4}
    projection = target.model.layers[0].mlp.up_proj
    projection.weight = torch.nn.Parameter(torch.zeros(64 * 32 // 2, 1, dtype=torch.uint8), requires_grad=False)
    assert re.search(r"packed \(awq\).*student\.path", refused(carve, target, (0,)))


def test_a_quantisation_whose_library_is_missing_is_one_line(tmp_path: Path) -> None:
    model = tiny_model()
    model.config.quantization_config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    model.save_pretrained(tmp_path)
    assert re.search(r"target\.path .* cannot be loaded", refused(load_model, "target.path", str(tmp_path)))
