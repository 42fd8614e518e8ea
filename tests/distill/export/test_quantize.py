"""A draft with 8-bit weights: the numbers that are written, what reads them, and the row of the verdict that judges it."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors import compressors
from safetensors.torch import load_file
from tiny_models import tiny_model
from tiny_training import TOKENS, tiny_tokenizer, write_target
from torch import nn
from transformers import AutoModelForCausalLM

from distill import train
from distill.commands.compare.compare import compare_command
from distill.commands.compare.options import CompareOptions
from distill.commands.export import export_run
from distill.commands.generate.generate import load, recipe_of
from distill.commands.generate.options import GenerateOptions
from distill.commands.options import ExportOptions
from distill.config.command_line import TrainOptions
from distill.config.load import load_config
from distill.export.check import outside_check
from distill.export.export import export_draft
from distill.export.facts import RunFacts
from distill.export.quantize import lighter_draft
from distill.models.draft import load_draft
from distill.models.load import load_model
from distill.models.quantized import FEW_ROWS, Int8Linear, as_served
from distill.models.target import Target
from distill.run.heldout_set import load_heldout_set
from distill.run.responses import decode_settings
from distill.run.session import open_pair
from distill.verdict.decoding import NamedDraft
from distill.verdict.evidence import gather
from distill.verdict.judging_setup import JudgingSetup
from distill.verdict.scored_drafts import score_and_time
from distill.verdict.verdict import verdict_of
from speculative.drafters.draft import Draft
from speculative.drafters.drafter import ModelDrafter
from speculative.errors import UserError
from speculative.measure.measured import DRAFT
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule


def exported(folder: Path, how: Any, **model: Any) -> Path:
    write_target(folder / "target")
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    student = tiny_model(num_hidden_layers=1, vocab_size=TOKENS, **ids, **model)
    student.save_pretrained(folder / "student")
    tiny_tokenizer().save_pretrained(folder / "student")
    facts = RunFacts(folder / "student", str(folder / "target"), quantize=how)
    return export_draft(facts, folder / "out", dtype="float32").path


@pytest.mark.parametrize("width", [40, 128])
def test_int8_linear_is_the_product_with_the_values_that_it_stands_for(width: int) -> None:
    """Torch's own product is wrong, or ends the process, for a width of 40."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (24, width), dtype=torch.int8, generator=generator)
    scale, bias = torch.rand(24, generator=generator).bfloat16(), torch.randn(24, generator=generator)
    layer = Int8Linear(values, scale, bias)
    for rows in (1, FEW_ROWS, FEW_ROWS + 1):
        inputs = torch.randn(rows, 1, width, generator=generator)
        expected = inputs.bfloat16().double() @ (values.double() * scale.double()[:, None]).T + bias
        found = layer(inputs)
        assert (found.shape, found.dtype) == ((rows, 1, 24), torch.float32)
        # bfloat16 keeps 8 bits of what is multiplied and of the sum
        assert (found - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("how", ["int8", "int8-dynamic", "fp8"])
def test_what_is_written_is_read_by_transformers_and_served(tmp_path: Path, how: str) -> None:
    path = exported(tmp_path, how, tie_word_embeddings=True)
    config = json.loads((path / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (group["weights"]["num_bits"], group["weights"]["strategy"]) == (8, "channel")
    assert (group["input_activations"] is None) == (how == "int8")
    assert not config["tie_word_embeddings"], "the head is read whole at every step, the embedding is not"
    serving = json.loads((path / "serving.json").read_text())
    assert serving["draft"]["quantised"] == how
    assert all(engine["ok"] for name, engine in serving["engines"].items() if name in ("vLLM", "transformers"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "student", dtype=torch.float32)
    if how == "int8":
        name = "model.layers.0.mlp.up_proj.weight"
        scale = load_file(path / "model.safetensors")[f"{name}_scale"][:, 0].float()
        # 255 steps from -largest to largest, each scale a bfloat16
        torch.testing.assert_close(scale, plain.state_dict()[name].abs().amax(1) / 127.5, rtol=2**-8, atol=0)
    loaded = load_model("draft", str(path))
    served = as_served(loaded, torch.device("cpu"))
    kinds = {type(one) for name, one in served.named_modules() if name.endswith("_proj") or name == "lm_head"}
    assert kinds == ({Int8Linear} if how == "int8" else {nn.Linear})
    ids = torch.arange(3, 33)[None]
    with torch.no_grad():
        lost = (served(input_ids=ids).logits.softmax(-1) - plain(input_ids=ids).logits.softmax(-1)).abs().sum(-1) / 2
    assert 0 < lost.mean() < (0.1 if how == "fp8" else 0.05)


@pytest.mark.parametrize("symmetric", [True, False])
def test_values_with_zero_points_are_left_to_the_library(symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without their zero point they can leave the range of 8 bits."""
    base = importlib.import_module("compressed_tensors.compressors.base")
    monkeypatch.setattr(base, "decompress_module", lambda layer: None)
    monkeypatch.setattr(compressors.ModelCompressor, "remove_decompression_hook", lambda self, model: None)
    model = nn.Sequential(nn.Linear(4, 4))
    weights = SimpleNamespace(type="int", num_bits=8, symmetric=symmetric)
    model[0].quantization_scheme = SimpleNamespace(input_activations=None, weights=weights)
    model[0].weight_scale = torch.ones(4, 1)
    assert isinstance(as_served(model, torch.device("cpu"))[0], Int8Linear) == symmetric


def test_a_missing_library_and_an_unknown_name_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--quantize int4: choose int8, int8-dynamic, fp8 or none"):
        exported(tmp_path / "a", "int4")
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    with pytest.raises(UserError, match=r"--quantize int8 needs compressed-tensors; `pip install"):
        exported(tmp_path / "b", "int8")
    assert not (tmp_path / "b" / "out").exists()


def test_without_the_library_a_run_is_refused_before_it_begins(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    assert train.command(TrainOptions(str(tiny_config), ["export.quantize=int8"])) == 2
    assert "--quantize int8 needs compressed-tensors" in capsys.readouterr().err


def test_generate_drafts_in_8_bits(tmp_path: Path) -> None:
    """At a width that torch's own product takes; beside a target in float32."""
    path = exported(tmp_path, "int8", hidden_size=128, num_attention_heads=8, head_dim=16)
    asked = GenerateOptions(str(tmp_path / "target"), draft=str(path), device="cpu", dtype="float32")
    with load(asked, recipe_of(asked)) as pair:
        drafter = pair.drafter
    assert isinstance(drafter, ModelDrafter)
    layer = drafter.model.lm_head
    assert isinstance(layer, Int8Linear)
    assert drafter.model(torch.tensor([[5, 6]])).logits.isfinite().all()
    # Elsewhere than on a CPU there is no such product: the library's own layers compute there.
    loaded = load_model("draft", str(path))
    assert not any(isinstance(one, Int8Linear) for one in as_served(loaded, torch.device("cuda")).modules())


def test_the_lighter_draft_is_a_row_of_the_verdict(tiny_config: Path, tiny_run: Path) -> None:
    """Scored on the same text as the draft itself, timed beside it; the same numbers as of its export, beside which compare puts it."""
    config = load_config(tiny_config)
    target = Target(config.target, torch.device("cpu"))
    best = NamedDraft(DRAFT, str(tiny_run), 12, Draft(load_draft(str(tiny_run), target)))
    lighter = NamedDraft(
        "draft in int8", "", 12, Draft(lighter_draft(load_draft(str(tiny_run), target), "int8", target))
    )
    heldout = load_heldout_set(tiny_run).responses[:3]
    settings = decode_settings(config.serving, config.seed, target).under(Rule.named("sample"), 2)
    setup = JudgingSetup(config.judge, settings, {Rule.named("sample"): heldout}, 40)
    with target.loaded() as model:
        evidence = gather(setup, model, score_and_time(setup, model, [best], lighter))
    verdict = verdict_of(evidence, checkpoints=[evidence.judged[DRAFT]], self_checks={})
    row = verdict.row("draft in int8")
    alphas = [
        sum(own.accept_probs(Rule.named("sample")).sum() for own in score_tokens(draft, heldout, settings.sampling))
        / sum(len(text.response_ids) for text in heldout)
        for draft in (lighter.draft.model, best.draft.model)
    ]
    assert row.alpha == pytest.approx(alphas[0], abs=1e-9)
    assert alphas[0] != alphas[1]
    assert row.speed_up > 0
    assert any(
        line.startswith(f"The draft in int8 changes alpha by {alphas[0] - alphas[1]:+.4f} [") for line in verdict.facts
    )


def test_a_quantised_export_is_a_draft_like_any_other(tiny_config: Path, tiny_run: Path, tmp_path: Path) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    export_run(ExportOptions(tiny_run, plain))
    export_run(ExportOptions(tiny_run, out, quantize="int8"))
    config = load_config(tiny_config, [f"output={tmp_path}"])
    with open_pair(config, str(out), prompts=3) as pair:
        assert outside_check(pair, out, gamma=2).theirs.equal_N == [True] * 3
    found, status = compare_command(CompareOptions(drafts=[str(plain), str(out)], on=tiny_run, timing=False))
    assert status == 0
    lost = found.differences[0].alpha.gain
    assert 0 < abs(lost) < 0.02
