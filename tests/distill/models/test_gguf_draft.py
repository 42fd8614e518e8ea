"""A GGUF file as a draft: its own tokens are compared with the target's, and its weights are judged as they are served."""

from pathlib import Path

import pytest
import torch
from gguf_file import write_gguf, write_model
from refusals import refused
from tiny_models import tiny_model
from tiny_training import TOKENS, write_target

from distill.config.sections import StudentConfig
from distill.config.target import TargetConfig
from distill.models import draft as drafts
from distill.models.draft import read_draft, served_draft
from distill.models.load import load_model
from distill.models.student import make_student
from distill.models.target import Target
from distill.models.vocabulary import tokens_by_id


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    write_target(tmp_path / "target").to(torch.bfloat16).save_pretrained(tmp_path / "target")
    monkeypatch.setattr(drafts, "load_model", lambda *_: tiny_model(num_hidden_layers=1, vocab_size=TOKENS))
    return Target(TargetConfig(path=str(tmp_path / "target")), torch.device("cpu"))


def file_of(folder: Path, target: Target, *more: str, end: int | None = None, **changes: str) -> str:
    tokens = [string for _, string in sorted(tokens_by_id(target.tokenizer).items())]
    tokens = [changes.get(f"id_{number}", string) for number, string in enumerate(tokens)][:end]
    return str(write_gguf(folder / "draft.gguf", {"tokenizer.ggml.tokens": [*tokens, *more]}, {}))


def test_a_file_of_another_vocabulary_is_refused(tmp_path: Path, target: Target) -> None:
    said = refused(served_draft, file_of(tmp_path, target, end=-1), target)
    assert "in the target and no token in the draft" in said
    said = refused(served_draft, file_of(tmp_path, target, id_7="other"), target)
    assert "token id 7 is" in said
    assert "in the target and 'other' in the draft" in said
    assert read_draft(file_of(tmp_path, target, id_7="other"), target)[1].verdict == "refuse"
    path = write_gguf(tmp_path / "draft.gguf", {"general.architecture": "clip"}, {})
    assert "no tokenizer.ggml.tokens" in refused(served_draft, str(path), target)


def test_a_file_has_the_weights_that_are_served(tmp_path: Path, target: Target) -> None:
    """The target is saved in bfloat16; padding after the target's tokens is no difference."""
    torch.manual_seed(0)
    path = file_of(tmp_path, target, "[PAD0]")
    torch.manual_seed(0)
    own = drafts.load_model("draft", path)
    torch.manual_seed(0)
    served = served_draft(path, target)
    assert target.saved_dtype == torch.bfloat16
    assert torch.equal(served.model.layers[0].mlp.up_proj.weight, own.model.layers[0].mlp.up_proj.weight)


def test_the_rope_scaling_of_a_file_is_read_and_refused_where_it_would_be_lost(tmp_path: Path) -> None:
    """llama.cpp's converter writes Llama 3.1's scaling as one factor for each frequency."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    own = tiny_model(num_hidden_layers=1, vocab_size=TOKENS, rope_parameters=rope, tie_word_embeddings=True)
    config = own.config
    plain = 500.0 ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    factors = {"rope_freqs.weight": (plain / own.model.rotary_emb.inv_freq).numpy()}
    tokens = {"tokenizer.ggml.tokens": [str(number) for number in range(TOKENS)]}
    path = write_model(tmp_path / "target.gguf", own, tokens, extra=factors)
    read = load_model("target", str(path))
    ids = torch.arange(1, 60)[None] % TOKENS
    torch.testing.assert_close(read(ids).logits, own(ids).logits, rtol=1e-5, atol=1e-5)
    said = refused(make_student, StudentConfig(init="pretrained", path=str(path)), own, None)
    assert "scales its rotary positions (rope_freqs.weight)" in said
