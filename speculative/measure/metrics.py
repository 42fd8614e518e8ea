"""Counts to numbers: alpha, tau, survival, accepted per drafted, each with an interval over prompts. No models here.

Shapes: N responses, P prompts (the resampling unit: tokens of one prompt are not independent), J = 1..gamma.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from speculative.decoder.responses import Response, Timing

Interval = tuple[float, float]

RESAMPLES = 2000
WIDEST = 0.999


def sum_by_prompt(prompt_keys: Sequence[Hashable], values_N: np.ndarray) -> np.ndarray:
    """Sums (P,) of the values of each prompt, prompts in order of first appearance."""
    index: dict[Hashable, int] = {}
    prompt_of_N = [index.setdefault(key, len(index)) for key in prompt_keys]
    return np.bincount(prompt_of_N, weights=np.asarray(values_N, dtype=np.float64), minlength=len(index))


def expanded_tail(confidence: float, prompts: int) -> float:
    """What to leave at each end so that a bootstrap over few prompts covers as promised; (1 - confidence) / 2 for many.

    Resampling n values has a spread too small by sqrt((n - 1) / n), and an estimated spread asks for Student's t
    (Hesterberg, arXiv 1411.5279, "expanded percentile"). Without it 30 prompts cover 92-93 % where 95 % is said.
    """
    end = stats.t.ppf((1.0 - confidence) / 2.0, prompts - 1) * np.sqrt(prompts / (prompts - 1))
    return float(stats.norm.cdf(end))


def ratio_interval(
    numerators_P: np.ndarray, denominators_P: np.ndarray, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Bootstrap interval of sum(numerators) / sum(denominators) over prompts.

    Bias-corrected and accelerated (BCa), widened for few prompts by `expanded_tail`; percentile when BCa is undefined
    because the resamples hardly differ; the estimate twice for a single prompt or when every prompt has the same ratio.
    """
    numerators_P = np.asarray(numerators_P, dtype=np.float64)
    denominators_P = np.asarray(denominators_P, dtype=np.float64)
    estimate = float(numerators_P.sum() / denominators_P.sum())
    if len(numerators_P) < 2 or np.ptp(numerators_P - estimate * denominators_P) < 1e-12:
        return estimate, estimate

    def ratio(numerators: np.ndarray, denominators: np.ndarray, axis: int = -1) -> np.ndarray:
        return numerators.sum(axis) / denominators.sum(axis)

    # What lies beyond the widest of these ends is a handful of resamples in any case.
    level = min(1.0 - 2.0 * expanded_tail(confidence, len(numerators_P)), WIDEST)
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=RuntimeWarning)
            interval = stats.bootstrap(
                (numerators_P, denominators_P),
                ratio,
                paired=True,
                vectorized=True,
                n_resamples=RESAMPLES,
                batch=max(1, 4_000_000 // len(numerators_P)),
                confidence_level=level,
                method=method,
                rng=np.random.default_rng(seed),
            ).confidence_interval
        if np.isfinite(interval.low) and np.isfinite(interval.high):
            break
    return float(interval.low), float(interval.high)


def alpha_with_interval(accept_probs: Sequence[np.ndarray], prompt_keys: Sequence[Hashable]) -> tuple[float, Interval]:
    """Acceptance rate alpha: mean acceptance probability over all positions of target-written text, and its interval.

    `accept_probs` holds one array of per-token probabilities for each response (`token_scores.score_responses`).
    """
    sums_P = sum_by_prompt(prompt_keys, np.array([probs.sum() for probs in accept_probs]))
    tokens_P = sum_by_prompt(prompt_keys, np.array([len(probs) for probs in accept_probs]))
    return float(sums_P.sum() / tokens_P.sum()), ratio_interval(sums_P, tokens_P)


def survival(accepted_counts: Sequence[int], gamma: int, drafted_counts: Sequence[int] | None = None) -> list[float]:
    """P(the first j drafted tokens of a block are all accepted) for j = 1..gamma, over blocks that drafted j or more."""
    accepted = np.asarray(accepted_counts)
    drafted = np.full(len(accepted), gamma) if drafted_counts is None else np.asarray(drafted_counts)
    return [float((accepted >= j).sum() / max(1, (drafted >= j).sum())) for j in range(1, gamma + 1)]


def live_metrics(
    responses: Sequence[Response], gamma: int, prompt_keys: Sequence[Hashable] | None = None
) -> dict[str, Any]:
    """Numbers of a live run at one gamma >= 1.

    tau: emitted tokens per target call, bonus or corrected token included, with its interval. The last block of a
    response counts as one call even where the end token or the budget cut it, as replay counts it.
    accepted_per_drafted, accepted_per_tested, survival: from the *uncut* accepted counts of each block, so a budget
    does not lower them; the few drafted tokens behind an end token are therefore included. Where blocks drafted
    different numbers, survival[j] is over the blocks that drafted at least j, NaN-free: 0 where none did.
    overlap: mean sum_v min(target, draft) at the tested positions, the low-variance twin of accepted_per_tested. Both
    see only positions that blocks reach, which are harder than the average one: neither is alpha.
    """
    keys = [response.key for response in responses] if prompt_keys is None else prompt_keys
    tokens_P = sum_by_prompt(keys, np.array([len(response.response_ids) for response in responses]))
    blocks_P = sum_by_prompt(keys, np.array([response.blocks for response in responses]))
    counts = [count for response in responses for count in response.accepted_counts]
    drafted = [count for response in responses for count in response.drafted_counts]
    tested = sum(response.tested for response in responses)
    return {
        "tau": float(tokens_P.sum() / blocks_P.sum()),
        "tau_ci": list(ratio_interval(tokens_P, blocks_P)),
        "accepted_per_drafted": sum(counts) / max(1, sum(drafted)),
        "accepted_per_tested": sum(counts) / max(1, tested),
        "overlap": sum(response.overlap_sum for response in responses) / max(1, tested),
        "survival": survival(counts, gamma, drafted),
        "live_tokens": int(tokens_P.sum()),
        "blocks": int(blocks_P.sum()),
    }


def latency(responses: Sequence[Response]) -> dict[str, dict[str, float]]:
    """Percentiles in seconds: {"first_token", "between_commits", "per_token": {"p50", "p90", "p99"}}.

    first_token: from the moment a prompt got its row (its prefill included) to its first tokens. between_commits: the
    pauses a reader of the stream sees; a block's tokens arrive together. per_token: mean pause per token of each
    response behind its first commit. Keys without any observation are left out.
    """
    firsts = [response.commit_seconds[0] for response in responses if response.commit_seconds]
    pauses = [np.diff(response.commit_seconds) for response in responses if len(response.commit_seconds) > 1]
    rates = [
        (response.commit_seconds[-1] - response.commit_seconds[0]) / sum(response.commit_sizes[1:])
        for response in responses
        if sum(response.commit_sizes[1:]) > 0
    ]
    observed = {
        "first_token": firsts,
        "between_commits": np.concatenate(pauses).tolist() if pauses else [],
        "per_token": rates,
    }
    return {
        name: {f"p{percent}": float(np.percentile(values, percent)) for percent in (50, 90, 99)}
        for name, values in observed.items()
        if values
    }


def stage_seconds(timing: Timing) -> dict[str, float]:
    """Seconds by stage: prefill, draft, verify, accept, recording (compiling, capturing), host and total."""
    names = ("prefill", "draft", "verify", "accept", "recording", "host", "total")
    return {name: float(getattr(timing, f"{name}_seconds")) for name in names}
