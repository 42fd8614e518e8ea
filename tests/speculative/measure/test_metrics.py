"""Counts to numbers, by hand; intervals over prompts."""

import numpy as np
import pytest

from speculative.decoder.responses import Response, Timing
from speculative.measure.intervals import ratio_interval, sum_by_prompt
from speculative.measure.metrics import alpha_with_interval, latency, live_metrics, stage_seconds, survival


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
        tested=sum(min(count + 1, gamma) for count in accepted_counts),
        overlap_sum=0.5 * sum(min(count + 1, gamma) for count in accepted_counts),
    )


def test_live_metrics_by_hand():
    # 3 + 1 + 4 tokens in three blocks, then 2 + 2 of which the budget cut the last one to a single token.
    responses = [response("a", [2, 0, 3], 3, 8), response("b", [1, 1], 3, 3)]
    numbers = live_metrics(responses, gamma=3)
    assert numbers["tau"] == pytest.approx(11 / 5)
    assert numbers["accepted_per_drafted"] == pytest.approx(7 / 15)
    assert numbers["accepted_per_tested"] == pytest.approx(7 / 11)
    assert numbers["overlap"] == pytest.approx(0.5)
    assert numbers["survival"] == pytest.approx([4 / 5, 2 / 5, 1 / 5])
    assert (numbers["blocks"], numbers["live_tokens"]) == (5, 11)
    low, high = numbers["tau_ci"]
    assert low <= numbers["tau"] <= high


def test_survival_falls_and_sums_to_the_mean_accepted_count():
    counts = [0, 1, 2, 5, 5, 3]
    chances = survival(counts, 5)
    assert chances == sorted(chances, reverse=True)
    assert sum(chances) == pytest.approx(np.mean(counts))


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


def test_degenerate_data_give_a_point_and_seeds_repeat():
    assert ratio_interval(np.array([3.0]), np.array([4.0])) == (0.75, 0.75)
    assert ratio_interval(np.array([3.0, 6.0]), np.array([4.0, 8.0])) == (0.75, 0.75)
    assert ratio_interval(np.zeros(5), np.ones(5)) == (0.0, 0.0)
    odd = ratio_interval(np.array([1.0, 1.0, 1.0, 0.0]), np.ones(4))  # hardly any distinct resamples
    assert 0.0 <= odd[0] <= 0.75 <= odd[1] <= 1.0
    data = np.random.default_rng(0).random(30)
    assert ratio_interval(data, np.ones(30)) == ratio_interval(data, np.ones(30))


def test_latency_by_hand():
    fast = Response("a", [1], commit_seconds=[0.1, 0.3, 0.4], commit_sizes=[2, 3, 1])
    slow = Response("b", [1], commit_seconds=[0.5], commit_sizes=[4])
    found = latency([fast, slow])
    assert found["first_token"]["p50"] == pytest.approx(0.3)
    assert found["between_commits"]["p50"] == pytest.approx(0.15)  # pauses of 0.2 and 0.1
    assert found["per_token"]["p99"] == pytest.approx(0.3 / 4)  # four tokens behind the first commit
    assert found["per_response"]["p50"] == pytest.approx(0.45)  # the last tokens came at 0.4 and 0.5
    assert set(latency([slow])) == {"first_token", "per_response"}
    assert latency([]) == {}


def test_stages_and_the_host_make_the_whole():
    timing = Timing(prefill_seconds=1, draft_seconds=2, verify_seconds=3, accept_seconds=4, recording_seconds=5)
    timing.total_seconds = 16
    assert stage_seconds(timing)["host"] == 1
    assert sum(stage_seconds(timing).values()) == 32
