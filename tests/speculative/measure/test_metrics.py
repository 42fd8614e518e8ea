"""Counts to numbers by hand, curves against their parts, intervals against scipy's own bootstrap."""

import json

import numpy as np
import pytest
from scipy import stats
from tiny_models import perturbed, prompts_of, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Response, Timing
from speculative.errors import UserError
from speculative.measure import intervals
from speculative.measure.intervals import (
    BEYOND_EACH_END,
    expanded_tail,
    intervals_of_sums,
    ratio_interval,
    sum_by_prompt,
)
from speculative.measure.metrics import (
    alpha_with_interval,
    latency,
    live_metrics,
    rule_curve,
    waits_of,
)
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import TokenScores, score_tokens
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings


def response(key, accepted_counts, gamma, tokens):
    return Response(
        key=key,
        prompt_ids=[1],
        response_ids=[0] * tokens,
        blocks=len(accepted_counts),
        accepted_counts=accepted_counts,
        accepted=sum(accepted_counts),
        drafted=gamma * len(accepted_counts),
        drafted_counts=[gamma] * len(accepted_counts),
    )


def test_prompts_without_tokens_do_not_count():
    """Else a resample could have nothing but them, which has no ratio."""
    sums, tokens = np.array([2.0, 3.0, 0.0, 0.0]), np.array([4.0, 4.0, 0.0, 0.0])
    assert ratio_interval(sums, tokens) == ratio_interval(sums[:2], tokens[:2])
    assert np.isfinite(ratio_interval(sums, tokens)).all()


def test_live_metrics_by_hand():
    # 3 + 1 + 4 tokens in three blocks, then 2 + 2 of which the budget cut the last one to a single token.
    responses = [response("a", [2, 0, 3], 3, 8), response("b", [1, 1], 3, 3)]
    numbers = live_metrics(responses, gamma=3)
    assert numbers["tau"] == pytest.approx(11 / 5)
    assert numbers["accepted_per_drafted"] == pytest.approx(7 / 15)
    assert numbers["survival"] == pytest.approx([4 / 5, 2 / 5, 1 / 5])
    assert (numbers["blocks"], numbers["live_tokens"]) == (5, 11)
    low, high = numbers["tau_ci"]
    assert low <= numbers["tau"] <= high


def test_samples_of_one_prompt_are_resampled_together():
    assert sum_by_prompt(["a", "b", "a"], np.array([1.0, 2.0, 3.0])).tolist() == [4.0, 2.0]
    rng = np.random.default_rng(0)
    per_prompt = rng.random(20)
    probs = [np.full(50, value) for value in per_prompt for _ in range(8)]
    keys = [prompt for prompt in range(20) for _ in range(8)]
    alpha, (low, high) = alpha_with_interval(probs, keys)
    _, (false_low, false_high) = alpha_with_interval(probs, list(range(160)))
    assert alpha == pytest.approx(per_prompt.mean())
    assert high - low > 2 * (false_high - false_low)


def test_latency_by_hand():
    fast = Response("a", [1], commit_seconds=[0.1, 0.3, 0.4], commit_sizes=[2, 3, 1])
    slow = Response("b", [1], commit_seconds=[0.5], commit_sizes=[4])
    found = latency([fast, slow])
    assert found.first_token.p50 == pytest.approx(0.3)
    assert found.between_commits.p50 == pytest.approx(0.15)  # pauses of 0.2 and 0.1
    assert found.per_token.p50 == pytest.approx((0.3 / 5 + 0.0) / 2)  # 0.3 for 5 tokens behind the first, nothing for 3
    assert found.per_response.p50 == pytest.approx(0.45)  # the last tokens came at 0.4 and 0.5
    short = Response("c", [1], commit_seconds=[0.2], commit_sizes=[1])
    assert set(latency([short]).record()) == {"first_token", "per_response"}
    assert latency([]).record() == {}


def test_waits_and_stages_of_a_row_by_hand():
    one = Response("a", [1], commit_seconds=[0.1, 0.3, 0.5], commit_sizes=[1, 2, 2])
    two = Response("b", [1], commit_seconds=[0.2, 0.4], commit_sizes=[1, 1])
    timing = Timing(prefill_seconds=1, draft_seconds=2, verify_seconds=4, recording_seconds=5, total_seconds=14)
    timing.target_calls = 10
    found = waits_of([one, two], timing)
    assert found["first_token_ms"] == pytest.approx({"p50": 150.0, "p90": 190.0, "p99": 199.0})
    assert found["per_token_ms"] == pytest.approx({"p50": 150.0, "p90": 190.0, "p99": 199.0})  # 0.4 / 4 and 0.2 / 1
    assert found["stages_ms"] == pytest.approx({"prefill": 100.0, "draft": 200.0, "verify": 400.0, "host": 200.0})
    assert waits_of([]) == {"first_token_ms": None, "per_token_ms": None, "stages_ms": None}


TARGET = tiny_model()
DRAFT = perturbed(TARGET, 0.05)
STORED = DecodeSettings(SamplingSettings(1.0), 0, Rule.named("sample"), max_tokens=24, seed=4)
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


@pytest.fixture(autouse=True)
def _all_resamples(monkeypatch):
    monkeypatch.setattr(intervals, "MOST_RESAMPLES", 100_000)


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
    curve = rule_curve(SCORES, KEYS, Rule.named(rule), survival_gamma=4)
    assert (curve.rule, curve.tokens, curve.prompts) == (rule, 30 * 24, 15)
    assert curve.gammas == list(range(33))
    np.testing.assert_allclose(
        curve.tau, 720 / expected_blocks_of(SCORES, Rule.named(rule), range(33)).sum(0), rtol=1e-12
    )
    assert curve.tau[0] == 1.0
    assert curve.tau_ci[0] == (1.0, 1.0)
    assert curve.alpha == pytest.approx(np.concatenate([text.accept_probs(Rule.named(rule)) for text in SCORES]).mean())
    for value, (low, high) in zip([curve.alpha, *curve.tau[1:]], [curve.alpha_ci, *curve.tau_ci[1:]], strict=True):
        assert low < value < high
    assert len(curve.survival) == 4
    assert curve.survival == sorted(curve.survival, reverse=True)
    json.dumps(vars(curve), allow_nan=False)
    # One gamma alone has the interval it has beside the others: one draw of prompts serves all.
    alone = rule_curve(SCORES, KEYS, Rule.named(rule), (5,), survival_gamma=1)
    np.testing.assert_allclose(alone.tau_ci[0], curve.tau_ci[5], rtol=1e-12)


def test_nothing_to_replay_is_reported():
    with pytest.raises(UserError, match="no response token"):
        rule_curve([], [], Rule.named("sample"), survival_gamma=3)
    empty = TokenScores(*[np.zeros(0)] * 4)
    with pytest.raises(UserError, match="no response token"):
        rule_curve([empty], ["a"], Rule.named("sample"), survival_gamma=3)
    # A prompt without a token changes nothing.
    with_empty = rule_curve([*SCORES, empty], [*KEYS, "empty"], Rule.named("sample"), (3,), survival_gamma=3)
    assert with_empty == rule_curve(SCORES, KEYS, Rule.named("sample"), (3,), survival_gamma=3)
