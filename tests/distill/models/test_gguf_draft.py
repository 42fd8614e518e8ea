"""A GGUF file as a draft: its own tokens are compared with the target's, and its weights are judged as they are served."""

from pathlib import Path

import gguf
import pytest
import torch
from gguf_file import write_gguf
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
    config, rows = own.config, own.state_dict()
    plain = 500.0 ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    path = tmp_path / "target.gguf"
    file = gguf.GGUFWriter(path, "llama")
    file.add_block_count(1)
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_key_length(config.head_dim)
    file.add_rope_dimension_count(config.head_dim)
    file.add_rope_freq_base(500.0)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_vocab_size(TOKENS)
    file.add_token_list([str(number) for number in range(TOKENS)])
    file.add_tensor("rope_freqs.weight", (plain / own.model.rotary_emb.inv_freq).numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, weight in rows.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # The format has the two halves of a head in turns.
            weight = weight.view(-1, 2, config.head_dim // 2, config.hidden_size).transpose(1, 2).reshape(weight.shape)
        if name != "lm_head.weight":
            file.add_tensor(names.get_name(name, (".weight",)), weight.contiguous().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    read = load_model("target", str(path))
    ids = torch.arange(1, 60)[None] % TOKENS
    torch.testing.assert_close(read(ids).logits, own(ids).logits, rtol=1e-5, atol=1e-5)
    said = refused(make_student, StudentConfig(init="pretrained", path=str(path)), own, None)
    assert "scales its rotary positions (rope_freqs.weight)" in said
