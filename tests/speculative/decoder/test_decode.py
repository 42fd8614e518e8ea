"""The block loop: the target's text at any gamma, batch, end token and budget; sampled text in the right distribution.

Two-layer random models in float32 on one CPU thread: near-ties do not occur with these seeds, so equality is exact.
"""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import generated, perturbed, prompts_of, texts, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.engine.models import end_token_ids
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings, logits_to_probs
from speculative.rules.tree import TokenTree

TARGET = tiny_model()
DRAFT = perturbed(TARGET)
RAGGED = [9, 1, 23, 4, 70, 2, 15, 6]
TREE = TokenTree.from_branching((3, 2, 1))


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("shape", [0, 1, 5, TREE], ids=str)
def test_greedy_equals_transformers_generate_for_ragged_prompts(batch_size, shape):
    """A chain of so many tokens, or a tree."""
    prompts = prompts_of(RAGGED)
    gamma, tree = (shape.depth, shape) if shape is TREE else (shape, None)
    settings = DecodeSettings(GREEDY, gamma, Rule.named("greedy"), max_tokens=24, tree=tree)
    responses, timing = decode(TARGET, ModelDrafter(DRAFT), prompts, settings, batch_size=batch_size)
    assert texts(responses) == generated(TARGET, prompts, 24)
    if gamma:
        counts = [count for response in responses for count in response.accepted_counts]
        assert set(counts) >= {0, 1, gamma}, "the draft must be right and wrong for this test to mean anything"
        assert sum(response.blocks for response in responses) < 24 * len(prompts)
        assert timing.target_calls >= max(response.blocks for response in responses)


@pytest.mark.parametrize("gamma", [0, 4])
def test_log_target_probs_are_those_of_a_fresh_forward(gamma):
    sampling = SamplingSettings(0.7, top_p=0.9)
    prompts = prompts_of(RAGGED)
    responses, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, DecodeSettings(sampling, gamma, max_tokens=16))
    for response in responses:
        with torch.no_grad():
            ids = torch.tensor([response.prompt_ids + response.response_ids])
            logits = TARGET(ids).logits[0, len(response.prompt_ids) - 1 : -1]
        tokens = torch.tensor(response.response_ids).unsqueeze(1)
        expected = logits_to_probs(logits, sampling).gather(1, tokens).squeeze(1).log()
        # Float32 sums in another order.
        torch.testing.assert_close(torch.tensor(response.log_target_probs), expected, rtol=1e-3, atol=1e-4)


def test_counts_and_hook_describe_the_text():
    prompts = prompts_of(RAGGED)
    settings = DecodeSettings(SamplingSettings(1.0), 3, Rule.named("sample"), max_tokens=17, eos_ids=(5, 11), seed=1)
    committed: dict[int, list[list[int]]] = {}
    responses, timing = decode(
        TARGET,
        ModelDrafter(DRAFT),
        prompts,
        settings,
        batch_size=3,
        on_commit=lambda index, ids: committed.setdefault(index, []).append(ids),
    )
    for index, response in enumerate(responses):
        assert [token for ids in committed[index] for token in ids] == response.response_ids
        assert len(committed[index]) == response.blocks == len(response.accepted_counts)
        assert response.drafted == 3 * response.blocks
        assert response.accepted == sum(response.accepted_counts)
        assert response.tested == sum(min(count + 1, 3) for count in response.accepted_counts)
        mask = []
        for ids, count in zip(committed[index], response.accepted_counts, strict=True):
            mask += [1] * min(count, len(ids)) + [0] * (len(ids) - min(count, len(ids)))
        assert response.proposed_mask == mask
        assert response.key == prompts[index][0]
    assert 0 < timing.draft_seconds + timing.verify_seconds + timing.prefill_seconds <= timing.total_seconds


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_response_may_fill_the_context_to_its_last_position(kind):
    """Drafted tokens overshoot a context that is exactly prompt + max_tokens; GPT-2 has no row for such a position."""
    limit = {"n_positions": 32} if kind == "gpt2" else {"max_position_embeddings": 32}
    target = tiny_model(kind, **limit)
    prompts = prompts_of([12, 3, 12])
    settings = DecodeSettings(GREEDY, 6, Rule.named("greedy"), max_tokens=20)
    responses, _ = decode(target, ModelDrafter(perturbed(target)), prompts, settings)
    assert texts(responses) == generated(target, prompts, 20)


def test_end_token_ids_are_those_of_all_files():
    model = tiny_model()
    assert end_token_ids(model) == ()
    model.config.eos_token_id = 4
    model.generation_config.eos_token_id = None
    assert end_token_ids(model) == (4,)
    model.generation_config.eos_token_id = [7, 9]
    assert end_token_ids(model) == (7, 9), "4 may be the default of the config's class"
    tokenizer = SimpleNamespace(eos_token_id=11, added_tokens_decoder={4: "<|end|>", 5: "", 11: "<|turn|>"})
    assert end_token_ids(model, tokenizer) == (7, 9, 4, 11)
    model.generation_config.eos_token_id, tokenizer.eos_token_id = 4, None
    assert end_token_ids(model, tokenizer) == (4,)
