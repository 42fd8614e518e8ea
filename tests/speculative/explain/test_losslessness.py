"""The test of losslessness is itself tested: it does not cry wolf, it sees faults of a stated size, it counts right.

Two-layer random models in float32 on one CPU thread: near-ties do not occur with these seeds.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies
from scipy import sparse, stats
from simulation import trials
from tiny_models import perturbed, prompts_of, tiny_model

from speculative.decode import decode
from speculative.decoder import decision
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.lookup import PromptLookup
from speculative.errors import UserError
from speculative.explain import losslessness as losslessness_module
from speculative.explain.losslessness import (
    BINS,
    EVERY_TOKEN,
    LEVEL,
    GreedyTexts,
    Lossless,
    greedy_equality,
    losslessness,
    permutation_test,
    sampled_texts,
    text_features,
    token_places,
    uniformity,
)
from speculative.rules import verify as verify_module
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings, logits_to_probs

TARGET = tiny_model()
DRAFTER = ModelDrafter(perturbed(TARGET, 0.2))
PROMPTS = prompts_of([5, 9, 3, 7])
SAMPLED = DecodeSettings(SamplingSettings(1.0), 3, Rule.named("sample"), max_tokens=32)
FEW = {"samples": 24, "permutations": 3999, "batch_size": 384}
# 12,288 tokens of each kind: what a reader gets from 96 prompts of 128 tokens.
MANY = {"samples": 96, "permutations": 3999, "batch_size": 384, "control": False}


@pytest.mark.parametrize("rule", ["sample", "sample-untruncated", "greedy-draft", "block"])
def test_every_rule_passes_and_the_positive_control_is_seen(rule):
    sampling = SamplingSettings(0.9, top_k=20, top_p=0.95)
    asked = {**MANY, "control": True} if rule == "sample" else {**FEW, "control": False}
    found = losslessness(TARGET, DRAFTER, PROMPTS, replace(SAMPLED, rule=Rule.named(rule), sampling=sampling), **asked)
    assert not found.failed, found.sentence
    assert found.greedy == GreedyTexts(4, 128, 4, [], [])
    count, sampled = asked["samples"], found.sampled
    assert (sampled.prompts, sampled.samples, sampled.tokens) == (4, count, 4 * count * 32)
    assert (sampled.first_token.tokens, sampled.every_token.tokens) == (4 * count, 4 * count * 32)
    assert sampled.every_token.impossible == 0
    assert found.sentence.startswith("Lossless as far as these tests detect: greedy text is the target's own on 4 of 4")
    if asked["control"]:
        assert found.control.failed
        assert "The same tests detect the target at 1.1 times its temperature" in found.sentence
    json.dumps(found.record(), allow_nan=False)


def test_at_temperature_0_only_greedy_text_is_compared():
    found = losslessness(TARGET, DRAFTER, PROMPTS, replace(SAMPLED, sampling=GREEDY, rule=Rule.named("greedy")), **FEW)
    assert found.sampled is found.control is None
    assert found.sentence == "Lossless: greedy text is the target's own on 4 of 4 prompts."


def test_any_drafter_can_be_doubted():
    found = losslessness(TARGET, PromptLookup(), PROMPTS, SAMPLED, **FEW, control=False)
    assert not found.failed, found.sentence


def too_much(extra):
    """Accepts every drafted token with a probability higher by `extra` than the rule's."""
    honest = verify_module.verify

    def verify(target_probs, ids, draft_probs, coins, uniforms, drafted, **lossy):
        return honest(target_probs, ids, draft_probs, (coins - extra).clamp_min(0.0), uniforms, drafted, **lossy)

    return verify


@pytest.mark.parametrize("seed", [0, 7])
def test_five_points_too_much_acceptance_are_seen_with_twelve_thousand_tokens(monkeypatch, blocks_in_python, seed):
    monkeypatch.setattr(decision, "verify", too_much(0.05))
    found = losslessness(TARGET, DRAFTER, PROMPTS, replace(SAMPLED, seed=seed), **MANY)
    assert found.failed
    assert found.sampled.every_token.p_value < LEVEL / 3
    # The two-sample test has twice the noise: it needs a larger fault to be sure, but leans the same way.
    assert found.sampled.permutation.p_value < 0.05
    assert "NOT lossless" in found.sentence
    assert "tokens and the target's probabilities" in found.sentence


def test_twenty_points_are_seen_by_the_two_sample_test_alone(monkeypatch, blocks_in_python):
    monkeypatch.setattr(decision, "verify", too_much(0.2))
    found = losslessness(TARGET, DRAFTER, PROMPTS, SAMPLED, **MANY)
    assert found.sampled.permutation.p_value == 1 / 4000
    assert "texts sampled with and without the draft" in found.sentence


