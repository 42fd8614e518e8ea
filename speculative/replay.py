"""Every gamma from one draft pass over stored target responses (DESIGN section 5): no target in memory.

Shapes: N responses, T positions (padded), K gammas, J1 = accepted so far in the block, 0..max gamma.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

GAMMAS = tuple(range(1, 17))
WORRYING_Z = 4.0  # Beyond this the gap between live decoding and replay has a cause.
# Greedy has no coins to excuse a difference, but a near-tie may fall otherwise in a batch of another shape.
GREEDY_BLOCK_TOLERANCE = 0.02


def _padded(accept_probs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (T, N), zero behind each response's end, and lengths (N,)."""
    lengths_N = np.array([len(probs) for probs in accept_probs])
    padded_TN = np.zeros((int(lengths_N.max(initial=0)), len(lengths_N)))
    for row, probs in enumerate(accept_probs):
        padded_TN[: len(probs), row] = probs
    return padded_TN, lengths_N


def _next_state(state_NKJ1: np.ndarray, accept_N: np.ndarray, may_draft_KJ1: np.ndarray) -> np.ndarray:
    """One token of the block process: accepted -> j + 1; corrected, or bonus at j = gamma -> a new block, j = 0."""
    accepted_NKJ1 = state_NKJ1 * may_draft_KJ1 * accept_N[:, None, None]
    following_NKJ1 = np.empty_like(state_NKJ1)
    following_NKJ1[..., 1:] = accepted_NKJ1[..., :-1]
    following_NKJ1[..., 0] = state_NKJ1.sum(-1) - accepted_NKJ1.sum(-1)
    return following_NKJ1


def _may_draft(gammas: Sequence[int]) -> np.ndarray:
    return (np.arange(max(gammas) + 1) < np.array(gammas)[:, None]).astype(np.float64)


def expected_blocks(accept_probs: Sequence[np.ndarray], gammas: Iterable[int] = GAMMAS) -> np.ndarray:
    """Expected target calls (N, K) that speculative decoding needs for each stored response, at each gamma >= 1.

    The expectation of sum_t P(a block starts at t) along the text, exact (no i.i.d. assumption); the last block counts
    in full even though the text ends inside it.
    """
    gammas = tuple(gammas)
    padded_TN, lengths_N = _padded(accept_probs)
    may_draft_KJ1 = _may_draft(gammas)
    state_NKJ1 = np.zeros((len(lengths_N), *may_draft_KJ1.shape))
    state_NKJ1[..., 0] = 1.0
    blocks_NK = np.zeros(state_NKJ1.shape[:2])
    for position, accept_N in enumerate(padded_TN):
        blocks_NK += state_NKJ1[..., 0] * (position < lengths_N)[:, None]
        state_NKJ1 = _next_state(state_NKJ1, accept_N, may_draft_KJ1)
    return blocks_NK


def block_variance(accept_probs: Sequence[np.ndarray], gamma: int) -> np.ndarray:
    """Variance (N,) of the number of blocks around `expected_blocks`, given the text; 0 where all a_t are 0 or 1."""
    padded_TN, lengths_N = _padded(accept_probs)
    may_draft_KJ1 = _may_draft((gamma,))
    # Along K: P(state), E[blocks; state], E[blocks^2; state].
    state_N3J1 = np.zeros((len(lengths_N), 3, gamma + 1))
    state_N3J1[:, 0, 0] = 1.0
    for position, accept_N in enumerate(padded_TN):
        probability_N, first_N = state_N3J1[:, :2, 0].T * (position < lengths_N)
        state_N3J1[:, 2, 0] += 2 * first_N + probability_N
        state_N3J1[:, 1, 0] += probability_N
        state_N3J1 = _next_state(state_N3J1, accept_N, may_draft_KJ1)
    _, mean_N, square_N = state_N3J1.sum(-1).T
    return np.maximum(square_N - mean_N**2, 0.0)


def replay(accept_probs: Sequence[np.ndarray], gammas: Iterable[int] = GAMMAS) -> dict[int, float]:
    """{gamma: tau}: tokens of all responses over expected target calls."""
    gammas = tuple(gammas)
    tokens = sum(len(probs) for probs in accept_probs)
    return dict(zip(gammas, (tokens / expected_blocks(accept_probs, gammas).sum(0)).tolist(), strict=True))


def replay_agreement(accept_probs: Sequence[np.ndarray], counted_blocks_N: Sequence[int], gamma: int) -> dict[str, Any]:
    """Replay of the very text a live run produced against the blocks it counted.

    {"predicted_blocks", "live_blocks", "z", "agrees"}: z is in standard deviations of the coins; where nothing is random (greedy)
    it is 0 when both are equal within rounding and None otherwise. It sees faults that leave the text right and
    only lower acceptance, such as draft positions off by one.
    """
    predicted = float(expected_blocks(accept_probs, (gamma,)).sum())
    counted = int(sum(counted_blocks_N))
    deviation = float(np.sqrt(block_variance(accept_probs, gamma).sum()))
    gap = counted - predicted
    z = 0.0 if abs(gap) < 1e-6 else gap / deviation if deviation > 1e-6 else None
    agrees = abs(gap) <= GREEDY_BLOCK_TOLERANCE * predicted if z is None else abs(z) <= WORRYING_Z
    return {"predicted_blocks": predicted, "live_blocks": counted, "z": z, "agrees": bool(agrees)}


def agreement_words(check: dict[str, Any] | None, tokens: int) -> str:
    """`replay 2.31, z +0.4`: tau that replay predicts for a live run of so many tokens, to stand beside live tau."""
    if check is None:
        return "no replay for this rule"
    # Where a draft takes its argmax, the text alone says how many blocks it took.
    certain = check["z"] == 0 and float(check["predicted_blocks"]).is_integer()
    how = "exact" if certain else "not exact" if check["z"] is None else f"z {check['z']:+.1f}"
    return f"replay {tokens / check['predicted_blocks']:.2f}, {how}"


def agreement_warning(check: dict[str, Any] | None) -> str | None:
    """A line when live decoding and replay part by more than coins (|z| > 4) or, at temperature 0, near-ties explain."""
    if check is None or check["agrees"]:
        return None
    size = "nothing is random here" if check["z"] is None else f"z = {check['z']:+.1f}"
    return (
        f"live decoding counted {check['live_blocks']} blocks where replay of its text predicts "
        f"{check['predicted_blocks']:.0f} ({size}): the text is right, but acceptance is not what this draft's "
        "probabilities give; look for draft positions, masks or sampling that differ between the two, or for rounding "
        "(bfloat16) in a nearly deterministic draft"
    )
