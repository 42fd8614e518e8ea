"""The gain of one draft over another on the same held-out responses, paired by prompt, and the smallest gain that could be detected.

Shapes: N responses, P prompts (the resampling unit).
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field
from scipy import special

from speculative.measure.intervals import Interval, interval, intervals_of_sums, sum_by_prompt
from speculative.measure.record import Record
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import TokenScores, accepted_sums
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
    sides, tokens_N = (ours, baseline), np.array([len(text) for text in ours])
    blocks = [expected_blocks_of(side, rule, (gamma,))[:, 0] for side in sides]
    pairs = {"alpha": [accepted_sums(side, rule) for side in sides], "tau": blocks}
    return Effects(**paired_gains(prompt_keys, tokens_N, pairs, looks))


def paired_gains(
    prompt_keys: Sequence[Hashable], tokens_N: np.ndarray, pairs: Mapping[str, Sequence[np.ndarray]], looks: int = 1
) -> dict[str, Any]:
    """The fields of `CallEffects`, and with alpha of `Effects`. pairs: (N,) of ours and of the baseline, by the gain that they give: target
    calls of tau; accepted tokens of alpha, which prompt lookup lacks; target steps including drafting of speed_up, if they were timed.
    """
    corrected = confidence_of(looks)
    columns = (tokens_N, *(own_N for pair in pairs.values() for own_N in pair))
    sums_PC = np.stack([sum_by_prompt(prompt_keys, own_N) for own_N in columns], 1)
    sums_PC = sums_PC[sums_PC[:, 0] > 0]
    if not len(sums_PC):
        raise ValueError("no response has a token to compare on")
    per_token_C = [name == "alpha" for name in pairs for _ in range(2)]

    def gains_of(sums_C: np.ndarray) -> np.ndarray:
        tokens, sums = sums_C[..., :1], sums_C[..., 1:]
        with np.errstate(divide="ignore", invalid="ignore"):
            rates = np.where(per_token_C, sums / tokens, tokens / sums)
        return rates[..., ::2] - rates[..., 1::2]

    gains, intervals = gains_of(sums_PC.sum(0)).tolist(), intervals_of_sums(sums_PC, gains_of, corrected)
    by_name = {name: Gain(gain=gain, ci=ci) for name, gain, ci in zip(pairs, gains, intervals, strict=True)}
    certain = {name: certain_of(one.ci, len(sums_PC), corrected) for name, one in by_name.items()}
    fewest, (tokens_P, *sides_CP) = fewest_prompts(corrected), sums_PC.T
    seen = dict.fromkeys(("alpha", "tau"))
    if len(sums_PC) >= fewest:
        sides = dict(zip(pairs, zip(sides_CP[::2], sides_CP[1::2], strict=True), strict=True))
        errors = {"tau": _tau_error(tokens_P, *sides["tau"])}
        errors |= {"alpha": _alpha_error(tokens_P, *sides["alpha"])} if "alpha" in sides else {}
        seen |= {name: _detectable(error, corrected) for name, error in errors.items()}
    return {
        **by_name,
        "speed_up": by_name.get("speed_up"),
        "confidence": CONFIDENCE,
        "looks": looks,
        "corrected_confidence": corrected,
        "method": "paired bootstrap over prompts (BCa)" + (f", Bonferroni over {looks} looks" if looks > 1 else ""),
        "prompts": len(sums_PC),
        "tokens": int(tokens_P.sum()),
        "fewest_prompts": fewest,
        "minimal_detectable": Detectable(**seen),
        "prompts_for_half": 4 * len(sums_PC),
        "certain_tau": certain["tau"],
        **({"certain": certain["alpha"]} if "alpha" in certain else {}),
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


def _standard_error(residuals_P: np.ndarray, denominators_P: np.ndarray) -> float:
    """Standard error of a ratio of sums, from its residuals numerator - ratio * denominator: the delta method."""
    if len(residuals_P) < 2:
        return 0.0
    return float(np.std(residuals_P, ddof=1) / denominators_P.mean() / np.sqrt(len(residuals_P)))


def _alpha_error(tokens_P: np.ndarray, accepted_P: np.ndarray, accepted_base_P: np.ndarray) -> float:
    gain_P = accepted_P - accepted_base_P
    return _standard_error(gain_P - tokens_P * gain_P.sum() / tokens_P.sum(), tokens_P)


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
    error = _alpha_error(tokens_P, accepted_P, np.zeros(len(tokens_P)))
    return _detectable(2.0**0.5 * error, CONFIDENCE) if len(tokens_P) >= fewest_prompts(CONFIDENCE) else None
