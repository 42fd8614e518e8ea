"""Who is compared: drafts, token by token or `parallel+DRAFT`, and lookup alone or before one. What replay says of each.

Shapes: N responses, K gammas.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from speculative.drafters.draft import Drafting
from speculative.evaluate import HeldoutResponse
from speculative.measure.cost import StepCosts, given_costs
from speculative.measure.metrics import CURVE_GAMMAS
from speculative.measure.replay import Blocks, expected_blocks, texts_of
from speculative.measure.rival_replay import found_blocks, found_steps, kept_by_lookup, tuned_lookup
from speculative.measure.token_scores import TokenScores

LOOKUP = "lookup"
BEFORE, PARALLEL = f"{LOOKUP}+", "parallel+"
# Where nothing was timed the fewest target calls are best.
UNTIMED = given_costs(1.0, 0.0)


@dataclass(frozen=True)
class Entry:
    """A way on the table: what the frozen text and the clock say of it.

    scores: of its draft; None for lookup alone. kept: where lookup is in it, tokens of a lookup that are kept at each place of each
    response (`kept_by_lookup`), at these n-gram sizes (longest, shortest). costs: of lookup alone the target's side. shape: of its draft.
    """

    way: str
    path: str
    parameters: int
    scores: list[TokenScores] | None
    costs: StepCosts | None
    kept: list[np.ndarray] | None = None
    sizes: tuple[int, int] | None = None
    shape: Hashable = None

    def chosen(self, rows: Sequence[int]) -> "Entry":
        """The same on these responses only."""
        return replace(
            self,
            scores=None if self.scores is None else [self.scores[row] for row in rows],
            kept=None if self.kept is None else [self.kept[row] for row in rows],
        )

    @property
    def judged(self) -> list[TokenScores] | None:
        """The scores of a draft that proposes alone: of it alpha and survival are known."""
        return self.scores if self.kept is None else None

    @property
    def tokens_N(self) -> np.ndarray:
        """Of each response."""
        return np.array([len(one) for one in (self.scores if self.kept is None else self.kept) or []])

    def _blocks(self, rule: str, gammas: Sequence[int]) -> Blocks:
        """Expected blocks (N, K); `found_NK` those that lookup proposed."""
        drafted = None if self.scores is None else texts_of(self.scores, rule)
        if self.kept is None:
            return expected_blocks(drafted or [], gammas)
        return found_blocks(self.kept, gammas, drafted)

    def calls(self, rule: str, gammas: Sequence[int]) -> np.ndarray:
        """Expected target calls (N, K)."""
        return self._blocks(rule, gammas).calls_NK

    def steps(self, rule: str, gammas: Sequence[int]) -> np.ndarray | None:
        """Target steps (N, K) that the responses take; None where nothing was timed."""
        if self.costs is None:
            return None
        return found_steps(self._blocks(rule, gammas), gammas, self.costs, None if self.scores is None else gammas)


def draft_of(way: str) -> str | None:
    """The draft in a way's name, None for lookup alone. A folder of that name is `./lookup`."""
    return None if way == LOOKUP else way.removeprefix(BEFORE).removeprefix(PARALLEL)


def drafting_of(way: str) -> Drafting:
    """How its draft drafts: a block in one pass in `parallel+DRAFT` and `lookup+parallel+DRAFT`."""
    return "parallel" if way.removeprefix(BEFORE).startswith(PARALLEL) else "autoregressive"


def looks_up(way: str) -> bool:
    """Whether lookup is in it."""
    return way == LOOKUP or way.startswith(BEFORE)


def with_lookup(
    draft: Entry | None, texts: Sequence[HeldoutResponse], rule: str, gamma: int, costs: StepCosts | None
) -> Entry:
    """Lookup alone, or before a draft, at the n-gram sizes that replay of the text finds best at this gamma.

    costs: measured ones of the draft, or of any draft for lookup alone; None: untimed.
    """
    own = draft or Entry(LOOKUP, LOOKUP, 0, None, costs)
    drafted = None if own.scores is None else texts_of(own.scores, rule)
    sizes = tuned_lookup(texts, costs or UNTIMED, (gamma,), drafted).sizes
    return replace(
        own, costs=costs, kept=[kept_by_lookup(text, max(CURVE_GAMMAS), *sizes) for text in texts], sizes=sizes
    )
