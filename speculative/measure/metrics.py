"""Metrics with intervals over prompts, from counts and stored text: alpha, tau at every gamma, survival, accepted per drafted.

Shapes: N responses, P prompts (the resampling unit: tokens of one prompt are not independent), C columns of sums, K numbers made
of them, J = 1..gamma.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np
from pydantic import Field

from speculative.decoder.responses import Response, Timing
from speculative.errors import UserError
from speculative.measure.intervals import Interval, intervals_of_sums, ratio_interval, sum_by_prompt
from speculative.measure.measured import Measured, Waits
from speculative.measure.record import Record
from speculative.measure.replay import expected_blocks_of, shares_of, survival_of
from speculative.measure.token_scores import TokenScores, accepted_sums, scored_gammas
from speculative.rules.rule import Rule

MOST_GAMMA = 32  # of curves, and of a draft that is judged
CURVE_GAMMAS = range(MOST_GAMMA + 1)


@dataclass(frozen=True)
class CallsCurve:
    """Tokens per target call at each gamma, with intervals over prompts, all from the same resampled prompts."""

    tokens: int
    prompts: int
    tau: list[float]
    tau_ci: list[Interval]


class Curve(Record):
    """A draft under one rule, by replay."""

    rule: str = Field(description="engine rule")
    alpha: float = Field(description="acceptance rate")
    alpha_ci: Interval = Field(description="its 95 % interval")
    tokens: int = Field(description="of the text")
    prompts: int = Field(description="of the text")
    gammas: list[int] = Field(description="0 to 32")
    tau: list[float] = Field(description="at each gamma")
    tau_ci: list[Interval] = Field(description="at each gamma, from the same resampled prompts")
    survival: list[float] = Field(description="at the verdict's gamma")
    predicted_speed_up: list[float | None] | None = Field(None, description="at each gamma; null beyond the timed ones")


def rule_curve(
    scores: Sequence[TokenScores],
    prompt_keys: Sequence[Hashable],
    rule: Rule,
    gammas: Iterable[int] = CURVE_GAMMAS,
    *,
    survival_gamma: int,
) -> Curve:
    """The curve of text that this rule may replay; a parallel draft only at gammas it was scored for. Raises UserError without a token."""
    gammas = scored_gammas(scores, gammas)
    tokens_N = np.array([len(text) for text in scores])
    blocks_NK = expected_blocks_of(scores, rule, gammas)
    calls, alpha, alpha_ci = _curve(tokens_N, blocks_NK, prompt_keys, accepted_sums(scores, rule))
    survival = survival_of(scores, rule, survival_gamma)
    return Curve(**vars(calls), rule=rule.name, gammas=gammas, alpha=alpha, alpha_ci=alpha_ci, survival=survival)


def calls_curve(tokens_N: np.ndarray, calls_NK: np.ndarray, prompt_keys: Sequence[Hashable]) -> CallsCurve:
    """The curve of drafters without acceptance per token (prompt lookup, alone or before a draft). Raises UserError if
    there is no token.
    """
    return _curve(tokens_N, calls_NK, prompt_keys, np.zeros(len(tokens_N)))[0]


def predicted_row(
    row: Measured,
    prompt_keys: Sequence[Hashable],
    tokens_N: np.ndarray,
    calls_N: np.ndarray,
    steps_N: np.ndarray | None = None,
) -> Measured:
    """The row with tau by replay, from a way's expected target calls (N,), and with the speed-up that its target steps (N,) predict."""
    curve = calls_curve(tokens_N, np.stack([calls_N] if steps_N is None else [calls_N, steps_N], 1), prompt_keys)
    row = replace(row, prompts=curve.prompts, tokens=curve.tokens, tau=curve.tau[0], tau_ci=curve.tau_ci[0])
    if steps_N is None:
        return replace(row, how=row.how | {"tau": "replay"})
    how = row.how | {"tau": "replay", "speed_up": "predicted"}
    return replace(row, speed_up=curve.tau[1], speed_up_ci=curve.tau_ci[1], how=how)


def _curve(
    tokens_N: np.ndarray, calls_NK: np.ndarray, prompt_keys: Sequence[Hashable], accepted_N: np.ndarray
) -> tuple[CallsCurve, float, Interval]:
    """(the curve, accepted tokens over all, its interval)."""
    if not tokens_N.sum():
        raise UserError("no response token to replay: give held-out prompts with non-empty responses")
    sums_PC = np.stack([sum_by_prompt(prompt_keys, own_N) for own_N in (tokens_N, accepted_N, *calls_NK.T)], 1)
    sums_PC = sums_PC[sums_PC[:, 0] > 0]

    def numbers_of(sums_C: np.ndarray) -> np.ndarray:
        return np.concatenate((sums_C[..., 1:2] / sums_C[..., :1], sums_C[..., :1] / sums_C[..., 2:]), -1)

    alpha, *taus = numbers_of(sums_PC.sum(0)).tolist()
    alpha_ci, *tau_ci = intervals_of_sums(sums_PC, numbers_of)
    return CallsCurve(int(tokens_N.sum()), len(sums_PC), taus, tau_ci), alpha, alpha_ci


