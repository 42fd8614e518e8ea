"""The names of the acceptance rules. Does not import torch, so that a config loads fast."""

from typing import Literal, get_args

Rule = Literal["sample", "greedy-draft", "greedy", "block"]
RULES: tuple[str, ...] = get_args(Rule)


def draft_draws(rule: str) -> bool:
    """Whether the draft samples its tokens; under the other rules it takes its argmax."""
    return rule in ("sample", "block")


def rules_of_text(rule: str, probabilities: bool = True) -> tuple[Rule, ...]:
    """The rules under which text of the target can be replayed: greedy text under `greedy` only. probabilities: whether those of its
    tokens are known; a sampled draft needs them.
    """
    sampled: tuple[Rule, ...] = ("sample", "greedy-draft", "block") if probabilities else ("greedy-draft",)
    return ("greedy",) if rule == "greedy" else sampled
