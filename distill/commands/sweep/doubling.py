"""What twice the prompts would give, from three runs of a sweep on a quarter, half and all of them.

alpha_1, alpha_2, alpha_3 gain d_1 and d_2. Gains are taken to shrink by one factor: the next is d_2 clip(d_2 / d_1, 0, 1), or d_2 after a
loss. The interval is a bootstrap over held-out prompts, paired: all three are judged on the same. What another seed gives is not in it.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.responses.rendered import StoredPrompts
from distill.commands.sweep.plan import Trial, finished
from distill.config.layout import BEST_LINK, JUDGEMENT, PROMPTS
from distill.run.prompts import HELDOUT_FILE, TRAIN_FILE
from speculative.evaluate import Judgement
from speculative.measure.intervals import interval, intervals_of_sums

TWICE = 1.9, 2.1  # Prompts that repeat or are too long are left out.


@dataclass(frozen=True)
class Fit:
    """A finished run: its number of training prompts, and the sums of its best checkpoint by held-out prompt: (N, accepted and tokens)."""

    prompts: int
    heldout: list[str]
    sums_N2: np.ndarray

    @classmethod
    def read(cls, run: Path) -> "Fit":
        """Raises UserError: a file of the run is missing or damaged."""
        sums = Judgement.read(run / BEST_LINK / JUDGEMENT).per_response
        sums_N2 = np.array([sums.accept_sums, sums.tokens] if sums else [[], []]).T
        keys = StoredPrompts(run / PROMPTS / HELDOUT_FILE).column("prompt_id").to_pylist()
        return cls(len(StoredPrompts(run / PROMPTS / TRAIN_FILE)), keys[: len(sums_N2)], sums_N2)

    @property
    def alpha(self) -> float:
        return float(self.sums_N2[:, 0].sum() / self.sums_N2[:, 1].sum())


def next_gain(alphas: np.ndarray) -> np.ndarray:
    """What the next doubling adds (...) to the last of alphas (..., 3)."""
    before, last = np.moveaxis(np.diff(alphas), -1, 0)
    ratio = np.divide(last, before, out=np.ones_like(last), where=before > 0.0)
    return np.maximum(last, 0.0) * np.clip(ratio, 0.0, 1.0)


def numbers_of(sums_C: np.ndarray) -> np.ndarray:
    """(alpha after the next doubling, its gain) from the sums of three fits side by side."""
    alphas = sums_C[..., ::2] / sums_C[..., 1::2]
    gain = next_gain(alphas)
    return np.stack([alphas[..., -1] + gain, gain], -1)


def forecast(fits: Sequence[Fit]) -> str:
    """A sentence for three fits, each on twice the prompts of the one before."""
    sums_PC = np.concatenate([fit.sums_N2 for fit in fits], 1)
    (alpha, gain), (alpha_ci, gain_ci) = numbers_of(sums_PC.sum(0)), intervals_of_sums(sums_PC, numbers_of)
    known = f"alpha {', '.join(f'{fit.alpha:.3f}' for fit in fits)} on {', '.join(f'{fit.prompts:,}' for fit in fits)} prompts"
    if not gain:
        return f"Twice the prompts would hardly help: {known}."
    return f"Twice the prompts would give alpha {alpha:.3f} {interval(alpha_ci)}, a gain of {gain:.3f} {interval(gain_ci)} (from {known})."


def forecasts(trials: Sequence[Trial]) -> Iterator[str]:
    """A sentence for each three finished runs on P, 2P and 4P prompts that differ in nothing else, and how it came out on 8P.

    Raises UserError: as `Fit.read`.
    """
    groups: dict[str, list[Trial]] = {}
    for trial in filter(finished, trials):
        tree = trial.config.model_dump(mode="json", exclude={"name": True, "data": {"train": {"__all__": {"limit"}}}})
        groups.setdefault(json.dumps(tree, sort_keys=True), []).append(trial)
    for members in (members for members in groups.values() if len(members) > 2):
        fits = sorted((Fit.read(trial.config.folder) for trial in members), key=lambda fit: fit.prompts)
        others = {key: value for key, value in members[0].values.items() if not key.startswith("data.train")}
        where = "".join(f"{key} {json.dumps(value)}: " for key, value in others.items())
        if any(fit.heldout != fits[0].heldout for fit in fits):
            remedy = "set data.heldout (a run's prompts/heldout.arrow will do)"
            yield f"{where}No forecast for more prompts: the runs held out different ones; {remedy}."
            continue
        doubled = [TWICE[0] <= b.prompts / a.prompts <= TWICE[1] for a, b in itertools.pairwise(fits)]
        for first in range(len(fits) - 2):
            if all(doubled[first : first + 2]):
                after = fits[first + 3 : first + 4] if all(doubled[first + 2 : first + 3]) else []
                outcome = "".join(f" {fit.prompts:,} gave {fit.alpha:.3f}." for fit in after)
                yield where + forecast(fits[first : first + 3]) + outcome
