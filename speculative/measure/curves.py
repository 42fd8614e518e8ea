"""What a draft is worth at every gamma, with an interval, from one pass over stored text.

Shapes: N responses, P prompts (the resampling unit), C columns of sums, K numbers made of them.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from speculative.errors import UserError
from speculative.measure.intervals import intervals_of_sums, sum_by_prompt
from speculative.measure.replay import expected_blocks_of, survival_of
from speculative.measure.token_scores import TokenScores, scored_gammas

CURVE_GAMMAS = range(33)


def rule_curve(
    scores: Sequence[TokenScores],
    prompt_keys: Sequence[Hashable],
    rule: str,
    gammas: Iterable[int] = CURVE_GAMMAS,
    *,
    survival_gamma: int,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Alpha, tau at every gamma with intervals over prompts, and survival at one gamma, of text this rule may replay.

    {"rule", "alpha", "alpha_ci", "tokens", "prompts", "gammas", "tau", "tau_ci", "survival", "survival_gamma"}. All
    intervals come from the same resampled prompts. A parallel draft is asked only about gammas it was scored for. Raises
    UserError where there is no token to replay.
    """
    gammas = tuple(scored_gammas(scores, gammas))
    tokens = sum(len(text) for text in scores)
    if not tokens:
        raise UserError("there is no response token to replay: give held-out prompts with non-empty responses")
    blocks_NK = expected_blocks_of(scores, rule, gammas)
    columns = [
        np.array([len(text) for text in scores]),
        np.array([text.accept_probs(rule).sum() for text in scores]),
        *blocks_NK.T,
    ]
    sums_PC = np.stack([sum_by_prompt(prompt_keys, values_N) for values_N in columns], 1)

    def numbers_of(sums_C: np.ndarray) -> np.ndarray:
        alpha = sums_C[..., 1:2] / sums_C[..., :1]
        return np.concatenate((alpha, sums_C[..., :1] / sums_C[..., 2:]), -1)

    sums_PC = sums_PC[sums_PC[:, 0] > 0]
    alpha, *taus = numbers_of(sums_PC.sum(0)).tolist()
    alpha_ci, *tau_ci = intervals_of_sums(sums_PC, numbers_of, confidence)
    return {
        "rule": rule,
        "alpha": alpha,
        "alpha_ci": alpha_ci,
        "tokens": tokens,
        "prompts": len(sums_PC),
        "gammas": list(gammas),
        "tau": taus,
        "tau_ci": tau_ci,
        "survival": survival_of(scores, rule, survival_gamma),
        "survival_gamma": survival_gamma,
    }


def calls_curve(
    tokens_N: np.ndarray, calls_NK: np.ndarray, prompt_keys: Sequence[Hashable], confidence: float = 0.95
) -> dict[str, Any]:
    """{"tokens", "prompts", "tau", "tau_ci"}: tokens per target call in each column, with intervals over prompts.

    For who has no acceptance per token (prompt lookup, a cascade). Raises UserError where there is no token.
    """
    tokens_N = np.asarray(tokens_N)
    if not tokens_N.sum():
        raise UserError("there is no response token to replay: give held-out prompts with non-empty responses")
    sums_PC = np.stack([sum_by_prompt(prompt_keys, values_N) for values_N in (tokens_N, *calls_NK.T)], 1)
    sums_PC = sums_PC[sums_PC[:, 0] > 0]

    def numbers_of(sums_C: np.ndarray) -> np.ndarray:
        return sums_C[..., :1] / sums_C[..., 1:]

    return {
        "tokens": int(tokens_N.sum()),
        "prompts": len(sums_PC),
        "tau": numbers_of(sums_PC.sum(0)).tolist(),
        "tau_ci": intervals_of_sums(sums_PC, numbers_of, confidence),
    }
