"""What `make target` does: a tokenizer that any text survives, and at a tiny size the whole of it, killed and resumed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from bench_modules import bench
from failures import Killed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_training import forget_accelerators, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.models.load import EMBEDDED_FOLDER, model_fingerprint

program = bench("train_target")
EOS, batch_indices = program.EOS, program.batch_indices
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60).filter(lambda text: "<|" not in text)


@settings(max_examples=300, deadline=None)
@given(any_text)
@example("")
@example("\n\n  x\t")
@example(" ,don't .")
@example("\x00\x7f")
@example("e\u0301 \u00e9")
@example("👩‍👩‍👧 漢字 ﷽")
def test_any_text_survives(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert all(token > 2 for token in ids[1:])
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer(f"a{EOS}b", add_special_tokens=False)["input_ids"][1] == 2
    assert 260 < len(tokenizer) <= 300
    assert len(tokenizer("2024", add_special_tokens=False)["input_ids"]) == 4, "digits stand alone"
    texts = ["def add(first, second):\n    return first + second\n", "for item in items:\n    print(item)\n"] * 3
    first, again = (program.train_tokenizer(texts, 290, 64) for _ in range(2))
    assert first.backend_tokenizer.to_str() == again.backend_tokenizer.to_str(), "the same text, the same tokenizer"
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert loaded.model_max_length == 256


@pytest.fixture
def few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard library is large: a few lines that can be learnt stand for it."""
    text = "def add(first, second):\n    return first + second\n"
    monkeypatch.setattr(program.stdlib, "modules", lambda heldout: [("one.py", text * 40)])
    monkeypatch.setattr(program.stdlib, "corpus_documents", lambda heldout: [text * 80])
    monkeypatch.setattr(program, "neighbours", lambda: [text])


def made(folder: Path, **options: Any) -> dict[str, Any]:
    """A tiny target; its card."""
    forget_accelerators()
    sizes = {"steps": 6, "judge_every": 3, "save_every": 2, "width": 32, "layers": 2, "vocab_size": 300, "window": 16}
    program.train_target(folder / "target", folder / "run", **{**sizes, "documents": 0, **options})
    return json.loads((folder / "target" / "card.json").read_text(encoding="utf-8"))


def test_a_target_is_made_judged_and_described(tmp_path: Path, few_documents: None) -> None:
    card = made(tmp_path, steps=40, judge_every=20)
    assert [line.split(":")[0] for line in card["chosen_from"]] == ["step 0", "step 20", "step 40"]
    assert card["steps"] == 40
    assert card["tokens_seen"] == 40 * 16 * 15
    assert card["heldout_loss_nats"] < np.log(300) - 2, "two lines of text are learnt soon"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model_fingerprint(model) == card["fingerprint"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    # The held-out loss is the shipped model's own, give or take bf16.
    ids = torch.tensor(
        tokenizer("def add(first, second):\n    return first + second\n" * 80).input_ids[: 16 * 20]
    ).view(20, 16)
    with torch.no_grad():
        assert float(model.float()(input_ids=ids, labels=ids).loss) == pytest.approx(card["heldout_loss_nats"], rel=0.1)
    said = (tmp_path / "target" / "README.md").read_text(encoding="utf-8")
    assert card["fingerprint"] in said
    assert "zipfile" in said


@pytest.mark.parametrize("kill_at", [1, 3, 4])
def test_a_killed_run_goes_on_and_ends_the_same(
    tmp_path: Path, few_documents: None, monkeypatch: pytest.MonkeyPatch, kill_at: int
) -> None:
    whole = made(tmp_path / "whole")

    def killed(step: int, windows: int) -> np.ndarray:
        if step == kill_at:
            raise Killed
        return batch_indices(step, windows)

    with monkeypatch.context() as patched:
        patched.setattr(program, "batch_indices", killed)
        with pytest.raises(Killed):
            made(tmp_path / "killed")
    assert not (tmp_path / "killed" / "target").exists()
    resumed = made(tmp_path / "killed")
    assert resumed["fingerprint"] == whole["fingerprint"]
    assert resumed["chosen_from"] == whole["chosen_from"]
    with pytest.raises(typer.BadParameter, match="other options"):
        made(tmp_path / "killed", steps=7)


def test_layers_put_in_between_change_nothing_and_learn(tmp_path: Path, few_documents: None) -> None:
    before = made(tmp_path / "first")
    start = tmp_path / "first" / "target"
    small = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    large = program.grown(start, 3, 16)
    ids = torch.randint(3, small.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    # The new layer adds exactly zero to the residual stream.
    torch.testing.assert_close(large(ids).logits, small(ids).logits, rtol=0, atol=0)
    for place, old in ((0, 0), (2, 1)):
        torch.testing.assert_close(
            large.model.layers[place].mlp.up_proj.weight, small.model.layers[old].mlp.up_proj.weight
        )
    card = made(tmp_path / "second", start=start, layers=3)
    assert before["fingerprint"] in card["grown_from"]
    assert card["architecture"]["num_hidden_layers"] == 3
    learnt = AutoModelForCausalLM.from_pretrained(tmp_path / "second" / "target", dtype=torch.float32)
    assert float(learnt.model.layers[1].mlp.down_proj.weight.abs().max()) > 0
    assert card["heldout_loss_nats"] < before["heldout_loss_nats"]


def test_wider_heads_say_the_same() -> None:
    torch.manual_seed(0)
    config = program.LlamaConfig(vocab_size=300, **program.architecture(80, 2, 64))
    model = program.LlamaForCausalLM(config).eval()
    wide = program.with_wide_heads(model, 32).eval()
    assert (model.config.head_dim, wide.config.head_dim) == (20, 32)
    ids = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # Sums over other widths round otherwise.
        torch.testing.assert_close(wide(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_the_shipped_card_is_of_the_shipped_weights() -> None:
    card = json.loads((EMBEDDED_FOLDER / "card.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER, dtype="auto")
    assert model_fingerprint(model) == card["fingerprint"]
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (160, 32, 64)
    assert config.rope_parameters["rope_theta"] == pytest.approx(10000.0**1.6)
    for name, value in card["architecture"].items():
        assert getattr(config, name) == value, name
    assert (EMBEDDED_FOLDER / "README.md").read_text(encoding="utf-8") == program.card_text(card)
