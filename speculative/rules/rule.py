"""The names of the acceptance rules. Free of torch, so that a config is read at once."""

from typing import Literal, get_args

Rule = Literal["sample", "greedy-draft", "greedy", "block"]
RULES: tuple[str, ...] = get_args(Rule)


def draft_draws(rule: str) -> bool:
    """Whether the draft draws its tokens; under the other rules it takes its argmax."""
    return rule in ("sample", "block")


def rules_of_text(rule: str, probabilities: bool = True) -> tuple[Rule, ...]:
    """The rules that text which the target wrote under a rule can be replayed under: greedy text under `greedy` alone.

    probabilities: those of its tokens under the target's settings are known; without them a drawn draft cannot be judged.
    """
    sampled: tuple[Rule, ...] = ("sample", "greedy-draft", "block") if probabilities else ("greedy-draft",)
    return ("greedy",) if rule == "greedy" else sampled
