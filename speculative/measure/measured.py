"""How well a way of decoding does on some text: `Way`, what can be raced, and `Measured`, one row of what was found.

Shapes: N responses.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import PlainSerializer

from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import Drafter
from speculative.measure.intervals import Interval
from speculative.rules.tree import TokenTree

How = Literal["live", "replay", "timed", "predicted", "served"]

# Names of ways, on screen and in files.
TARGET = "target alone"
UNDISTILLED, SERVED, DRAFT = "undistilled draft", "served draft", "draft"
BY_TOKEN, BY_BLOCK = "draft, token by token", "draft, one pass a block"
LOOKUP, PAST, TOGETHER = "prompt lookup", "past responses", "lookup + draft"
TREE, EARLY_EXIT, LOOKAHEAD = "token tree", "early exit", "lookahead"
# The held-out text as a whole; else a row is of a domain or of another target.
HELD_OUT = "held-out"


@dataclass(frozen=True, eq=False)
class Way:
    """A way to decode, at the gamma that is best for it.

    drafter: makes a fresh one; None: the target alone. gamma: tokens it proposes a block, 0: none. blocks_N: target calls that
    replay expects for each held-out response; None where replay has no law (token trees, early exit, lookahead): those are
    counted live. fitted_N: the same cross-fitted, where gamma and sizes were chosen on few of these very prompts: what each
    response takes at the setting that is best on the other half, in blocks at this gamma; speeds are made of it. ngrams: (longest,
    shortest) that it looks up. then_gamma, behind: of the draft behind a lookup, and which way that is. found: share of the blocks
    whose proposal took no model; None where a model always proposes. tuned_on: the text that gamma and sizes were chosen on.
    """

    name: str
    drafter: Callable[[], Drafter] | None = None
    gamma: int = 0
    blocks_N: np.ndarray | None = None
    fitted_N: np.ndarray | None = None
    ngrams: tuple[int, int] | None = None
    then_gamma: int | None = None
    behind: str | None = None
    found: float | None = None
    tuned_on: str = "the judged prompts, by replay"
    tree: TokenTree | None = None

    @property
    def calls_N(self) -> np.ndarray | None:
        """The target calls (N,) that its speed is made of."""
        return self.blocks_N if self.fitted_N is None else self.fitted_N

    def settings(self, base: DecodeSettings) -> DecodeSettings:
        """How it decodes: gamma and tree are its own, all else is as served."""
        return replace(base, gamma=self.gamma, tree=self.tree)


@dataclass(frozen=True)
class Measured:
    """One way of decoding on one text at one concurrency. Null: not known. Intervals are 95 %, of a draft that was picked among
    checkpoints widened for that.
    """

    way: Annotated[str, "its name: `target alone`, `draft`, `prompt lookup`, `lookup + draft`, ..."]
    rule: Annotated[str, "engine rule"]
    concurrency: Annotated[int, "requests decoded at once"] = 1
    text: Annotated[str, "`held-out`, a domain of it, or another target whose text it is"] = HELD_OUT
    prompts: Annotated[int | None, "prompts of the text"] = None
    tokens: Annotated[int | None, "tokens of their responses"] = None
    gamma: Annotated[int | None, "tokens proposed per block; 0: none"] = None
    alpha: Annotated[float | None, "acceptance rate; null where no model drafts"] = None
    alpha_ci: Annotated[Interval | None, "its interval"] = None
    tau: Annotated[float | None, "tokens per target call at this gamma"] = None
    tau_ci: Annotated[Interval | None, "its interval"] = None
    accepted_per_drafted: Annotated[float | None, "accepted over drafted tokens at this gamma"] = None
    tokens_per_second: Annotated[
        float | None, "of all requests together; of a served row of one request, with the others under way"
    ] = None
    speed_up: Annotated[float | None, "tokens/s over those of the target alone at the same concurrency, pooled"] = None
    speed_up_ci: Annotated[Interval | None, "its interval; null: too few prompts to be certain"] = None
    how: Annotated[dict[str, How], "how each figure was obtained: `live`, `replay`, `timed`, `predicted`, `served`"] = (
        field(default_factory=dict)
    )
    ngrams: Annotated[tuple[int, int] | None, "longest and shortest n-gram that is looked up"] = None
    then_gamma: Annotated[int | None, "gamma of the draft behind a lookup"] = None
    behind: Annotated[str | None, "the draft there: a way's name"] = None
    tuned_on: Annotated[str | None, "text that gamma and sizes were chosen on"] = None

    @property
    def certain(self) -> bool:
        """Whether it is certainly faster than the target alone."""
        return self.speed_up_ci is not None and self.speed_up_ci[0] > 1.0

    @property
    def sizes(self) -> str:
        """What a lookup looks for and the draft behind it, in words; empty where nothing is looked up."""
        if self.ngrams is None:
            return ""
        longest, shortest = self.ngrams
        lengths = f"{longest}" if longest == shortest else f"{shortest} to {longest}"
        return f"n-grams of {lengths}" + (f", then a draft of {self.then_gamma}" if self.then_gamma else "")

    def record(self) -> dict[str, Any]:
        """What is known, as plain values."""
        known = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in known.items() if value is not None}


# As a part of a record: what is not known is not written.
Row = Annotated[Measured, PlainSerializer(Measured.record)]


def row_of(rows: list[Measured], way: str, concurrency: int = 1, text: str = HELD_OUT) -> Measured | None:
    """The row of a way, the timed one first; None where there is none."""
    found = [one for one in rows if (one.way, one.concurrency, one.text) == (way, concurrency, text)]
    return next((one for one in found if one.speed_up is not None), found[0] if found else None)
