"""The names of the acceptance rules. Does not import torch, so that a config loads fast."""

from typing import Literal, get_args

Rule = Literal["sample", "sample-untruncated", "greedy-draft", "greedy", "block"]
UNTRUNCATED: Rule = "sample-untruncated"
RULES: tuple[str, ...] = get_args(Rule)


def draft_draws(rule: str) -> bool:
    """Whether the draft samples its tokens; under the other rules it takes its argmax."""
    return rule in ("sample", UNTRUNCATED, "block")


def rules_of_text(rule: str, probabilities: bool = True, truncated: bool = True) -> tuple[Rule, ...]:
    """The rules under which text of the target can be replayed: greedy text under `greedy` only. probabilities: whether those of its
    tokens are known; a sampled draft needs them. truncated: whether the target's settings exclude tokens; if not, `sample-untruncated` is
    `sample`.
    """
    if rule == "greedy" or not probabilities:
        return ("greedy",) if rule == "greedy" else ("greedy-draft",)
    return ("sample", UNTRUNCATED, "greedy-draft", "block") if truncated else ("sample", "greedy-draft", "block")
