"""The block loop: the target's text at any gamma, batch, end token and budget; sampled text in the right distribution.

Two-layer random models in float32 on one CPU thread: near-ties do not occur with these seeds, so equality is exact.
"""

import dataclasses

import pytest
import torch
from scipy import stats
from tiny_models import VOCAB, generated, perturbed, prompts_of, texts, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.engine.models import end_token_ids
from speculative.errors import UserError
from speculative.rules.sampling import GREEDY, SamplingSettings, logits_to_probs

TARGET = tiny_model()
DRAFT = perturbed(TARGET)
RAGGED = [9, 1, 23, 4, 70, 2, 15, 6]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_greedy_equals_transformers_generate_for_ragged_prompts(batch_size, gamma):
    prompts = prompts_of(RAGGED)
    expected = generated(TARGET, prompts, 24)
    settings = DecodeSettings(GREEDY, gamma, "greedy", max_tokens=24)
    responses, timing = decode(TARGET, ModelDrafter(DRAFT), prompts, settings, batch_size=batch_size)
    assert texts(responses) == expected
    if gamma:
        counts = [count for response in responses for count in response.accepted_counts]
        assert set(counts) >= {0, 1, gamma}, "the draft must be right and wrong for this test to mean anything"
        assert sum(response.blocks for response in responses) < 24 * len(prompts)
        assert timing.target_calls >= max(response.blocks for response in responses)


@pytest.mark.parametrize("gamma", [0, 4])
def test_every_end_token_is_cut_exactly_where_plain_greedy_stops(gamma):
    prompts, length = prompts_of(RAGGED[:3]), 14
    full = generated(TARGET, prompts, length)
    for offset in range(length):
        eos_ids = (full[0][offset], full[2][-1])
        expected = []
        for text in full:
            ends = [place for place, token in enumerate(text) if token in eos_ids]
            expected.append(text[: ends[0] + 1] if ends else text)
        settings = DecodeSettings(GREEDY, gamma, "greedy", max_tokens=length, eos_ids=eos_ids)
        responses, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, settings)
        assert texts(responses) == expected, offset
        assert [response.finished for response in responses] == [text[-1] in eos_ids for text in expected]


@pytest.mark.parametrize("rule", ["greedy", "sample", "greedy-draft"])
def test_every_budget_is_a_prefix_of_the_longest(rule):
    prompts = prompts_of(RAGGED[:4])
    sampling = GREEDY if rule == "greedy" else SamplingSettings(0.8)
    longest = DecodeSettings(sampling, 4, rule, max_tokens=12)
    full, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, longest)
    for budget in range(1, 12):
        settings = dataclasses.replace(longest, max_tokens=budget)
        responses, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, settings)
        assert texts(responses) == [text[:budget] for text in texts(full)], budget
        for response in responses:
            assert len(response.log_target_probs) == len(response.proposed_mask) == budget
            assert not response.finished


@pytest.mark.parametrize("rule", ["sample", "greedy-draft"])
@pytest.mark.parametrize("gamma", [0, 3])
def test_sampled_text_depends_on_seed_and_key_but_not_on_the_batch(rule, gamma):
    prompts = prompts_of(RAGGED)
    settings = DecodeSettings(SamplingSettings(0.9, top_k=20, top_p=0.95), gamma, rule, 24, eos_ids=(3, 17), seed=5)
    together, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, settings, batch_size=8)
    for batch_size, count in ((1, 3), (3, 8)):
        apart, _ = decode(TARGET, ModelDrafter(DRAFT), prompts[:count][::-1], settings, batch_size=batch_size)
        assert texts(apart[::-1]) == texts(together[:count])
    other_seed, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, dataclasses.replace(settings, seed=6))
    assert texts(other_seed) != texts(together)


@pytest.mark.parametrize(("rule", "gamma"), [("sample", 0), ("sample", 3), ("greedy-draft", 3)])
def test_sampled_text_has_the_targets_distribution(rule, gamma):
    sampling, rows, vocab = SamplingSettings(1.0, top_k=5), 6000, 8
    target = tiny_model(vocab_size=vocab)
    draft = perturbed(target, 0.1)
    prompts = [(str(row), [1, 2, 3]) for row in range(rows)]
    settings = DecodeSettings(sampling, gamma, rule, max_tokens=2)
    responses, _ = decode(target, ModelDrafter(draft), prompts, settings, batch_size=2000)
    counts = torch.zeros(vocab, vocab)
    for first, second in texts(responses):
        counts[first, second] += 1
    joint = torch.zeros(vocab, vocab)
    with torch.no_grad():
        for first in range(vocab):
            logits = target(torch.tensor([[1, 2, 3, first]])).logits[0, 2:].double()
            kept = logits >= logits.topk(5).values[:, -1:]
            probs = logits.masked_fill(~kept, -torch.inf).softmax(-1)
            joint[first] = (probs[0, first] * probs[1]).float()
    assert not bool(counts[joint == 0].any())
    frequent = joint * rows >= 5
    observed = torch.cat([counts[frequent], counts[~frequent].sum()[None]]).double()
    expected = torch.cat([joint[frequent], joint[~frequent].sum()[None]]).double()
    expected *= observed.sum() / expected.sum()
    assert stats.chisquare(observed[expected > 0].numpy(), expected[expected > 0].numpy()).pvalue > 1e-3


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