def test_a_correction_drawn_from_the_target_itself_is_seen(monkeypatch, blocks_in_python):
    monkeypatch.setattr(verify_module, "residual_probs", lambda target, draft: target)
    found = losslessness(TARGET, DRAFTER, PROMPTS, SAMPLED, **FEW, control=False)
    assert EVERY_TOKEN in found.sampled.failed


def test_greedy_text_that_differs_fails_with_a_line_that_says_where(monkeypatch, blocks_in_python):
    verify_greedy = decision.verify_greedy

    def generous(target_ids, draft_ids, drafted):
        honest = verify_greedy(target_ids, draft_ids, drafted)
        return honest._replace(accepted_B=(honest.accepted_B + 1).clamp_max(draft_ids.shape[1]))

    monkeypatch.setattr(decision, "verify_greedy", generous)
    found = greedy_equality(TARGET, DRAFTER, PROMPTS, SAMPLED)
    assert found.equal + len(found.differences) == 4
    assert found.differences
    assert all("differs from plain greedy at token" in line and "\n" not in line for line in found.differences)
    assert Lossless("greedy", 3, "float32", found).sentence.startswith(
        "NOT lossless: greedy text is the target's own on "
    )


def test_half_precision_passes_and_is_not_judged_at_the_edge_of_top_p():
    target = tiny_model(dtype=torch.bfloat16)
    draft = perturbed(target, 0.1)
    for sampling, judged in ((SamplingSettings(1.0), True), (SamplingSettings(0.8, top_p=0.9), False)):
        own = replace(SAMPLED, sampling=sampling, max_tokens=16)
        found = losslessness(target, ModelDrafter(draft), PROMPTS, own, **FEW, control=False)
        assert not found.failed, found.sentence
        assert found.sampled.judged_every == judged


def test_what_cannot_be_doubted_is_refused():
    with pytest.raises(UserError, match="gamma = 0"):
        losslessness(TARGET, DRAFTER, PROMPTS, replace(SAMPLED, gamma=0))
    with pytest.raises(UserError, match="samples = 1"):
        losslessness(TARGET, DRAFTER, PROMPTS, SAMPLED, samples=1)


def test_each_sample_has_a_seed_of_its_own(monkeypatch):
    seeds = []

    def watched(target, drafter, prompts, own, samples, *, batch_size):
        seeds.append(own.seed)
        return sampled_texts(target, drafter, prompts, own, samples, batch_size=batch_size)

    monkeypatch.setattr(losslessness_module, "sampled_texts", watched)
    losslessness(TARGET, DRAFTER, PROMPTS[:1], replace(SAMPLED, seed=5), samples=2, permutations=3999)
    assert len({*seeds, 5}) == 4


def test_samples_with_and_without_the_draft_share_no_coins():
    speculative, plain = (
        sampled_texts(TARGET, drafter, PROMPTS[:1], replace(SAMPLED, seed=seed), 4)
        for drafter, seed in ((DRAFTER, 1), (None, 2))
    )
    ids = [tuple(text.response_ids) for text in (*speculative, *plain)]
    assert len(set(ids)) == 8


def test_token_places_equal_a_fresh_forward_per_token():
    sampling = SamplingSettings(0.8, top_p=0.9)
    texts, _ = decode(TARGET, None, PROMPTS, DecodeSettings(sampling, max_tokens=9))
    for text, (likelier, own) in zip(texts, token_places(TARGET, texts, sampling), strict=True):
        for position, token in enumerate(text.response_ids):
            ids = torch.tensor([[*text.prompt_ids, *text.response_ids[:position]]])
            with torch.no_grad():
                probs = logits_to_probs(TARGET(ids).logits[0, -1].double(), sampling)
            # float32 matrix products of another shape: 1e-5 in a probability.
            assert likelier[position] == pytest.approx(float(probs[probs > probs[token]].sum()), abs=1e-5)
            assert own[position] == pytest.approx(float(probs[token]), abs=1e-5)


def draws(generator, probs, shown, count):
    """Places of tokens drawn from `probs` in a distribution believed to be `shown`, which is sorted downwards."""
    ids = generator.choice(len(probs), count, p=probs)
    return [(np.concatenate(([0.0], shown.cumsum()[:-1]))[ids], shown[ids])]


