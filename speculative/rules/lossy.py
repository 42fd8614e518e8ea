"""Rules that keep more drafted tokens than is lossless, so that the text is not the target's, by a distance that is known.

A drafted token is tested against a bound instead of the target's probability: it is kept with min(1, bound / draft), so the mass
kept = min(draft, bound) comes from the draft. A rejection draws from norm(max(target - kept, 0)). With A = sum kept:

    emitted = kept + (1 - A) norm(max(target - kept, 0))        TV(emitted, target) = sum max(kept - target, 0)

No other draw after a rejection gives less: what is kept beyond the target is emitted already; elsewhere emitted <= target, as 1 - A <=
sum max(target - kept, 0). The token after a wholly kept block is the target's own.
Lenience (2310.08461 section 4, after 2211.17192 appendix A.5): bound = lenience * target. A rejection draws as in the lossless rule,
which is lenience 1, and the distance is the rise of the acceptance rate.
Typical acceptance (2401.10774 section 2.3): the draft takes its argmax, and bound = 1 if target > min(epsilon, sqrt(epsilon)
exp(-entropy)), else 0. A rejection draws from the whole row of the target.
Temperature 0: the bound is made from the probabilities at temperature 1, and a token is kept if it is above the largest of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from speculative.errors import UserError
from speculative.rules.rule import Rule


@dataclass(frozen=True)
class Lossy:
    """Lenience, or typical acceptance where epsilon is above 0. Raises UserError for a value outside its range."""

    lenience: float = 1.0
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if not (1.0 <= self.lenience < math.inf and 0.0 <= self.epsilon < 1.0):
            raise UserError(f"{self}: lenience must be at least 1, epsilon at least 0 and below 1")

    def __str__(self) -> str:
        return f"typical acceptance {self.epsilon:g}" if self.epsilon else f"lenience {self.lenience:g}"

    def rule(self, rule: Rule) -> Rule:
        """The rule to draft by in a run under this one."""
        return "greedy-draft" if self.epsilon else "sample" if rule == "block" else rule

    def bounds(self, probs_R: torch.Tensor, entropies: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Bounds of tokens, from their target probabilities and, with epsilon, the entropies (R) of the target's rows in nats."""
        if not self.epsilon:
            return self.lenience * probs_R
        least_R = (math.sqrt(self.epsilon) * (-entropies()).exp()).clamp_max(self.epsilon)
        return (probs_R > least_R).to(probs_R.dtype)

    def greedy_ids(self, logits_RV: torch.Tensor, own_R: torch.Tensor, drafted_R: torch.Tensor) -> torch.Tensor:
        """Temperature 0: the drafted ids where they are kept, else the target's own."""
        probs_RV = logits_RV.float().softmax(-1)
        probs_R = probs_RV.gather(-1, drafted_R.unsqueeze(-1)).squeeze(-1)
        bounds_R = self.bounds(probs_R, lambda: torch.special.entr(probs_RV).sum(-1))
        return torch.where(bounds_R > probs_RV.amax(-1), drafted_R, own_R)