def test_a_draft_equal_to_the_target_is_always_accepted():
    prompts = prompts_of(RAGGED)
    for sampling, rule in ((GREEDY, "greedy"), (SamplingSettings(1.0), "sample")):
        settings = DecodeSettings(sampling, 4, rule, max_tokens=20)
        responses, timing = decode(TARGET, ModelDrafter(TARGET), prompts, settings)
        assert {count for response in responses for count in response.accepted_counts} == {4}
        assert timing.target_calls == 4  # blocks of five tokens
        overlap = sum(response.overlap_sum for response in responses) / sum(response.tested for response in responses)
        assert overlap == pytest.approx(1.0, abs=1e-4)  # float32, calls of different shape


def test_counts_and_hook_describe_the_text():
    prompts = prompts_of(RAGGED)
    settings = DecodeSettings(SamplingSettings(1.0), 3, "sample", max_tokens=17, eos_ids=(5, 11), seed=1)
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


def test_bad_prompts_and_pairs_are_refused_in_one_line():
    settings = DecodeSettings(GREEDY, 2, "greedy", max_tokens=10)
    for prompts, draft, message in (
        ([("empty", [])], DRAFT, "'empty' is empty"),
        ([("strange", [1, VOCAB])], DRAFT, r"'strange' has token id 50 but the target knows ids 0\.\.49"),
        ([("long", [1] * 250)], DRAFT, r"'long' has 250 tokens; with max_tokens = 10 .* context of 256"),
        ([("long", [1] * 30)], tiny_model(max_position_embeddings=32), r"context of 32 of the draft"),
        ([("fine", [1])], tiny_model(vocab_size=40), r"draft scores 40 token ids and the target 50"),
    ):
        with pytest.raises(UserError, match=message) as refused:
            decode(TARGET, ModelDrafter(draft), prompts, settings)
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="gamma = 2 needs a draft"):
        decode(TARGET, None, [("fine", [1])], settings)
    for wrong in ({"gamma": -1}, {"max_tokens": 0}, {"rule": "greedy"}, {"rule": "best"}):
        with pytest.raises(UserError):
            DecodeSettings(**wrong)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_response_may_fill_the_context_to_its_last_position(kind):
    """Drafted tokens overshoot a context that is exactly prompt + max_tokens; GPT-2 has no row for such a position."""
    limit = {"n_positions": 32} if kind == "gpt2" else {"max_position_embeddings": 32}
    target = tiny_model(kind, **limit)
    prompts = prompts_of([12, 3, 12])
    settings = DecodeSettings(GREEDY, 6, "greedy", max_tokens=20)
    responses, _ = decode(target, ModelDrafter(perturbed(target)), prompts, settings)
    assert texts(responses) == generated(target, prompts, 20)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingSettings(1.0)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_logits_name_the_model_and_the_prompt(sampling, value):
    broken = tiny_model()
    with torch.no_grad():
        broken.lm_head.weight[7] = value
    prompts, settings = prompts_of([3, 5]), DecodeSettings(sampling, 2, max_tokens=8)
    with pytest.raises(UserError, match=r"the draft returned NaN or infinite logits for prompt 'prompt-"):
        decode(TARGET, ModelDrafter(broken), prompts, settings)
    with pytest.raises(UserError, match="the target returned NaN"):
        decode(broken, ModelDrafter(TARGET), prompts, settings)


def test_training_mode_and_gradients_are_left_as_they_were():
    draft = perturbed(TARGET).train()
    decode(TARGET, ModelDrafter(draft), prompts_of([3]), DecodeSettings(GREEDY, 2, "greedy", max_tokens=4))
    assert draft.training
    draft(torch.tensor([[1, 2, 3]])).logits.sum().backward()  # nothing of the run may poison a later backward


def test_no_prompts_give_no_responses():
    assert decode(TARGET, None, [], DecodeSettings(GREEDY))[0] == []


def test_end_token_ids_come_from_the_generation_config_first():
    model = tiny_model()
    assert end_token_ids(model) == ()
    model.config.eos_token_id = 4
    model.generation_config.eos_token_id = None
    assert end_token_ids(model) == (4,)
    model.generation_config.eos_token_id = [7, 9]
    assert end_token_ids(model) == (7, 9)
