"""Is the gain real, and how small a gain could be seen? Two drafts on the same frozen text, paired prompt by prompt.

Shapes: N responses, P prompts (the resampling unit).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from speculative.curves import intervals_of_sums
from speculative.metrics import RESAMPLES, sum_by_prompt
from speculative.replay import expected_blocks_of
from speculative.token_scores import TokenScores

POWER = 0.8
NO_SPREAD = 1e-12  # Rounding, not a spread.


def paired_effects(
    ours: Sequence[TokenScores],
    baseline: Sequence[TokenScores],
    prompt_keys: Sequence[Hashable],
    *,
    rule: str,
    gamma: int,
    costs: tuple[float, float] | None = None,
    looks: int = 1,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """What `ours` gains over `baseline` on the same text: in alpha, in tau at `gamma`, and in predicted speed-up.

    costs: (c, v(gamma)), from which the speed-up tau / (gamma * c + v) follows. looks: judged checkpoints of which
    `ours` is the best; the intervals are then wider, at 1 - (1 - confidence) / looks each (Bonferroni), so that all
    of them hold together with `confidence`. See `effects_of_sums` for what is returned.

    Raises ValueError for drafts that were not scored on the same text.
    """
    if [len(text) for text in ours] != [len(text) for text in baseline]:
        raise ValueError("paired effects need the same text under both drafts")
    sides = [
        (np.array([text.accept_probs(rule).sum() for text in side]), expected_blocks_of(side, rule, (gamma,))[:, 0])
        for side in (ours, baseline)
    ]
    tokens_N = np.array([len(text) for text in ours])
    return effects_of_sums(prompt_keys, tokens_N, *sides, gamma=gamma, costs=costs, looks=looks, confidence=confidence)


def effects_of_sums(
    prompt_keys: Sequence[Hashable],
    tokens_N: np.ndarray,
    ours: tuple[np.ndarray, np.ndarray],
    baseline: tuple[np.ndarray, np.ndarray],
    *,
    gamma: int,
    costs: tuple[float, float] | None = None,
    looks: int = 1,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """`paired_effects` from what is left of the scores: per response its tokens, and by draft (sum of acceptance
    probabilities, expected blocks at `gamma`), each (N,).

    {"alpha": {"gain", "ci"}, "tau": {"gain", "ci"}, "speed_up": {"gain", "ci"} | None, "confidence", "looks",
    "corrected_confidence", "method", "prompts", "tokens", "minimal_detectable": {"alpha", "tau"}, "prompts_for_half",
    "certain": "gain" | "loss" | "none"}.
    minimal_detectable: the smallest true difference that such an interval tells from 0 with 80 % power, None where
    prompts show no spread; half of it needs `prompts_for_half`. certain: whether the interval of alpha excludes 0, and
    there are enough prompts for that (`fewest_prompts`).
    """
    if looks < 1:
        raise ValueError(f"looks = {looks}: at least 1")
    columns = (tokens_N, ours[0], baseline[0], ours[1], baseline[1])
    sums_PC = np.stack([sum_by_prompt(prompt_keys, np.asarray(values_N)) for values_N in columns], 1)
    sums_PC = sums_PC[sums_PC[:, 0] > 0]
    if not len(sums_PC):
        raise ValueError("no response has a token to compare on")
    corrected = 1.0 - (1.0 - confidence) / looks
    gains = _gains(sums_PC.sum(0)).tolist()
    intervals = intervals_of_sums(sums_PC, _gains, corrected)
    alpha, tau = ({"gain": gain, "ci": ci} for gain, ci in zip(gains, intervals, strict=True))
    low, high = alpha["ci"]
    enough = len(sums_PC) >= fewest_prompts(corrected)
    seconds = None if costs is None else gamma * costs[0] + costs[1]
    speed_up = None
    if seconds is not None:
        speed_up = {"gain": tau["gain"] / seconds, "ci": [end / seconds for end in tau["ci"]]}
    return {
        "alpha": alpha,
        "tau": tau,
        "speed_up": speed_up,
        "confidence": confidence,
        "looks": looks,
        "corrected_confidence": corrected,
        "method": "paired bootstrap over prompts (BCa)" + (f", Bonferroni over {looks} looks" if looks > 1 else ""),
        "prompts": len(sums_PC),
        "tokens": int(sums_PC[:, 0].sum()),
        "minimal_detectable": {
            name: _detectable(error, corrected)
            for name, error in zip(("alpha", "tau"), _standard_errors(sums_PC), strict=True)
        },
        "prompts_for_half": 4 * len(sums_PC),
        "certain": "gain" if enough and low > 0 else "loss" if enough and high < 0 else "none",
    }


def fewest_prompts(confidence: float) -> int:
    """Prompts below which nothing is certain: by luck alone all of n differences have one sign with 2^(1 - n).

    A bootstrap of so few can never reach 0 when they agree, whatever the confidence.
    """
    return 1 + int(np.ceil(np.log2(1.0 / (1.0 - confidence)) - 1e-9))


def _detectable(error: float, confidence: float) -> float | None:
    """The true difference that an interval of this standard error excludes 0 for in 80 of 100 cases."""
    factor = float(stats.norm.ppf(0.5 + confidence / 2.0) + stats.norm.ppf(POWER))
    return factor * error if error > NO_SPREAD else None


def _gains(sums_C: np.ndarray) -> np.ndarray:
    """(alpha gain, tau gain) of sums (tokens, accepted by ours, by the baseline, blocks of ours, of the baseline)."""
    tokens, accepted, accepted_base, blocks, blocks_base = np.moveaxis(sums_C, -1, 0)
    return np.stack(((accepted - accepted_base) / tokens, tokens / blocks - tokens / blocks_base), -1)


def _standard_error(residuals_P: np.ndarray, denominators_P: np.ndarray) -> float:
    """Of a ratio of sums, from its residuals numerator - ratio * denominator: the delta method."""
    if len(residuals_P) < 2:
        return 0.0
    return float(np.std(residuals_P, ddof=1) / denominators_P.mean() / np.sqrt(len(residuals_P)))


def _standard_errors(sums_PC: np.ndarray) -> tuple[float, float]:
    """Of the two gains, by linearising each ratio in its sums."""
    tokens_P, accepted_P, accepted_base_P, blocks_P, blocks_base_P = sums_PC.T
    tokens = tokens_P.sum()
    gain_P = accepted_P - accepted_base_P
    alpha_P = gain_P - tokens_P * gain_P.sum() / tokens
    tau_P = sum(
        sign * (tokens_P - own_P * tokens / own_P.sum()) / own_P.mean()
        for sign, own_P in ((1.0, blocks_P), (-1.0, blocks_base_P))
    )
    return _standard_error(alpha_P, tokens_P), _standard_error(np.asarray(tau_P), np.ones(len(sums_PC)))


def words(effects: dict[str, Any]) -> str:
    """One sentence: the gain in alpha with its interval, and what such a number of prompts can see."""
    gain, (low, high), prompts = effects["alpha"]["gain"], effects["alpha"]["ci"], effects["prompts"]
    sentence = f"alpha {gain:+.3f} [{low:+.3f}, {high:+.3f}]"
    if effects["looks"] > 1:
        sentence += f" (best of {effects['looks']} judged checkpoints, interval widened for it)"
    fewest = fewest_prompts(effects["corrected_confidence"])
    if prompts < fewest:
        return f"{sentence}; held-out prompts: {prompts}, too few to be certain of anything, give at least {fewest}"
    seen = effects["minimal_detectable"]["alpha"]
    if seen is None:
        return f"{sentence}; all {prompts} prompts agree"
    return (
        f"{sentence}; with {prompts} prompts a difference of {seen:.3f} can be seen (80 % power): "
        f"{effects['prompts_for_half']} prompts would see {seen / 2:.3f}"
    )


def rough_detectable(
    accept_probs: Sequence[np.ndarray], prompt_keys: Sequence[Hashable], confidence: float = 0.95
) -> float | None:
    """A gain in alpha that this much held-out text would surely see (80 % power), when only one draft is there yet.

    Two drafts on the same text differ less than two that share nothing, whose difference has sqrt(2) the standard error
    of one: an upper bound of `minimal_detectable`. None for a single prompt or without any spread.
    """
    tokens_P = sum_by_prompt(prompt_keys, np.array([len(probs) for probs in accept_probs]))
    accepted_P = sum_by_prompt(prompt_keys, np.array([probs.sum() for probs in accept_probs]))
    error = _standard_error(accepted_P - tokens_P * accepted_P.sum() / tokens_P.sum(), tokens_P)
    return _detectable(2.0**0.5 * error, confidence)


def speed_interval(ratios: Sequence[float], confidence: float = 0.95, seed: int = 0) -> tuple[float, list[float]]:
    """Median of measured speed ratios, one per prompt, and its percentile bootstrap interval over prompts.

    Percentile, because the jackknife inside BCa fails for a median. One ratio is its own interval.
    """
    ratios_P = np.asarray(ratios, dtype=np.float64)
    rng = np.random.default_rng(seed)
    medians_R = np.median(rng.choice(ratios_P, (RESAMPLES, len(ratios_P))), axis=-1)
    low, high = np.quantile(medians_R, (0.5 - confidence / 2.0, 0.5 + confidence / 2.0))
    return float(np.median(ratios_P)), [float(low), float(high)]
