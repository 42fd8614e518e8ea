"""The texts and settings that drafts are judged with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distill.config.sections import JudgeConfig
from distill.verdict.decoding import Decoding
from speculative.decoder.responses import DecodeSettings
from speculative.evaluate import HeldoutResponse
from speculative.measure.effects import confidence_of
from speculative.measure.token_scores import StoredText
from speculative.rules.rule import Rule

# Settings tuned on fewer judged prompts than this are judged on the other half of them. Without that, speed-ups are too high by 0.5 %
# at 64 prompts, 1.8 % at 16 and 3.6 % at 8.
CROSS_FIT_BELOW = 64


@dataclass(frozen=True)
class JudgingSetup:
    """settings: contain the rule and gamma to judge under. texts: held-out responses by rule, the run's own first. context:
    tokens of prompt and response that fit the pair. history: the target's responses to other prompts under that rule.
    looks: number of judged drafts of which the one in question is the best; its intervals are widened for them.
    decoding: decodes what is not timed.
    """

    judge: JudgeConfig
    settings: DecodeSettings
    texts: Mapping[Rule, list[HeldoutResponse]]
    context: int = 4096
    history: Sequence[StoredText] = ()
    looks: int = 1
    decoding: Decoding = field(default_factory=Decoding)

    @property
    def rule(self) -> Rule:
        """The engine rule that drafts are judged under."""
        return self.settings.rule

    @property
    def gamma(self) -> int:
        return self.settings.gamma

    @property
    def heldout(self) -> list[HeldoutResponse]:
        """The text of the run's own rule."""
        return self.texts[self.rule]

    @property
    def keys(self) -> list[Any]:
        """The prompt of each held-out response: the unit of every interval."""
        return [text.prompt for text in self.heldout]

    @property
    def tokens_N(self) -> np.ndarray:
        return np.array([len(text.response_ids) for text in self.heldout])

    @property
    def cross_fits(self) -> bool:
        """Whether settings are tuned on one half of the judged prompts and judged on the other half."""
        return 2 <= len(set(self.keys)) < CROSS_FIT_BELOW

    def confidence(self, picked: bool) -> float:
        """Confidence of one interval, so that those of all looks hold jointly at 95 %. picked: it is about the draft in question."""
        return confidence_of(self.looks if picked else 1)
