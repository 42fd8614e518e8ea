"""The gain of one draft over another on the same held-out responses, paired by prompt, and the smallest gain that could be detected.

Shapes: N responses, P prompts (the resampling unit).
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field
from scipy import special

from speculative.measure.intervals import Interval, interval, intervals_of_sums, sum_by_prompt
from speculative.measure.record import Record
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import TokenScores
from speculative.rules.rule import Rule

CONFIDENCE = 0.95  # of all looks together
POWER = 0.8
NO_SPREAD = 1e-12  # Rounding, not a spread.
Certain = Literal["gain", "loss", "none"]


class Gain(Record):
    """A difference and its interval."""

    gain: float = Field(description="the difference")
    ci: Interval = Field(description="its interval")

    def __format__(self, form: str) -> str:
        """`+0.012 [+0.001, +0.023]` for `+.3f`."""
        return f"{self.gain:{form}} {interval(self.ci, form)}"


class Detectable(Record):
    """The smallest true differences that would be detected; null if prompts are too few or show no spread."""

    alpha: float | None = Field(None, description="difference in alpha, with 80 % power")
    tau: float | None = Field(None, description="difference in tau, with 80 % power")


class CallEffects(Record):
    """What one way of drafting gains over another on the same held-out responses, in target calls."""

    tau: Gain = Field(description="gain in tau, by replay")
    speed_up: Gain | None = Field(None, description="gain in predicted speed-up; null: not timed")
    confidence: float = Field(description="joint confidence of all looks")
    looks: int = Field(description="judged drafts of which this one is the best")
    corrected_confidence: float = Field(description="confidence of each interval (Bonferroni over the looks)")
    method: str = Field(description="how the intervals were made")
    prompts: int = Field(description="prompts in the comparison")
    tokens: int = Field(description="their tokens")
    fewest_prompts: int = Field(0, description="least number of prompts; with fewer, nothing is certain")
    minimal_detectable: Detectable = Field(description="smallest differences that can be detected")
    prompts_for_half: int = Field(description="prompts needed to detect half of that")
    certain_tau: Certain = Field("none", description="whether the interval of tau excludes 0, on enough prompts")


class Effects(CallEffects):
    """What one draft gains over another on the same held-out responses, paired by prompt."""

    alpha: Gain = Field(description="gain in alpha")
    certain: Certain = Field(description="whether the interval of alpha excludes 0, on enough prompts")


def paired_effects(
    ours: Sequence[TokenScores],
    baseline: Sequence[TokenScores],
    prompt_keys: Sequence[Hashable],
    *,
    rule: Rule,
    gamma: int,
    looks: int = 1,
) -> Effects:
    """What `ours` gains over `baseline` on the same text: in alpha, and in tau at `gamma`. looks: judged checkpoints of which `ours` is
    the best, for `confidence_of`. Raises ValueError for drafts that were not scored on the same text.
    """
    if [len(text) for text in ours] != [len(text) for text in baseline]:
        raise ValueError("paired effects need the same text under both drafts")
    sides = [
        (np.array([text.accept_probs(rule).sum() for text in side]), expected_blocks_of(side, rule, (gamma,))[:, 0])
        for side in (ours, baseline)
    ]
    tokens_N = np.array([len(text) for text in ours])
    return effects_of_sums(prompt_keys, tokens_N, *sides, looks=looks)


def effects_of_sums(
    prompt_keys: Sequence[Hashable],
    tokens_N: np.ndarray,
    ours: tuple[np.ndarray, np.ndarray],
    baseline: tuple[np.ndarray, np.ndarray],
    *,
    looks: int = 1,
) -> Effects:
    """`paired_effects` from sums of the scores: tokens per response, and by draft (sum of acceptance probabilities,
    expected blocks), each (N,).
    """
    columns = (tokens_N, ours[0], baseline[0], ours[1], baseline[1])
    return Effects(**_effects(prompt_keys, columns, _gains, ("alpha", "tau"), looks))


def effects_of_calls(
    prompt_keys: Sequence[Hashable],
    tokens_N: np.ndarray,
    ours: tuple[np.ndarray, np.ndarray | None],
    baseline: tuple[np.ndarray, np.ndarray | None],
    *,
    looks: int = 1,
) -> CallEffects:
    """`effects_of_sums` if one of the two has no acceptance per token (prompt lookup, alone or before a draft): gains
    in tau and speed-up. ours,
    baseline: per response the target calls (N,) and the target steps including drafting (N,), None if nothing was timed.
    """
    timed = ours[1] is not None and baseline[1] is not None
    columns = (tokens_N, ours[0], baseline[0], *((ours[1], baseline[1]) if timed else ()))
    return CallEffects(**_effects(prompt_keys, columns, _call_gains, ("tau",), looks))


def _call_gains(sums_C: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = sums_C[..., :1] / sums_C[..., 1:]
    return rates[..., ::2] - rates[..., 1::2]


def _effects(
    prompt_keys: Sequence[Hashable],
    columns: Sequence[np.ndarray | None],
    gains_of: Callable[[np.ndarray], np.ndarray],
    names: tuple[str, ...],
    looks: int,
) -> dict[str, Any]:
    """The gains by name, last the one in speed-up if there is one, each with its interval, and the data they use. columns: tokens first;
    then, for two names, accepted and blocks of both, else calls of both.
    """
    corrected = confidence_of(looks)
    sums_PC = np.stack([sum_by_prompt(prompt_keys, np.asarray(values_N)) for values_N in columns], 1)
    sums_PC = sums_PC[sums_PC[:, 0] > 0]
    if not len(sums_PC):
        raise ValueError("no response has a token to compare on")
    gains, intervals = gains_of(sums_PC.sum(0)).tolist(), intervals_of_sums(sums_PC, gains_of, corrected)
    differences = [Gain(gain=gain, ci=ci) for gain, ci in zip(gains, intervals, strict=True)]
    fewest = fewest_prompts(corrected)
    enough = len(sums_PC) >= fewest
    errors = standard_errors(sums_PC) if len(names) > 1 else (_tau_error(*sums_PC.T[:3]),)
    certain = [certain_of(one.ci, len(sums_PC), corrected) for one in differences]
    seen = {name: _detectable(error, corrected) if enough else None for name, error in zip(names, errors, strict=True)}
    return {
        **dict(zip(names, differences, strict=False)),
        "speed_up": differences[len(names)] if len(differences) > len(names) else None,
        "confidence": CONFIDENCE,
        "looks": looks,
        "corrected_confidence": corrected,
        "method": "paired bootstrap over prompts (BCa)" + (f", Bonferroni over {looks} looks" if looks > 1 else ""),
        "prompts": len(sums_PC),
        "tokens": int(sums_PC[:, 0].sum()),
        "fewest_prompts": fewest,
        "minimal_detectable": Detectable(alpha=seen.get("alpha"), tau=seen["tau"]),
        "prompts_for_half": 4 * len(sums_PC),
        **dict(zip(("certain", "certain_tau")[-len(names) :], certain, strict=False)),
    }


def confidence_of(looks: int) -> float:
    """Confidence of each of `looks` intervals so that all hold jointly with 95 % (Bonferroni). Raises ValueError for 0."""
    if looks < 1:
        raise ValueError(f"looks = {looks}: at least 1")
    return 1.0 - (1.0 - CONFIDENCE) / looks


def certain_of(interval: Interval | None, prompts: int, confidence: float) -> Certain:
    """Whether the interval of a difference excludes 0, on enough prompts for such a confidence (`fewest_prompts`)."""
    if interval is None or prompts < fewest_prompts(confidence):
        return "none"
    return "gain" if interval[0] > 0 else "loss" if interval[1] < 0 else "none"


def fewest_prompts(confidence: float) -> int:
    """Fewest prompts for a certain result: n differences have the same sign by chance with probability 2^(1 - n), and a bootstrap never
    reaches 0 if all agree.
    """
    return 1 + int(np.ceil(np.log2(1.0 / (1.0 - confidence)) - 1e-9))


def too_few(prompts: int, confidence: float = 0.95) -> str | None:
    """A warning if there are fewer than `fewest_prompts`, else None."""
    fewest = fewest_prompts(confidence)
    if prompts >= fewest:
        return None
    are = "prompt is" if prompts == 1 else "prompts are"
    return f"{prompts} {are} too few to be certain; give at least {fewest}"


def _detectable(error: float, confidence: float) -> float | None:
    """The true difference that an interval of this standard error excludes 0 for in 80 of 100 cases."""
    factor = float(special.ndtri(0.5 + confidence / 2.0) + special.ndtri(POWER))
    return factor * error if error > NO_SPREAD else None


def _gains(sums_C: np.ndarray) -> np.ndarray:
    """(alpha gain, tau gain) of sums (tokens, accepted by ours, by the baseline, blocks of ours, of the baseline)."""
    tokens, accepted, accepted_base, blocks, blocks_base = np.moveaxis(sums_C, -1, 0)
    return np.stack(((accepted - accepted_base) / tokens, tokens / blocks - tokens / blocks_base), -1)


def _standard_error(residuals_P: np.ndarray, denominators_P: np.ndarray) -> float:
    """Standard error of a ratio of sums, from its residuals numerator - ratio * denominator: the delta method."""
    if len(residuals_P) < 2:
        return 0.0
    return float(np.std(residuals_P, ddof=1) / denominators_P.mean() / np.sqrt(len(residuals_P)))


def standard_errors(sums_PC: np.ndarray) -> tuple[float, float]:
    """Standard errors of the two gains, by linearising each ratio in its sums."""
    tokens_P, accepted_P, accepted_base_P, blocks_P, blocks_base_P = sums_PC.T
    tokens = tokens_P.sum()
    gain_P = accepted_P - accepted_base_P
    alpha_P = gain_P - tokens_P * gain_P.sum() / tokens
    return _standard_error(alpha_P, tokens_P), _tau_error(tokens_P, blocks_P, blocks_base_P)


def _tau_error(tokens_P: np.ndarray, blocks_P: np.ndarray, blocks_base_P: np.ndarray) -> float:
    tau_P = sum(
        sign * (tokens_P - own_P * tokens_P.sum() / own_P.sum()) / own_P.mean()
        for sign, own_P in ((1.0, blocks_P), (-1.0, blocks_base_P))
    )
    return _standard_error(np.asarray(tau_P), np.ones(len(tokens_P)))


def words(effects: Effects) -> str:
    """One sentence: the gain in alpha with its interval, and the difference that this number of prompts can detect."""
    prompts, sentence = effects.prompts, f"alpha {effects.alpha:+.3f}"
    if effects.looks > 1:
        sentence += f" (best of {effects.looks} judged drafts, interval widened for it)"
    few = too_few(prompts, effects.corrected_confidence)
    if few is not None:
        return f"{sentence}; {few}"
    seen = effects.minimal_detectable.alpha
    if seen is None:
        return f"{sentence}; all {prompts} prompts agree"
    return (
        f"{sentence}; {prompts} prompts can detect a difference of {seen:.3f} (80 % power), "
        f"{effects.prompts_for_half} prompts one of {seen / 2:.3f}"
    )


def rough_detectable(accept_probs: Sequence[np.ndarray], prompt_keys: Sequence[Hashable]) -> float | None:
    """The gain in alpha that this text can detect with 80 % power, from one draft: an upper bound of `minimal_detectable`, because the
    difference of two independent drafts has sqrt(2) times the standard error of one. None without spread or with fewer than
    `fewest_prompts` prompts.
    """
    tokens_P = sum_by_prompt(prompt_keys, np.array([len(probs) for probs in accept_probs]))
    accepted_P = sum_by_prompt(prompt_keys, np.array([probs.sum() for probs in accept_probs]))
    error = _standard_error(accepted_P - tokens_P * accepted_P.sum() / tokens_P.sum(), tokens_P)
    return _detectable(2.0**0.5 * error, CONFIDENCE) if len(tokens_P) >= fewest_prompts(CONFIDENCE) else None
