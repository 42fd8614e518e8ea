"""What a draft is worth at every gamma, with an interval, from one pass over stored text.

Shapes: N responses, P prompts (the resampling unit), C columns of sums, K numbers made of them.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from speculative.errors import UserError
from speculative.measure.intervals import Interval, intervals_of_sums, sum_by_prompt
from speculative.measure.replay import expected_blocks_of, survival_of
from speculative.measure.token_scores import TokenScores, scored_gammas

CURVE_GAMMAS = range(33)


@dataclass(frozen=True)
class CallsCurve:
    """Tokens per target call at each gamma, with intervals over prompts, all from the same resampled prompts."""

    tokens: int
    prompts: int
    tau: list[float]
    tau_ci: list[Interval]


@dataclass(frozen=True)
class RuleCurve(CallsCurve):
    """The same of a draft under a rule, with its acceptance and its survival at one gamma."""

    rule: str
    gammas: list[int]
    alpha: float
    alpha_ci: Interval
    survival: list[float]


def rule_curve(
    scores: Sequence[TokenScores],
    prompt_keys: Sequence[Hashable],
    rule: str,
    gammas: Iterable[int] = CURVE_GAMMAS,
    *,
    survival_gamma: int,
) -> RuleCurve:
    """Of text that this rule may replay; a parallel draft is asked only about gammas it was scored for.

    Raises UserError where there is no token to replay.
    """
    gammas = scored_gammas(scores, gammas)
    tokens_N = np.array([len(text) for text in scores])
    accepted_N = np.array([text.accept_probs(rule).sum() for text in scores])
    calls, alpha, alpha_ci = _curve(tokens_N, expected_blocks_of(scores, rule, gammas), prompt_keys, accepted_N)
    survival = survival_of(scores, rule, survival_gamma)
    return RuleCurve(**vars(calls), rule=rule, gammas=gammas, alpha=alpha, alpha_ci=alpha_ci, survival=survival)


def calls_curve(tokens_N: np.ndarray, calls_NK: np.ndarray, prompt_keys: Sequence[Hashable]) -> CallsCurve:
    """For who has no acceptance per token (prompt lookup, a cascade). Raises UserError where there is no token."""
    return _curve(tokens_N, calls_NK, prompt_keys, np.zeros(len(tokens_N)))[0]


def _curve(
    tokens_N: np.ndarray, calls_NK: np.ndarray, prompt_keys: Sequence[Hashable], accepted_N: np.ndarray
) -> tuple[CallsCurve, float, Interval]:
    """(the curve, accepted tokens over all, its interval)."""
    if not tokens_N.sum():
        raise UserError("there is no response token to replay: give held-out prompts with non-empty responses")
    sums_PC = np.stack([sum_by_prompt(prompt_keys, own_N) for own_N in (tokens_N, accepted_N, *calls_NK.T)], 1)
    sums_PC = sums_PC[sums_PC[:, 0] > 0]

    def numbers_of(sums_C: np.ndarray) -> np.ndarray:
        return np.concatenate((sums_C[..., 1:2] / sums_C[..., :1], sums_C[..., :1] / sums_C[..., 2:]), -1)

    alpha, *taus = numbers_of(sums_PC.sum(0)).tolist()
    alpha_ci, *tau_ci = ((low, high) for low, high in intervals_of_sums(sums_PC, numbers_of))
    return CallsCurve(int(tokens_N.sum()), len(sums_PC), taus, tau_ci), alpha, alpha_ci
