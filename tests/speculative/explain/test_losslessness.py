"""The test of losslessness is itself tested: it does not cry wolf, it sees faults of a stated size, it counts right.

Two-layer random models in float32 on one CPU thread: near-ties do not occur with these seeds.
"""

import json
from dataclasses import replace

import pytest
import torch
from tiny_models import perturbed, prompts_of, tiny_model

from speculative.decoder import decision
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.errors import UserError
from speculative.explain.losslessness import (
    GreedyTexts,
    Lossless,
    greedy_equality,
    losslessness,
    sampled_texts,
)
from speculative.rules import verify as verify_module
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings

TARGET = tiny_model()
DRAFTER = ModelDrafter(perturbed(TARGET, 0.2))
PROMPTS = prompts_of([5, 9, 3, 7])
SAMPLED = DecodeSettings(SamplingSettings(1.0), 3, Rule.named("sample"), max_tokens=32)
FEW = {"samples": 24, "batch_size": 384}
# 12,288 tokens of each kind: what a reader gets from 96 prompts of 128 tokens.
MANY = {"samples": 96, "batch_size": 384, "control": False}


@pytest.mark.parametrize("rule", ["sample", "sample-untruncated", "greedy-draft", "block"])
def test_every_rule_passes_and_the_positive_control_is_seen(rule):
    sampling = SamplingSettings(0.9, top_k=20, top_p=0.95)
    asked = {**MANY, "control": True} if rule == "sample" else {**FEW, "control": False}
    found = losslessness(TARGET, DRAFTER, PROMPTS, replace(SAMPLED, rule=Rule.named(rule), sampling=sampling), **asked)
    assert not found.failed, found.sentence
    assert found.greedy == GreedyTexts(4, 128, 4, [], [])
    count, sampled = asked["samples"], found.sampled
    assert (sampled.prompts, sampled.samples, sampled.tokens) == (4, count, 4 * count * 32)
    assert found.sentence.startswith("Lossless as far as this test detects: greedy text is the target's own on 4 of 4")
    if asked["control"]:
        assert found.control.failed
        assert "The same test detects the target at 1.1 times its temperature" in found.sentence
    json.dumps(found.record(), allow_nan=False)


def test_at_temperature_0_only_greedy_text_is_compared():
    found = losslessness(TARGET, DRAFTER, PROMPTS, replace(SAMPLED, sampling=GREEDY, rule=Rule.named("greedy")), **FEW)
    assert found.sampled is found.control is None
    assert found.sentence == "Lossless: greedy text is the target's own on 4 of 4 prompts."


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
    assert found.failed == ["sampled texts and the target's probabilities"]
    assert "NOT lossless: sampled texts and the target's probabilities differ" in found.sentence


def test_a_correction_drawn_from_the_target_itself_is_seen(monkeypatch, blocks_in_python):
    monkeypatch.setattr(verify_module, "residual_probs", lambda target, draft: target)
    assert losslessness(TARGET, DRAFTER, PROMPTS, SAMPLED, **FEW, control=False).failed


def test_half_precision_is_tested_without_the_edge_of_top_p():
    target = tiny_model(dtype=torch.bfloat16)
    settings = replace(SAMPLED, sampling=SamplingSettings(0.8, top_p=0.9), max_tokens=16)
    found = losslessness(target, ModelDrafter(perturbed(target, 0.1)), PROMPTS, settings, **FEW, control=False)
    assert not found.failed, found.sentence
    assert found.sampled.tested_at == SamplingSettings(0.8).as_dict()


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


def test_what_cannot_be_doubted_is_refused():
    with pytest.raises(UserError, match="gamma = 0"):
        losslessness(TARGET, DRAFTER, PROMPTS, replace(SAMPLED, gamma=0))


def test_samples_with_and_without_the_draft_share_no_coins():
    speculative, plain = (
        sampled_texts(TARGET, drafter, PROMPTS[:1], replace(SAMPLED, seed=seed), 4)
        for drafter, seed in ((DRAFTER, 1), (None, 2))
    )
    ids = [tuple(text.response_ids) for text in (*speculative, *plain)]
    assert len(set(ids)) == 8