def alpha_with_interval(
    accept_probs: Sequence[np.ndarray], prompt_keys: Sequence[Hashable], confidence: float = 0.95
) -> tuple[float, Interval]:
    """Acceptance rate alpha and its interval: the mean of per-token acceptance probabilities (an array for each response) of
    target-written text.
    """
    sums_N, tokens_N = (np.array([of(probs) for probs in accept_probs]) for of in (np.sum, len))
    return ratio_with_interval(sums_N, tokens_N, prompt_keys, confidence)


def ratio_with_interval(
    over_N: np.ndarray, under_N: np.ndarray, prompt_keys: Sequence[Hashable], confidence: float = 0.95
) -> tuple[float, Interval]:
    """Ratio of two sums over responses, and its interval over prompts: alpha is accepted over all tokens, tau tokens over blocks."""
    over_P, under_P = sum_by_prompt(prompt_keys, over_N), sum_by_prompt(prompt_keys, under_N)
    return float(over_P.sum() / under_P.sum()), ratio_interval(over_P, under_P, confidence)


class LiveNumbers(TypedDict):
    """Numbers of a live run at one gamma.

    tau: emitted tokens per target call, bonus or corrected token included. The last block of a response counts as one call even where it
    was cut, as in replay. accepted_per_drafted, survival: from the *uncut* accepted counts of each block, so a budget does not lower them.
    survival[j] is over the blocks that drafted at least j, 0 where none did.
    """

    tau: float
    tau_ci: Interval
    accepted_per_drafted: float
    survival: list[float]
    live_tokens: int
    blocks: int


def live_metrics(responses: Sequence[Response], gamma: int) -> LiveNumbers:
    """Metrics of these responses, gamma >= 1."""
    keys = [tuple(response.prompt_ids) for response in responses]
    tokens_P = sum_by_prompt(keys, np.array([len(response.response_ids) for response in responses]))
    blocks_P = sum_by_prompt(keys, np.array([response.blocks for response in responses]))
    accepted = np.array([count for response in responses for count in response.accepted_counts])
    drafted = np.array([count for response in responses for count in response.drafted_counts])
    places_J1 = np.arange(1, gamma + 1)[:, None]
    survival, accepted_per_drafted = shares_of((drafted >= places_J1).sum(1), (accepted >= places_J1).sum(1))
    return {
        "tau": float(tokens_P.sum() / blocks_P.sum()),
        "tau_ci": ratio_interval(tokens_P, blocks_P),
        "accepted_per_drafted": accepted_per_drafted,
        "survival": survival,
        "live_tokens": int(tokens_P.sum()),
        "blocks": int(blocks_P.sum()),
    }


class Percentiles(Record):
    """Percentiles of the observed values, in seconds."""

    p50: float = Field(description="the median")
    p90: float = Field(description="nine of ten are at most this")
    p99: float = Field(description="99 of 100 are")


class Latency(Record):
    """Waiting times of a reader. Null: not observed."""

    first_token: Percentiles | None = Field(None, description="time to the first tokens, with both models' prefill")
    between_commits: Percentiles | None = Field(None, description="pauses: the tokens of a block arrive together")
    per_token: Percentiles | None = Field(None, description="(last - first token) / (tokens - 1) of each response")
    per_response: Percentiles | None = Field(None, description="from the request to the response's last token")


def latency(responses: Sequence[Response]) -> Latency:
    """Latency of responses that were decoded one at a time or together; see the fields of `Latency`. Times begin when a prompt gets its
    row, its prefill included. Values that were not observed are not set.
    """
    firsts = [response.commit_seconds[0] for response in responses if response.commit_seconds]
    pauses = [np.diff(response.commit_seconds) for response in responses if len(response.commit_seconds) > 1]
    rates = [
        (response.commit_seconds[-1] - response.commit_seconds[0]) / (sum(response.commit_sizes) - 1)
        for response in responses
        if sum(response.commit_sizes) > 1
    ]
    observed = {
        "first_token": firsts,
        "between_commits": np.concatenate(pauses).tolist() if pauses else [],
        "per_token": rates,
        "per_response": [response.commit_seconds[-1] for response in responses if response.commit_seconds],
    }
    return Latency(**{name: _percentiles(values) for name, values in observed.items() if values})


def _percentiles(values: Sequence[float]) -> Percentiles:
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Percentiles(p50=p50, p90=p90, p99=p99)


class Waiting(TypedDict):
    """What `Measured` says about waiting, in milliseconds."""

    first_token_ms: Waits | None
    per_token_ms: Waits | None
    stages_ms: Waits | None


def waits_of(responses: Sequence[Response], timing: Timing | None = None) -> Waiting:
    """The percentiles of `latency`, and the mean of a block's stages, without recordings and stages that took no time."""
    timing, found = timing or Timing(), latency(responses).record()
    first, later = ({k: 1e3 * v for k, v in found.get(name, {}).items()} for name in ("first_token", "per_token"))
    spent = {k: 1e3 * v / timing.target_calls for k, v in stage_seconds(timing).items() if v > 0.0}
    stages = {k: v for k, v in spent.items() if k not in ("recording", "total")}
    return {"first_token_ms": first or None, "per_token_ms": later or None, "stages_ms": stages or None}


def stage_seconds(timing: Timing) -> dict[str, float]:
    """Seconds by stage: prefill, draft, verify, accept, block (these three as one), recording (compiling, capturing), host, total."""
    names = ("prefill", "draft", "verify", "accept", "block", "recording", "host", "total")
    return {name: float(getattr(timing, f"{name}_seconds")) for name in names}
