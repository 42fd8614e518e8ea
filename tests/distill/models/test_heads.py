"""Body then head gives the model's own logits, whatever the architecture does after its last layer."""

from typing import Any

import pytest
import torch
from refusals import refused
from tiny_models import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

from distill.models.heads import SplitModel

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 16},
    "gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "mistral": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_head_of_hidden_is_the_models_logits(kind: str) -> None:
    model = tiny_model(kind, **KINDS[kind])
    ids_BT = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    split = SplitModel(model)
    with torch.no_grad():
        expected, mine = model(input_ids=ids_BT).logits, split.head(split.hidden(ids_BT))
    assert expected.std() > 0.05, "logits that are all alike would prove nothing"
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)  # the same operations


class ScaledLlama(LlamaForCausalLM):
    """An architecture with a last step that nobody told us about."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output


def tiny_config(spread: float) -> LlamaConfig:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return LlamaConfig(**sizes, vocab_size=50, initializer_range=spread)


@pytest.mark.parametrize("spread", [0.2, 0.02])
def test_an_unknown_tail_is_refused(spread: float) -> None:
    torch.manual_seed(0)
    text = refused(SplitModel, ScaledLlama(tiny_config(spread)))
    assert "ScaledLlama" in text
    assert "do not give the model's logits" in text


def test_a_model_without_a_head_is_refused() -> None:
    assert "no separate output head" in refused(SplitModel, tiny_model().model)


def test_training_mode_survives_the_check() -> None:
    model = tiny_model("gpt2").train()  # with dropout, so that a check in training mode would fail
    SplitModel(model)
    assert model.training


def test_the_content_of_a_row_is_passed_and_not_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the hidden states that transformers gives when it asks."""
    model = tiny_model("gemma2", sliding_window=4)
    ids_BT = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    positions_BT = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5, 0, 1]])
    split = SplitModel(model)
    with torch.no_grad():
        whole = split.body(input_ids=ids_BT, use_cache=False).last_hidden_state
        packed = split.body(input_ids=ids_BT, position_ids=positions_BT, use_cache=False).last_hidden_state

        def asked(*_: Any) -> None:
            raise AssertionError("the device was asked")

        monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", asked)
        assert torch.equal(split.hidden(ids_BT), whole)
        assert torch.equal(split.hidden(ids_BT, positions_BT), packed)
    assert not torch.allclose(whole, packed)
    assert masking_utils.find_packed_sequence_indices is asked
