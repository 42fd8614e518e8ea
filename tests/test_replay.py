"""Replay against brute force, against live decoding, and as the oracle that sees faults losslessness cannot."""

import itertools
import math

import numpy as np
import pytest
import torch
from tiny_models import perturbed, prompts_of, tiny_model

from speculative import token_scores as scores_module
from speculative.decode import DecodeSettings, decode
from speculative.drafters import ModelDrafter
from speculative.errors import UserError
from speculative.replay import (
    agreement_warning,
    agreement_words,
    block_variance,
    expected_blocks,
    replay,
    replay_agreement,
)
from speculative.sampling import GREEDY, SamplingSettings, logits_to_probs
from speculative.token_scores import score_responses

TARGET = tiny_model()
DRAFT = perturbed(TARGET, 0.03)


def counted_blocks(flags, gamma):
    """Blocks of a response whose token t would pass as a drafted token iff flags[t]: the process, token by token."""
    blocks, accepted = 0, 0
    for flag in flags:
        blocks += accepted == 0
        if accepted < gamma and flag:
            accepted += 1
        else:  # correction, or the bonus token whatever its flag
            accepted = 0
    return blocks


@pytest.mark.parametrize("gamma", [1, 2, 3, 8])
def test_expected_blocks_and_variance_equal_brute_force(gamma):
    rng = np.random.default_rng(gamma)
    responses = [rng.random(length) for length in (1, 2, 5, 9)]
    mean, square = np.zeros(4), np.zeros(4)
    for index, probs in enumerate(responses):
        for flags in itertools.product((0, 1), repeat=len(probs)):
            weight = np.where(flags, probs, 1 - probs).prod()
            blocks = counted_blocks(flags, gamma)
            mean[index] += weight * blocks
            square[index] += weight * blocks**2
    np.testing.assert_allclose(expected_blocks(responses, (gamma,))[:, 0], mean, rtol=1e-12)
    np.testing.assert_allclose(block_variance(responses, gamma), square - mean**2, rtol=1e-9, atol=1e-12)


def test_all_gammas_at_once_equal_one_at_a_time():
    responses = [np.random.default_rng(0).random(length) for length in (30, 7, 1)]
    together = expected_blocks(responses, range(1, 17))
    for column, gamma in enumerate(range(1, 17)):
        np.testing.assert_allclose(together[:, column], expected_blocks(responses, (gamma,))[:, 0], rtol=1e-13)


def test_the_ends_of_the_scale():
    assert replay([np.ones(60)], (1, 3, 5)) == {1: 2.0, 3: 4.0, 5: 6.0}
    assert replay([np.zeros(60), np.zeros(3)], (1, 16)) == {1: 1.0, 16: 1.0}
    assert replay([np.ones(7)], (5,)) == {5: 3.5}  # the last block counts as one call although the text ends in it


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_greedy_replay_equals_live_block_counts_exactly(gamma):
    settings = DecodeSettings(GREEDY, gamma, "greedy", max_tokens=40, eos_ids=(3, 8))
    responses, _ = decode(TARGET, ModelDrafter(DRAFT), prompts_of([9, 1, 23, 4, 15]), settings)
    accept_probs = score_responses(DRAFT, responses, GREEDY, "greedy")
    assert expected_blocks(accept_probs, (gamma,))[:, 0].tolist() == [response.blocks for response in responses]
    assert replay_agreement(accept_probs, [response.blocks for response in responses], gamma)["z"] == 0.0
    # From plain text as well: speculation did not change it.
    plain, _ = decode(
        TARGET, None, prompts_of([9, 1, 23, 4, 15]), DecodeSettings(GREEDY, max_tokens=40, eos_ids=(3, 8))
    )
    assert expected_blocks(score_responses(DRAFT, plain, GREEDY, "greedy"), (gamma,)).sum() == sum(
        response.blocks for response in responses
    )


@pytest.mark.parametrize("rule", ["sample", "greedy-draft"])
@pytest.mark.parametrize("gamma", [1, 3, 5, 8])
def test_replay_agrees_with_live_decoding(rule, gamma):
    sampling = SamplingSettings(0.8, top_p=0.95)
    prompts = prompts_of([5] * 60)
    live, _ = decode(
        TARGET, ModelDrafter(DRAFT), prompts, DecodeSettings(sampling, gamma, rule, 40, (3,)), batch_size=60
    )
    own = replay_agreement(score_responses(DRAFT, live, sampling, rule), [response.blocks for response in live], gamma)
    assert abs(own["z"]) < 3.5
    # On other text of the same target, with another seed, the two taus agree within both standard errors.
    frozen, _ = decode(TARGET, None, prompts, DecodeSettings(sampling, 0, rule, 40, (3,), seed=9), batch_size=60)
    blocks = expected_blocks(score_responses(DRAFT, frozen, sampling, rule), (gamma,))[:, 0]
    taus, errors = [], []
    for counts, texts in ((blocks, frozen), (np.array([response.blocks for response in live]), live)):
        tokens = np.array([len(response.response_ids) for response in texts])
        taus.append(tokens.sum() / counts.sum())
        errors.append(np.std(tokens - taus[-1] * counts) * math.sqrt(len(tokens)) / counts.sum())
    assert abs(taus[0] - taus[1]) < 3.5 * math.hypot(*errors)


