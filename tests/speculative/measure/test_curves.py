"""Curves against their parts, intervals against scipy's own bootstrap."""

import json

import numpy as np
import pytest
from scipy import stats
from tiny_models import perturbed, prompts_of, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.measure import intervals
from speculative.measure.curves import rule_curve
from speculative.measure.intervals import BEYOND_EACH_END, bca_levels, expanded_tail, intervals_of_sums, ratio_interval
from speculative.measure.replay import expected_blocks_of, law_of
from speculative.measure.token_scores import TokenScores, score_tokens
from speculative.rules.sampling import SamplingSettings

TARGET = tiny_model()
DRAFT = perturbed(TARGET, 0.05)
STORED = DecodeSettings(SamplingSettings(1.0), 0, "sample", max_tokens=24, seed=4)
TEXTS, _ = decode(TARGET, None, prompts_of([5, 9, 3] * 10), STORED)
SCORES = score_tokens(DRAFT, TEXTS, STORED.sampling)
KEYS = [index // 2 for index in range(30)]  # two responses a prompt


def ratios(sums_C):
    """(second / first, first / third) of sums over prompts."""
    return np.stack((sums_C[..., 1] / sums_C[..., 0], sums_C[..., 0] / sums_C[..., 2]), -1)


def some_sums(prompts, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(20, 100, prompts).astype(float)
    return np.stack((tokens, tokens * rng.beta(6, 3, prompts), tokens / rng.uniform(1.5, 4, prompts)), 1)


@pytest.mark.parametrize("prompts", [12, 40])
def test_intervals_equal_scipys_bootstrap_at_the_expanded_level(prompts, monkeypatch):
    """Same seed, same draws: scipy picks prompts one by one, here they are counted."""
    sums_PC = some_sums(prompts)
    tail = expanded_tail(0.95, prompts)
    resamples = int(max(2000, BEYOND_EACH_END / tail))
    found = intervals_of_sums(sums_PC, ratios, seed=3)
    for number in range(2):
        expected = stats.bootstrap(
            tuple(sums_PC.T),
            lambda *columns, axis: ratios(np.stack([own.sum(axis) for own in columns], -1))[..., number],  # noqa: B023
            paired=True,
            vectorized=True,
            n_resamples=resamples,
            confidence_level=1 - 2 * tail,
            rng=np.random.default_rng(3),
        ).confidence_interval
        np.testing.assert_allclose(found[number], (expected.low, expected.high), rtol=1e-9)
    if resamples == intervals.RESAMPLES:
        tokens_P, accepted_P, _ = sums_PC.T
        np.testing.assert_allclose(ratio_interval(accepted_P, tokens_P, seed=3), found[0], rtol=1e-12)
    monkeypatch.setattr(intervals, "DRAWN_AT_ONCE", 50 * prompts)
    np.testing.assert_allclose(intervals_of_sums(sums_PC, ratios, seed=3), found, rtol=1e-12)


def test_few_prompts_widen_the_ends_and_many_do_not():
    tails = [expanded_tail(0.95, prompts) for prompts in (2, 5, 30, 1000)]
    assert tails == sorted(tails)
    assert tails[0] < 1e-9
    assert tails[-1] == pytest.approx(0.025, abs=2e-4)
    narrow, wide = (intervals_of_sums(some_sums(40), ratios, confidence)[0] for confidence in (0.95, 0.999))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_intervals_without_a_spread_are_the_number_itself():
    same = np.tile([[10.0, 7.0, 4.0]], (5, 1))
    assert np.ptp(intervals_of_sums(same, ratios), axis=1).tolist() == [0.0, 0.0]
    assert intervals_of_sums(same[:1], ratios) == [[0.7, 0.7], [2.5, 2.5]]
    # One prompt that differs: BCa has no bias to correct at the rim, the interval stays finite and holds the number.
    lone = np.concatenate((np.tile([[10.0, 10.0, 4.0]], (4, 1)), [[10.0, 3.0, 4.0]]))
    (low, high), _ = intervals_of_sums(lone, ratios)
    assert low < lone[:, 1].sum() / lone[:, 0].sum() < high


@pytest.mark.parametrize("prompts", range(2, 9))
def test_few_prompts_have_an_interval_at_every_level(prompts):
    """The tail of few prompts is so small that 1 - tail is 1 in floating point, or is 0 itself."""
    for looks in (1, 10, 50):
        for seed in range(12):
            for low, high in intervals_of_sums(some_sums(prompts, seed), ratios, 1 - 0.05 / looks, seed):
                assert np.isfinite((low, high)).all()
                assert low < high


def test_two_prompts_that_mirror_each_other_have_an_interval_too():
    """No skew and a tail of 0: the levels are 0 times infinity, which is no number."""
    assert expanded_tail(0.999, 2) == 0.0
    mirrored = np.array([[10.0, 7.0, 4.0], [10.0, 5.0, 4.0]])
    assert intervals_of_sums(mirrored, lambda sums_C: sums_C[..., 1:2] / sums_C[..., :1], 0.999) == [[0.5, 0.7]]


def test_both_ends_are_corrected_alike_however_small_the_tail():
    """Of mirrored data the ends are mirrored; 1 - 1e-18 is 1, and its normal quantile would be infinite."""
    drawn_R = np.random.default_rng(0).normal(0.3, 1.0, 2000)
    left_out_P = np.array([0.1, -0.2, 0.05, 0.05])
    low, high = bca_levels(0.0, left_out_P, drawn_R, 1e-18)
    mirrored_low, mirrored_high = bca_levels(0.0, -left_out_P, -drawn_R, 1e-18)
    assert (low, high) == pytest.approx((1.0 - mirrored_high, 1.0 - mirrored_low), abs=1e-15)
    assert max(low, mirrored_low) > 1e-14, "a correction that can be seen in 1 - level"


@pytest.mark.parametrize("number", [0, 1])
def test_intervals_cover_the_truth_as_often_as_they_say(number):
    """A pool whose own value is the truth; 25 prompts a draw. 200 draws at 95 % have a standard error of 1.5 points."""
    pool = some_sums(4000, seed=1)
    truth = ratios(pool.sum(0))[number]
    rng = np.random.default_rng(0)
    drawn = [pool[rng.integers(0, len(pool), 25)] for _ in range(200)]
    intervals = np.array([intervals_of_sums(sums_PC, ratios)[number] for sums_PC in drawn])
    covered = np.mean((intervals[:, 0] <= truth) & (truth <= intervals[:, 1]))
    assert 0.90 <= covered <= 0.99


@pytest.mark.parametrize("rule", ["sample", "block", "greedy-draft"])
def test_a_curve_is_its_parts(rule):
    curve = rule_curve(SCORES, KEYS, rule, survival_gamma=4)
    assert (curve.rule, curve.tokens, curve.prompts) == (rule, 30 * 24, 15)
    assert curve.gammas == list(range(33))
    np.testing.assert_allclose(curve.tau, 720 / expected_blocks_of(SCORES, rule, range(33)).sum(0), rtol=1e-12)
    assert curve.tau[0] == 1.0
    assert curve.tau_ci[0] == (1.0, 1.0)
    assert curve.alpha == pytest.approx(np.concatenate([text.accept_probs(rule) for text in SCORES]).mean())
    for value, (low, high) in zip([curve.alpha, *curve.tau[1:]], [curve.alpha_ci, *curve.tau_ci[1:]], strict=True):
        assert low < value < high
    assert len(curve.survival) == 4
    assert curve.survival == sorted(curve.survival, reverse=True)
    json.dumps(vars(curve), allow_nan=False)
    # One gamma alone has the interval it has beside the others: one draw of prompts serves all.
    alone = rule_curve(SCORES, KEYS, rule, (5,), survival_gamma=1)
    np.testing.assert_allclose(alone.tau_ci[0], curve.tau_ci[5], rtol=1e-12)


def test_nothing_to_replay_is_said():
    with pytest.raises(UserError, match="no response token"):
        rule_curve([], [], "sample", survival_gamma=3)
    empty = TokenScores(*[np.zeros(0)] * 5)
    with pytest.raises(UserError, match="no response token"):
        rule_curve([empty], ["a"], "sample", survival_gamma=3)
    # A prompt without a token changes nothing.
    with_empty = rule_curve([*SCORES, empty], [*KEYS, "empty"], "sample", (3,), survival_gamma=3)
    assert with_empty == rule_curve(SCORES, KEYS, "sample", (3,), survival_gamma=3)


def test_greedy_text_has_one_law_whatever_the_rule_is_called():
    for rule in ("greedy", "sample", "greedy-draft", "block"):
        assert law_of(rule, SamplingSettings(0.0, top_k=4)) == "greedy"
        assert law_of(rule, SamplingSettings(1.0)) == rule
