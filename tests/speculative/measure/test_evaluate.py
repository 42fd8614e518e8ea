"""The judge end to end on tiny pairs, and its self-checks."""

import json

import numpy as np
import pytest
import torch
from tiny_models import perturbed, prompts_of, tiny_model

from speculative.decode import decode
from speculative.decoder import decision as loop_module
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft, drafts_of
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse, judge, judge_by_replay
from speculative.measure.effects import paired_effects
from speculative.measure.replay import survival_of
from speculative.measure.self_checks import SelfCheckError, self_checks
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings

TARGET = tiny_model()
DRAFT = perturbed(TARGET, 0.03)
SETTINGS = DecodeSettings(SamplingSettings(1.0), 3, Rule.named("sample"), max_tokens=20)


def heldout_of(settings, count=12):
    prompts = prompts_of([5, 9, 3] * (count // 3))
    rows = [(f"{key}/{sample}", ids) for key, ids in prompts for sample in range(2)]
    responses, _ = decode(TARGET, None, rows, DecodeSettings(settings.sampling, max_tokens=20, seed=3))
    return [
        HeldoutResponse(text.key, f"domain-{index % 4 // 2}", text.prompt_ids, text.response_ids, text.log_target_probs)
        for index, text in enumerate(responses)
    ]


HELDOUT = heldout_of(SETTINGS)


def test_judge_reports_every_number_overall_and_by_domain():
    result, _ = judge(TARGET, Draft(DRAFT), HELDOUT, SETTINGS)
    assert (result.rule, result.gamma, result.prompts, result.tokens) == ("sample", 3, 12, 480)
    assert result.alpha_ci[0] < result.alpha < result.alpha_ci[1]
    assert result.tau_ci[0] < result.tau < result.tau_ci[1]
    assert 1 < result.tau < 4
    assert len(result.survival) == 3
    assert result.survival[0] > result.accepted_per_drafted > result.survival[2]
    assert list(result.replay) == list(range(33))
    assert abs(result.replay_check.z) < 3.5
    assert set(result.domains) == {"domain-0", "domain-1"}
    for name in ("prompts", "tokens", "live_tokens", "blocks"):
        assert sum(getattr(numbers, name) for numbers in result.domains.values()) == getattr(result, name)
    for numbers in result.domains.values():
        assert {"alpha", "alpha_ci", "tau", "tau_ci", "accepted_per_drafted", "survival"} <= set(numbers.record())
    assert result.live_tokens == 12 * 20, "each prompt is decoded once, however many frozen samples it has"
    json.dumps(result.record())


def test_a_draft_is_judged_either_way_it_drafts():
    draft = perturbed(TARGET, 0.03)
    draft.config.pard_token = 49
    token_wise, blocks = (judge(TARGET, one, HELDOUT, SETTINGS)[0] for one in drafts_of(draft))
    assert (token_wise.alpha, token_wise.replay[1]) == (blocks.alpha, pytest.approx(blocks.replay[1]))
    assert list(blocks.replay) == list(range(9))
    assert blocks.tau < token_wise.tau, "nobody taught it the mask"
    assert abs(blocks.replay_check.z) < 3.5


def test_a_better_draft_has_a_positive_paired_gain():
    drafts = [perturbed(TARGET, scale) for scale in (0.01, 0.1)]
    scores = [score_tokens(draft, HELDOUT, SETTINGS.sampling) for draft in drafts]
    better, worse = (judge_by_replay(Draft(draft), HELDOUT, SETTINGS) for draft in drafts)
    gain = paired_effects(*scores, [response.prompt for response in HELDOUT], rule=Rule.named("sample"), gamma=3)
    assert gain.alpha.gain == pytest.approx(better.alpha - worse.alpha)
    assert gain.alpha.ci[0] > 0


def test_replay_gives_survival_of_the_whole_text_and_of_every_domain():
    result = judge_by_replay(Draft(DRAFT), HELDOUT, SETTINGS)
    parts = {name: [one for one in HELDOUT if one.domain == name] for name in result.domains}
    for judged, text in [(result, HELDOUT), *((result.domains[name], part) for name, part in parts.items())]:
        expected = survival_of(score_tokens(DRAFT, text, SETTINGS.sampling), Rule.named("sample"), SETTINGS.gamma)
        np.testing.assert_allclose(judged.survival, expected, rtol=1e-5)  # float32, batches of other shapes
        assert 1 > expected[0] > expected[1] > expected[2] > 0


@pytest.mark.parametrize("rule", ["sample", "greedy"])
def test_the_target_as_its_own_draft_scores_one(rule):
    sampling = GREEDY if rule == "greedy" else SETTINGS.sampling
    settings = DecodeSettings(sampling, 3, Rule.named(rule), max_tokens=20)
    result, _ = judge(TARGET, Draft(TARGET), heldout_of(settings), settings)
    assert result.alpha == pytest.approx(1.0, abs=1e-5)  # float32, calls of different shape
    assert result.tau == 4.0
    assert result.accepted_per_drafted == 1.0


def test_judge_refuses_nothing_to_judge():
    with pytest.raises(UserError, match="gamma = 0"):
        judge(TARGET, Draft(DRAFT), HELDOUT, DecodeSettings())
    with pytest.raises(UserError, match="no held-out response"):
        judge(TARGET, Draft(DRAFT), [], SETTINGS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingSettings(0.8, top_p=0.95)])
def test_self_checks_pass_on_a_sound_judge(dtype, sampling):
    target = tiny_model(dtype=dtype)
    rule = "greedy" if sampling.greedy else "greedy-draft"
    found = self_checks(target, prompts_of([5, 9, 1, 30]), DecodeSettings(sampling, 4, Rule.named(rule), max_tokens=32))
    assert found["greedy_equal"] + len(found["near_ties"]) == found["prompts"] == 4
    if dtype == torch.float32:
        assert found["near_ties"] == []
        assert found["alpha_live"] == 1.0


def test_self_checks_catch_a_rule_that_accepts_too_much(monkeypatch, blocks_in_python):
    verify_greedy = loop_module.verify_greedy

    def generous(target_ids, draft_ids, drafted):
        honest = verify_greedy(target_ids, draft_ids, drafted)
        return honest._replace(accepted_B=(honest.accepted_B + 1).clamp_max(draft_ids.shape[1]))

    monkeypatch.setattr(loop_module, "verify_greedy", generous)
    with pytest.raises(SelfCheckError, match="speculative greedy differs") as failed:
        self_checks(TARGET, prompts_of([5, 9]), SETTINGS)
    assert "\n" not in str(failed.value)
