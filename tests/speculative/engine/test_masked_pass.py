"""Many blocks asked in one pass against each block asked alone."""

import pytest
import torch
from refusals import refused
from tiny_models import tiny_model
from transformers import LlamaConfig

from speculative.engine.models import mask_token_of, masked_pass
from speculative.errors import UserError

MASK = 49
GEMMA = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
KINDS = {
    "llama": {},
    "gpt2": {},
    "qwen3": {},
    "gemma3_text": GEMMA,
    "mistral": {"sliding_window": 4},
    "llama eager": {"attn_implementation": "eager"},
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_block_is_answered_as_if_its_text_ended_at_its_start(kind):
    """Float64: what is left are sums in another order; the eager path takes its softmax in float32."""
    close = {"rtol": 1e-9, "atol": 1e-9} if "eager" not in kind else {"rtol": 1e-4, "atol": 1e-5}
    model = tiny_model(kind.split()[0], dtype=torch.float64, **KINDS[kind])
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(0, 48, (3, 12), generator=generator)
    depths_BT = torch.randint(0, 6, (3, 12), generator=generator)
    depths_BT[1] = 0
    depths_BT[2, 4:] = 0
    asked = masked_pass(model, ids_BT, depths_BT, MASK)
    logits_BLV = model(**asked.inputs).logits
    torch.testing.assert_close(logits_BLV[:, :12], model(ids_BT).logits, **close)
    found = [part.tolist() for part in (asked.texts_N, asked.starts_N, asked.offsets_N, asked.columns_N)]
    wanted = [(b, s, k) for b in range(3) for s in range(12) for k in range(2, int(depths_BT[b, s]) + 1)]
    assert list(zip(*found[:3], strict=True)) == wanted
    assert asked.input_ids_BL.shape[1] == 12 + int((depths_BT - 1).clamp_min(0).sum(1).max())
    for text, start, offset, column in zip(*found, strict=True):
        alone = torch.cat((ids_BT[text, : start + 1], torch.full((offset - 1,), MASK)))
        expected_V = model(alone[None]).logits[0, -1]
        torch.testing.assert_close(logits_BLV[text, column], expected_V, **close)


def test_models_that_cannot_be_asked_so_are_refused_in_one_line():
    ids, depths = torch.tensor([[3, 4, 5]]), torch.tensor([[2, 0, 0]])
    recurrent = {"attention_layers_idx": [1], "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    mixed = tiny_model("mistral", sliding_window=4)
    mixed.config.layer_types = ["chunked_attention", "full_attention"]
    for model, message in ((tiny_model("lfm2", **recurrent), "recurrent state"), (mixed, "chunked_attention")):
        assert message in refused(masked_pass, model, ids, depths, MASK)


def test_the_mask_token_is_a_row_of_the_vocabulary():
    assert mask_token_of(LlamaConfig(vocab_size=50)) is None
    assert mask_token_of(LlamaConfig(vocab_size=50, pard_token=49, ptd_token_id=3)) == 49
    assert mask_token_of(LlamaConfig(vocab_size=50, ptd_token_id=0)) == 0
    for wrong in (50, -1, "7", True):
        with pytest.raises(UserError, match=r"pard_token = .*0\.\.49"):
            mask_token_of(LlamaConfig(vocab_size=50, pard_token=wrong))
