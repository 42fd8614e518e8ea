"""The acceptance rules as values. Does not import torch, so that a config loads fast; tensors meet a rule in `verify.py`.

A rule may keep more drafted tokens than is lossless (lenience, 2211.17192 appendix A.5, 2310.08461 section 4): a drafted token is tested
against lenience * target, so the mass kept = min(draft, lenience * target) comes from the draft, and a rejection draws from
norm(max(target - kept, 0)). No other draw after a rejection gives a smaller distance: TV(text, target) = sum max(kept - target, 0) a token.
At temperature 0 a drafted token is kept if lenience * its probability at temperature 1 is above the largest one.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

from speculative.errors import UserError

RuleName = Literal["sample", "sample-untruncated", "greedy-draft", "greedy", "block"]
RULES: tuple[str, ...] = get_args(RuleName)
Array = TypeVar("Array", bound=Any)  # of numpy or torch


@dataclass(frozen=True)
class Rule:
    """How an engine drafts and accepts. `Rule.named` makes one from its name in configs and records.

    draws: the draft samples; otherwise it takes its argmax. truncated: the draft's distribution is cut as the target's. joint: a block is
    judged as a whole. greedy: the target takes its argmax too. lenience: 1 is lossless.
    """

    name: str
    draws: bool = True
    truncated: bool = True
    joint: bool = False
    greedy: bool = False
    lenience: float = 1.0

    @classmethod
    def named(cls, name: str) -> "Rule":
        """Raises UserError for a name that is no rule."""
        if name not in _RULES:
            raise UserError(f"rule = {name!r}: must be one of {', '.join(RULES)}")
        return _RULES[name]

    @classmethod
    def usual(cls, temperature: float) -> "Rule":
        """The rule of most decoders: `greedy` at temperature 0, else `sample`."""
        return _RULES["sample" if temperature else "greedy"]

    def __str__(self) -> str:
        return self.name

    def at(self, temperature: float) -> "Rule":
        """The rule that decoding follows: at temperature 0 both models take their argmax under any rule."""
        return self if temperature else replace(_RULES["greedy"], lenience=self.lenience)

    def lenient(self, lenience: float) -> "Rule":
        """This rule with a lenience; a rule that judges whole blocks becomes token-wise. Raises UserError below 1."""
        if not 1.0 <= lenience < math.inf:
            raise UserError(f"lenience = {lenience}: must be at least 1")
        return replace(_RULES["sample"] if self.joint else self, lenience=lenience)

    @property
    def lossless(self) -> bool:
        return self.lenience == 1.0

    def accept_log_prob(self, target: Array, draft: Array) -> Array:
        """Log of min(lenience, draft / target), from the log probabilities of tokens of the target's text under both
        models: the probability
        that each is a drafted token that was kept (2211.17192 Corollary 3.6, by maximal coupling); with lenience a
        weight, which may exceed 1.
        """
        return (draft - target).clip(max=math.log(self.lenience))

    def replayable(self, probabilities: bool = True, truncates: bool = True) -> "tuple[Rule, ...]":
        """The rules under which text of this rule can be replayed, greedy text under `greedy` only. probabilities: those of its tokens are
        known, which a sampled draft needs. truncates: the target's settings exclude tokens; if not, `sample-untruncated` is `sample`.
        """
        if self.greedy:
            return (_RULES["greedy"],)
        rules = (rule for rule in _RULES.values() if not rule.greedy and (truncates or rule.truncated))
        return tuple(rule for rule in rules if probabilities or not rule.draws)


_RULES = {
    "sample": Rule("sample"),
    "sample-untruncated": Rule("sample-untruncated", truncated=False),
    "greedy-draft": Rule("greedy-draft", draws=False),
    "greedy": Rule("greedy", draws=False, greedy=True),
    "block": Rule("block", joint=True),
}