def test_positions_that_drift_are_seen_by_replay_and_by_nothing_else():
    """A draft step at a wrong position leaves the text the target's; only fewer tokens are accepted."""
    target = tiny_model("gpt2")
    draft = perturbed(target, 0.01)
    settings = DecodeSettings(SamplingSettings(1.0), 4, "sample", max_tokens=40)
    prompts = prompts_of([5] * 40)

    def shift(module, args, kwargs):
        if kwargs["input_ids"].shape[1] == 1:
            kwargs["position_ids"] = kwargs["position_ids"] + 1
        return args, kwargs

    z_scores = {}
    for name in ("right", "shifted"):
        hook = draft.register_forward_pre_hook(shift, with_kwargs=True) if name == "shifted" else None
        responses, _ = decode(target, ModelDrafter(draft), prompts, settings, batch_size=40)
        if hook is not None:
            hook.remove()
        accept_probs = score_responses(draft, responses, settings.sampling, "sample")
        z_scores[name] = replay_agreement(accept_probs, [response.blocks for response in responses], 4)["z"]
    assert abs(z_scores["right"]) < 3.5
    assert z_scores["shifted"] > 6


@pytest.mark.parametrize("rule", ["sample", "greedy-draft"])
def test_scores_equal_one_text_at_a_time_and_do_not_depend_on_the_chunks(rule, monkeypatch):
    sampling = SamplingSettings(0.9, top_k=30, min_p=0.01)
    texts, _ = decode(
        TARGET, None, prompts_of([9, 1, 23, 4, 15]), DecodeSettings(sampling, max_tokens=20, eos_ids=(3,))
    )
    whole = score_responses(DRAFT, texts, sampling, rule)
    for text, scores in zip(texts, whole, strict=True):
        with torch.no_grad():
            logits = DRAFT(torch.tensor([text.prompt_ids + text.response_ids])).logits
        logits = logits[0, len(text.prompt_ids) - 1 : -1]
        tokens = torch.tensor(text.response_ids)
        if rule == "sample":
            draft_probs = logits_to_probs(logits, sampling).gather(1, tokens[:, None])[:, 0].double()
            expected = (draft_probs / torch.tensor(text.log_target_probs, dtype=torch.float64).exp()).clamp_max(1.0)
        else:
            expected = (logits.argmax(-1) == tokens).double()
        # Float32 sums in another order.
        torch.testing.assert_close(torch.from_numpy(scores), expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(scores_module, "LOGITS_PER_FORWARD", 1)
    monkeypatch.setattr(scores_module, "PROBS_PER_CHUNK", 150)
    for chunked, scores in zip(score_responses(DRAFT, texts, sampling, rule), whole, strict=True):
        np.testing.assert_allclose(chunked, scores, rtol=1e-4, atol=1e-5)  # float32, other shapes


def test_the_target_as_its_own_draft_scores_one():
    for sampling, rule in ((SamplingSettings(1.0), "sample"), (GREEDY, "greedy")):
        texts, _ = decode(TARGET, None, prompts_of([9, 1, 23]), DecodeSettings(sampling, max_tokens=30))
        scores = np.concatenate(score_responses(TARGET, texts, sampling, rule))
        assert abs(scores.mean() - 1) < 1e-5  # float32, calls of different shape


def test_an_empty_response_scores_nothing_and_a_broken_draft_is_named():
    texts, _ = decode(TARGET, None, prompts_of([4]), DecodeSettings(GREEDY, max_tokens=4))
    empty = type(texts[0])(key="empty", prompt_ids=[1, 2])
    assert [len(scores) for scores in score_responses(DRAFT, [empty, *texts], GREEDY, "greedy")] == [0, 4]
    broken = tiny_model()
    with torch.no_grad():
        broken.lm_head.weight[7] = float("nan")
    with pytest.raises(UserError, match="draft returned NaN"):
        score_responses(broken, texts, GREEDY, "greedy")


def test_a_draft_that_saw_something_else_is_warned_about_and_an_honest_one_is_not():
    sure, coins = [np.ones(40)] * 5, [np.full(40, 0.5)] * 50
    exact = int(expected_blocks(sure, (3,)).sum())
    honest = replay_agreement(sure, [exact // 5] * 5, 3)
    assert agreement_warning(honest) is None
    assert agreement_words(honest, 200) == "replay 4.00, exact"
    worse = replay_agreement(sure, [exact // 5 + 1] * 5, 3)
    assert "nothing is random here" in str(agreement_warning(worse))
    assert agreement_words(worse, 200) == "replay 4.00, not exact"
    predicted = expected_blocks(coins, (3,)).sum()
    spread = np.sqrt(block_variance(coins, 3).sum())
    for deviations, warns in ((3.5, False), (-3.5, False), (4.5, True), (-4.5, True)):
        check = replay_agreement(coins, [predicted + deviations * spread], 3)
        text = agreement_warning(check)
        assert (text is not None) == warns
        assert not warns or (f"z = {check['z']:+.1f}" in str(text) and "draft positions, masks" in str(text))
    assert agreement_words(None, 1) == "no replay for this rule"
    assert agreement_warning(None) is None
