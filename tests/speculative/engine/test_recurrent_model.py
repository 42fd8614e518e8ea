"""Targets and drafts with recurrent layers: transformers' own text, the acceptance that replay predicts, one line where not."""

import numpy as np
import pytest
import torch
from refusals import refused
from tiny_models import generated, perturbed, prompts_of, texts, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.early_exit import EarlyExit
from speculative.engine import recurrent_model
from speculative.engine.cached_model import open_model
from speculative.engine.recurrent_model import RecurrentModel
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse, judge
from speculative.measure.self_checks import self_checks
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings
from speculative.rules.tree import TokenTree

MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_n_groups": 1}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
KINDS = {
    "qwen3_5_text": DELTA | {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
    "bamba": MAMBA | {"mamba_expand": 2, "attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "mamba": {"state_size": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
pytestmark = pytest.mark.filterwarnings("ignore")


def hybrid(kind, seed=0):
    return tiny_model(kind, seed=seed, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_transformers_generate(kind, monkeypatch):
    """Rows that end early, are taken by another prompt and roll back past the copy that is kept."""
    monkeypatch.setattr(recurrent_model, "CHECKPOINT_STEP", 4)
    target, prompts = hybrid(kind), prompts_of([5, 1, 9])
    settings = DecodeSettings(GREEDY, 2, Rule.named("greedy"), max_tokens=9)
    responses, _ = decode(target, ModelDrafter(perturbed(target)), prompts, settings, batch_size=2)
    assert texts(responses) == generated(target, prompts, 9)
    assert sum(response.blocks for response in responses) < 27  # something was accepted


def test_a_hybrid_judges_itself_and_a_draft_as_replay_predicts():
    target, draft = hybrid("lfm2"), perturbed(hybrid("lfm2"))
    settings = DecodeSettings(SamplingSettings(), 3, Rule.named("sample"), max_tokens=12, seed=4)
    prompts = prompts_of([5, 2, 7])
    found = self_checks(target, prompts, settings)
    assert (found["alpha_live"], found["greedy_equal"]) == (pytest.approx(1.0, abs=1e-3), 3)
    plain, _ = decode(
        target, None, prompts, DecodeSettings(SamplingSettings(), 0, Rule.named("sample"), max_tokens=12, seed=5)
    )
    heldout = [
        HeldoutResponse(r.key, "d", tuple(r.prompt_ids), tuple(r.response_ids), r.log_target_probs) for r in plain
    ]
    record, _ = judge(target, Draft(draft), heldout, settings)
    assert abs(record.replay_check.z) < 4
    assert len(record.warnings) == 1
    assert "speeds and c are not" in record.warnings[0]


def test_reading_text_again_gives_the_same_logits(monkeypatch):
    """Any walk over a text, back and forth, against one forward over all of it."""
    monkeypatch.setattr(recurrent_model, "CHECKPOINT_STEP", 3)
    for kind, goes_on in (("qwen3_5_text", True), ("jamba", False)):
        model = hybrid(kind)
        ids = torch.tensor(prompts_of([20])[0][1]).unsqueeze(0)
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits[0]
            fed = open_model(model, "target", 1, 24, "eager")
            assert isinstance(fed, RecurrentModel)
            assert fed._goes_on is goes_on
            fed.prefill(ids.numpy(), [0], np.array([4]))
            for start, tokens in ((4, 3), (5, 4), (9, 1), (8, 5), (13, 2), (12, 6), (2, 3), (5, 15)):
                logits = fed.feed(ids[:, start : start + tokens], np.array([start]), tokens)[0]
                torch.testing.assert_close(logits, expected[start : start + tokens], rtol=1e-3, atol=1e-4)


def test_a_state_that_several_tokens_drop_is_noticed_where_it_matters_late():
    """Weights as transformers draws them, a text of 40 tokens: 3 tokens of it would matter less than one percent."""
    model = tiny_model("mamba", num_hidden_layers=4, hidden_size=64, initializer_range=0.1, state_size=16)
    ids = torch.randint(1, 50, (1, 46), generator=torch.Generator().manual_seed(0))
    fed = open_model(model, "target", 1, 46, "eager")
    with torch.no_grad():
        fed.prefill(ids.numpy(), [0], np.array([40]))
        logits, expected = fed.feed(ids[:, 40:], np.array([40]), 6)[0], model(input_ids=ids, use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected[40:], rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_a_state_that_is_not_used_is_refused_in_one_line():
    model = hybrid("lfm2")
    forward = model.model.forward
    model.model.forward = lambda *args, **kwargs: forward(*args, **kwargs | {"past_key_values": None})
    said = refused(
        lambda: decode(model, None, prompts_of([5]), DecodeSettings(GREEDY, 0, Rule.named("greedy"), max_tokens=4))
    )
    assert "(Lfm2ForCausalLM) does not continue from its own state as it reads a whole text" in said


def test_what_one_past_cannot_do_is_refused():
    target = hybrid("lfm2")
    tree = DecodeSettings(GREEDY, 2, Rule.named("greedy"), max_tokens=4, tree=TokenTree((0, 0, 1)))
    with pytest.raises(UserError, match="recurrent state, which does not support token trees: use a chain"):
        decode(target, ModelDrafter(perturbed(target)), prompts_of([3]), tree)
    with pytest.raises(UserError, match="no early exit"):
        EarlyExit(target, 1)
