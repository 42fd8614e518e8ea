"""The losslessness check: is speculative text the target's own? Greedy text must be equal, and text sampled with the draft must follow the
target's probabilities by plain forwards (`text_fit`), which do not use our decoder. A decoder that is lossless fails the second about
once in `1 / LEVEL` uses.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Prompt, Response
from speculative.drafters.drafter import Drafter
from speculative.errors import UserError
from speculative.explain.text_fit import LEVEL, TextFit, text_fit
from speculative.measure.self_checks import NearTie, SelfCheckError, near_tie
from speculative.rules.sampling import SamplingSettings

CONTROL = 1.1  # factor on the temperature for the positive control


@dataclass(frozen=True)
class GreedyTexts:
    """Greedy text with the draft against the target's alone. Two texts may differ where the target's two best logits are equal up to
    the dtype's rounding (`self_checks.NEAR_TIE`); any other difference is in `differences`, one line each.
    """

    prompts: int
    tokens: int
    equal: int
    near_ties: list[NearTie]
    differences: list[str]


@dataclass(frozen=True)
class SampledTexts:
    """The test of sampled text. p: of `text_fit`. impossible: tokens outside the target's distribution. tested_at: the sampling settings,
    without top-k, top-p and min-p in half precision, where rounding moves tokens over their edge.
    """

    prompts: int
    samples: int
    tokens: int
    p: float
    impossible: int
    tested_at: dict[str, float | int]

    @property
    def failed(self) -> bool:
        return self.p < LEVEL


@dataclass(frozen=True)
class Lossless:
    """Both comparisons of a pair under a rule. sampled: None at temperature 0. control: of the target at `CONTROL`
    times its temperature.
    """

    rule: str
    gamma: int
    dtype: str
    greedy: GreedyTexts
    sampled: SampledTexts | None = None
    control: SampledTexts | None = None

    @property
    def failed(self) -> list[str]:
        """The failed comparisons, in words."""
        greedy = ["greedy texts"] if self.greedy.differences else []
        return greedy + (
            ["sampled texts and the target's probabilities"] if self.sampled and self.sampled.failed else []
        )

    @property
    def sentence(self) -> str:
        """The result in words, with the failed comparisons or with the sensitivity of the check."""
        greedy, sampled, control = self.greedy, self.sampled, self.control
        ties = f" ({len(greedy.near_ties)} more differ after a near-tie of the target)" if greedy.near_ties else ""
        same = f"greedy text is the target's own on {greedy.equal} of {greedy.prompts} prompts{ties}"
        if sampled is None:
            return f"{'NOT lossless' if self.failed else 'Lossless'}: {same}."
        texts = f"{sampled.prompts * sampled.samples} sampled responses ({sampled.tokens:,} tokens)"
        number = f"p = {sampled.p:.2g}"
        if self.failed:
            return f"NOT lossless: {', '.join(self.failed)} differ; {same}. {texts}: {number}."
        sentence = f"Lossless as far as this test detects: {same}; {texts} do not differ detectably from the target's own ({number})."
        if control is None:
            return sentence
        warmer = f"the target at {CONTROL} times its temperature (p = {control.p:.2g})"
        if control.failed:
            return f"{sentence} The same test detects {warmer}."
        return f"{sentence} So few samples do not detect {warmer} either: raise --samples or --prompts."

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        failed = self.failed
        return asdict(self) | {"level": LEVEL, "failed": failed, "passed": not failed, "sentence": self.sentence}


def greedy_equality(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    *,
    batch_size: int = 32,
) -> GreedyTexts:
    """Each prompt decoded greedily with the draft and without, at the gamma and lengths of these settings."""
    greedy = settings.at_temperature_0(settings.gamma)
    plain, _ = decode(target, None, prompts, replace(greedy, gamma=0), batch_size=batch_size)
    drafted, _ = decode(target, drafter, prompts, greedy, batch_size=batch_size)
    near_ties, differences = [], []
    for alone, other in zip(plain, drafted, strict=True):
        if alone.response_ids == other.response_ids:
            continue
        try:
            near_ties.append(near_tie(target, alone, other))
        except SelfCheckError as error:
            differences.append(str(error))
    equal = len(prompts) - len(near_ties) - len(differences)
    return GreedyTexts(len(prompts), sum(len(text.response_ids) for text in drafted), equal, near_ties, differences)


def sampled_texts(
    target: PreTrainedModel,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    samples: int,
    *,
    batch_size: int = 32,
) -> list[Response]:
    """`samples` responses of every prompt, prompt after prompt; without a drafter the target's alone."""
    keyed = [(f"{key}\x00{sample}", ids) for key, ids in prompts for sample in range(samples)]
    own = settings if drafter is not None else replace(settings, gamma=0)
    return decode(target, drafter, keyed, own, batch_size=batch_size)[0]


def losslessness(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    *,
    samples: int = 16,
    batch_size: int = 32,
    control: bool = True,
) -> Lossless:
    """Both comparisons of one pair under one rule; at temperature 0 only the greedy one. control: the same test of the target at `CONTROL`
    times the temperature, without a draft: whether as many samples would detect a fault of that size. It doubles the decoding.

    Raises UserError when gamma is 0, and for everything that `decode` refuses.
    """
    if settings.gamma < 1:
        raise UserError("gamma = 0: the losslessness check needs at least one drafted token per block")
    greedy = greedy_equality(target, drafter, prompts, settings, batch_size=batch_size)
    checked = Lossless(settings.rule.name, settings.gamma, str(target.dtype).removeprefix("torch."), greedy)
    if settings.sampling.greedy:
        return checked
    exact, sampling = target.dtype in (torch.float32, torch.float64), settings.sampling
    sampling = sampling if exact else SamplingSettings(sampling.temperature)

    def tested(number: int, proposer: Drafter | None, temperature: float) -> SampledTexts:
        drawn = replace(sampling, temperature=temperature)
        own = replace(settings, seed=settings.seed + number, sampling=drawn)
        texts = sampled_texts(target, proposer, prompts, own, samples, batch_size=batch_size)
        fit: TextFit = text_fit(target, texts, sampling)
        return SampledTexts(len(prompts), samples, fit.tokens, fit.p, fit.impossible, sampling.as_dict())

    warmer = tested(2, None, sampling.temperature * CONTROL) if control else None
    return replace(checked, sampled=tested(1, drafter, sampling.temperature), control=warmer)