@pytest.mark.simulation
def test_uniformity_is_level_under_a_true_sampler_and_sees_a_false_one():
    generator = np.random.default_rng(0)
    probs = np.array([0.6, 0.2, 0.1, 0.06, 0.04])
    p_values = [uniformity(draws(generator, probs, probs, 400), seed).p_value for seed in range(trials(150, 400))]
    # Uniform p-values: a Kolmogorov-Smirnov test of them at one in a thousand.
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3
    false = np.array([0.5, 0.25, 0.13, 0.07, 0.05])
    assert uniformity(draws(generator, false, probs, 2000), 0).p_value < 1e-6


def test_an_impossible_token_is_counted_and_lies_at_the_end():
    places = [(np.array([1.0] * 40), np.array([0.0] * 40))]
    found = uniformity(places, 0)
    assert found.impossible == found.tokens == 40
    assert found.p_value < 1e-6
    assert uniformity([(np.zeros(3), np.ones(3))], 0).p_value == 1.0


def texts_of(generator, rates, prompts, samples):
    """Pairs of samples of every prompt, with the draft first; `rates`: token probabilities of each side."""
    ids = [
        generator.choice(4, int(generator.integers(2, 9)), p=rates[side]).tolist()
        for _ in range(prompts)
        for side in (0, 1)
        for _ in range(samples)
    ]
    groups = [prompt for prompt in range(prompts) for _ in range(2 * samples)]
    return text_features(groups, ids, [generator.random(len(text)) for text in ids])


@pytest.mark.simulation
def test_the_permutation_test_keeps_its_level_in_small_samples():
    generator = np.random.default_rng(1)
    rates, count = [[0.7, 0.1, 0.1, 0.1]] * 2, trials(100, 300)
    p_values = np.array(
        [
            permutation_test(texts_of(generator, rates, 2, 3), 2, permutations=99, seed=seed).p_value
            for seed in range(count)
        ]
    )
    for level in (0.05, 0.1, 0.3):
        # P(p <= level) <= level exactly: three standard deviations of so many counts above it.
        assert (p_values <= level).mean() <= level + 3 * (level * (1 - level) / count) ** 0.5
    assert (p_values <= 0.3).mean() > 0.15, "nor is it never small"


def test_the_permutation_test_sees_other_words():
    generator = np.random.default_rng(2)
    features = texts_of(generator, [[0.7, 0.1, 0.1, 0.1], [0.4, 0.2, 0.2, 0.2]], 4, 10)
    found = permutation_test(features, 4, permutations=999)
    assert found.p_value <= 0.005
    assert found.parts["words"] <= 0.005
    assert found.parts["length"] > 0.005
    assert found.statistic > 2


@settings(max_examples=20, deadline=None)
@given(strategies.integers(0, 2**20), strategies.integers(1, 3), strategies.integers(1, 3))
def test_the_statistics_equal_their_loops(seed, prompts, samples):
    """One relabelling count by hand: squared length of the difference of sums, for each statistic's slow twin."""
    generator = np.random.default_rng(seed)
    ids = [generator.choice(3, int(generator.integers(1, 5))).tolist() for _ in range(2 * prompts * samples)]
    places = [generator.random(len(text)) for text in ids]
    groups = [row // (2 * samples) for row in range(len(ids))]
    features = text_features(groups, ids, places)
    signs = [1 if row % (2 * samples) < samples else -1 for row in range(len(ids))]

    def chi_square(things):
        total = 0.0
        for thing in {one for own in things for one in own}:
            counts = [list(own).count(thing) for own in things]
            total += sum(sign * count for sign, count in zip(signs, counts, strict=True)) ** 2 / sum(counts)
        return total

    beginnings = {(group, *text[:k]) for group, text in zip(groups, ids, strict=True) for k in range(1, len(text) + 1)}
    agree = sum(
        sum(
            sign
            for sign, group, text in zip(signs, groups, ids, strict=True)
            if (group, *text[: len(beginning) - 1]) == beginning
        )
        ** 2
        for beginning in beginnings
    )
    slow = {
        "first tokens": agree,
        "words": chi_square(ids),
        "likelihood": chi_square([(own * BINS).astype(int).tolist() for own in places]),
        "length": sum(sign * len(text) for sign, text in zip(signs, ids, strict=True)) ** 2,
    }
    for name, features_ND in features.items():
        assert float(((features_ND.T @ np.array(signs)) ** 2).sum()) == pytest.approx(slow[name], abs=1e-9), name


def test_equal_texts_are_no_evidence():
    same = {"length": sparse.csr_matrix(np.zeros((8, 1)))}
    found = permutation_test(same, 2, permutations=99)
    assert (found.p_value, found.parts) == (1.0, {"length": 1.0})
