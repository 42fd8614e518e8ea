"""Which ways are timed, at which gamma, with how many blocks, and for how long."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_models import perturbed, prompts_of, tiny_model

from distill.config.sections import JudgeConfig
from distill.verdict import judging_setup
from distill.verdict.decoding import NamedDraft
from distill.verdict.judging_setup import JudgingSetup
from distill.verdict.scored_drafts import ScoredDrafts, ways_of
from distill.verdict.timing import time_ways, worth_timing
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft
from speculative.evaluate import decode_heldout
from speculative.measure.baseline_replay import cross_fitted
from speculative.measure.cost import StepCosts
from speculative.measure.measured import DRAFT as BEST
from speculative.measure.measured import LOOKUP, LOOKUP_DRAFT, PAST
from speculative.measure.measured import TARGET as ALONE
from speculative.measure.replay import expected_blocks_of
from speculative.measure.timing import Sample, SpeedEstimates
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY

TARGET = tiny_model()
DRAFT = perturbed(TARGET, 0.05)
SETTINGS = DecodeSettings(GREEDY, 2, Rule.named("greedy"), max_tokens=40)
COSTS = StepCosts(0.010, {1: 0.002, 4: 0.008, 6: 0.012}, {1: 0.011, 4: 0.012, 6: 0.013}, 1, 32)


@pytest.fixture(scope="module")
def pair():
    """(held-out responses, scores of the draft, history)."""
    heldout = decode_heldout(TARGET, prompts_of([6, 9, 5, 7, 8, 6, 4, 5]), SETTINGS, "made up")
    history = decode_heldout(TARGET, prompts_of([5, 8, 7]), SETTINGS, "made up")
    return heldout, score_tokens(DRAFT, heldout, SETTINGS.sampling), history


def asked(pair, history=True):
    """(setup, scored of one draft)."""
    heldout, scores, past = pair
    setup = JudgingSetup(
        JudgeConfig(speed_seconds=1e-6, speed_prompts=8),
        SETTINGS,
        {Rule.named("greedy"): heldout},
        history=past if history else [],
    )
    best = NamedDraft(BEST, "", 0, Draft(DRAFT))
    return setup, ScoredDrafts(drafts=(best,), scores={Rule.named("greedy"): {BEST: scores}}, costs={BEST: COSTS})


def ways(pair, history=True):
    setup, scored = asked(pair, history)
    return ways_of(setup, TARGET, scored)


def test_every_way_has_its_best_gamma_and_the_blocks_that_decoding_counts(pair):
    heldout, scores, _ = pair
    found = {one.name: one for one in ways(pair)}
    assert list(found) == [BEST, LOOKUP, PAST, LOOKUP_DRAFT]
    gammas = range(1, 7)
    seconds = {
        gamma: expected_blocks_of(scores, Rule.named("greedy"), (gamma,)).sum()
        * (COSTS.draft_seconds[1] * gamma + 0.01 * COSTS.verify_ratio(gamma))
        for gamma in gammas
    }
    assert found[BEST].gamma == min(gamma for gamma in gammas if seconds[gamma] <= 1.03 * min(seconds.values()))
    for one in found.values():
        settings = DecodeSettings(GREEDY, one.gamma, Rule.named("greedy"), max_tokens=40)
        for text, blocks in zip(heldout, one.predicted.blocks_N, strict=True):
            (response,), _ = decode(TARGET, one.drafter(), [(text.key, text.prompt_ids)], settings)
            assert response.response_ids == text.response_ids
            assert response.blocks == blocks, one.name
    assert found[LOOKUP].tuned_on == "training prompts"
    without = {one.name: one for one in ways(pair, history=False)}
    assert PAST not in without
    assert "judged prompts" in without[LOOKUP].tuned_on


def test_every_way_is_timed_and_the_faster_is_reported(pair):
    setup, _ = asked(pair)
    timing = time_ways(setup, TARGET, ways(pair), BEST)
    assert {name: len(of) for name, of in timing.samples.items()} == dict.fromkeys(
        (ALONE, BEST, LOOKUP, PAST, LOOKUP_DRAFT), 8
    )
    assert BEST in timing
    assert "served" not in timing
    assert timing.against(BEST, BEST) == (1.0, (1.0, 1.0))
    there, back = timing.against(BEST, LOOKUP)[0], timing.against(LOOKUP, BEST)[0]
    assert there * back == pytest.approx(1.0)
    assert not (timing.beats(BEST, LOOKUP) and timing.beats(LOOKUP, BEST))


def estimates_of(speed_ups, prompts, noise):
    """Made-up samples of so many prompts."""
    rng, samples = np.random.default_rng(0), {ALONE: {}}
    for number in range(prompts):
        samples[ALONE][str(number)] = Sample(0.0, 1.0, 10, 10)
        for name, speed_up in speed_ups.items():
            seconds = np.exp(rng.normal(0, noise)) / speed_up
            samples.setdefault(name, {})[str(number)] = Sample(0.0, seconds, 10, 5)
    return SpeedEstimates(samples, range(50), np.full(50, 10), {name: np.full(50, 5.0) for name in speed_ups}, 6)


def test_a_way_that_is_certainly_slower_is_not_timed_any_more_but_close_ways_are():
    rough = estimates_of({BEST: 1.5, LOOKUP: 0.8, LOOKUP_DRAFT: 1.6}, 8, 0.2)
    names = [BEST, LOOKUP, LOOKUP_DRAFT]
    assert worth_timing(rough, names, BEST) == [BEST, LOOKUP_DRAFT]
    assert worth_timing(rough, names, LOOKUP) == names
    assert worth_timing(estimates_of({BEST: 1.5, LOOKUP: 1.0, LOOKUP_DRAFT: 1.6}, 60, 0.02), names, BEST) == []
    assert worth_timing(estimates_of({BEST: 1.5, LOOKUP: 1.0, LOOKUP_DRAFT: 1.6}, 4, 0.02), names, BEST) == names


def test_the_lookup_is_followed_by_the_draft_that_needs_the_fewest_steps(pair):
    setup, scored = asked(pair, history=False)
    (best,), scores = scored.drafts, scored.scores[Rule.named("greedy")][BEST]
    dear = replace(COSTS, draft_seconds={gamma: 3 * seconds for gamma, seconds in COSTS.draft_seconds.items()})
    both = {setup.rule: {BEST: scores, "lighter": scores}}
    for costs, then_way in (({"lighter": COSTS, BEST: dear}, "lighter"), ({"lighter": dear, BEST: COSTS}, BEST)):
        lined = ScoredDrafts(drafts=(best,), others=(replace(best, name="lighter"),), scores=both, costs=costs)
        assert {one.name: one.then_way for one in ways_of(setup, TARGET, lined) if one.then_way} == {
            LOOKUP_DRAFT: then_way
        }


def test_enough_prompts_are_not_cross_fitted(pair, monkeypatch):
    # Lookup was tuned on other prompts' responses.
    assert {one.name: one.predicted.fitted_N is not None for one in ways(pair)} == {
        BEST: True,
        LOOKUP: False,
        PAST: True,
        LOOKUP_DRAFT: True,
    }
    assert all(one.predicted.fitted_N is not None for one in ways(pair, history=False))
    monkeypatch.setattr(judging_setup, "CROSS_FIT_BELOW", 8)
    assert all(one.predicted.fitted_N is None for one in ways(pair, history=False))


def test_cross_fitting_takes_the_optimism_away():
    """Eight prompts and sixteen equally good settings: the best on them looks better than it is, judged on the other half it does not."""
    rng, plain, fitted = np.random.default_rng(0), [], []
    for _ in range(400):
        steps_NC = rng.gamma(20.0, 1.0 / 20.0, (8, 16))
        plain.append(steps_NC.sum(0).min() / 8)
        fitted.append(cross_fitted(steps_NC, range(8)).mean())
    error = np.std(fitted) / 20
    assert np.mean(plain) < 1.0 - 0.05
    assert abs(np.mean(fitted) - 1.0) < 3 * error
    # A setting that is better for every prompt is chosen by both halves.
    clear_NC = np.stack([np.full(8, 2.0), np.arange(1.0, 9.0) / 8.0], 1)
    np.testing.assert_array_equal(cross_fitted(clear_NC, range(8)), clear_NC[:, 1])
