"""`Way`, a way of decoding that can be timed, and `Measured`, one row of results of a way on a text.

Shapes: N responses.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import PlainSerializer

from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import Drafter
from speculative.drafters.registry import recipes
from speculative.measure.intervals import Interval, interval
from speculative.rules.rule import Rule
from speculative.rules.tree import TokenTree

Waits = dict[str, float]  # milliseconds by name
How = Literal["live", "replay", "timed", "predicted", "predicted (engine)", "served"]

# Names of ways, on screen and in files.
TARGET = "target alone"
UNDISTILLED, SERVED, DRAFT = "undistilled draft", "served draft", "draft"
BY_TOKEN, BY_BLOCK = "draft, token by token", "parallel"
LOOKUP, PAST, LOOKUP_DRAFT = "prompt-lookup", "past-responses", "lookup+draft"
# The `text` of a row about all held-out text; other rows are about a domain or another target.
HELD_OUT, TRAINING = "held-out", "training"


@dataclass(frozen=True, eq=False)
class Predicted:
    """What replay expects of a way. blocks_N: target calls (N,) for each held-out response. fitted_N: the same, cross-fitted where
    gamma and sizes were chosen on few of the same prompts: at the setting that is best on the other half.
    """

    blocks_N: np.ndarray
    fitted_N: np.ndarray | None = None

    @property
    def calls_N(self) -> np.ndarray:
        """Target calls (N,) that the speed is computed from."""
        return self.blocks_N if self.fitted_N is None else self.fitted_N


@dataclass(frozen=True)
class LossyPrice:
    """What a lossy way costs: total variation from the target's distribution, and the share of responses that differ at temperature 0."""

    total_variation: float
    total_variation_ci: Interval
    differing: float


@dataclass(frozen=True, eq=False)
class Way:
    """A way to decode, at its own best gamma.

    drafter: makes a new drafter; None: the target alone. gamma: tokens proposed per block, 0: none. ngrams: (longest, shortest) n-gram
    looked up. then_gamma, then_way: gamma and way of the draft used after a lookup finds nothing. tuned_on: the text that gamma and sizes
    were chosen on. rule: of a lossy way, its own. predicted: None where replay cannot predict (token trees, early exit, lookahead, lossy
    ways): blocks are counted live.
    """

    name: str
    drafter: Callable[[], Drafter] | None = None
    gamma: int = 0
    predicted: Predicted | None = None
    ngrams: tuple[int, int] | None = None
    then_gamma: int | None = None
    then_way: str | None = None
    tuned_on: str = "the judged prompts, by replay"
    tree: TokenTree | None = None
    rule: Rule | None = None
    price: LossyPrice | None = None

    @property
    def lossless(self) -> bool:
        return self.rule is None or self.rule.lossless

    def settings(self, base: DecodeSettings) -> DecodeSettings:
        """Decode settings of this way: its own gamma, tree and rule, everything else as in `base`."""
        return replace(base, gamma=self.gamma, tree=self.tree, rule=self.rule or base.rule)


@dataclass(frozen=True)
class Measured:
    """One way of decoding on one text at one concurrency. Null: not known. Intervals are 95 %, wider for a draft that was picked
    among checkpoints, and a speed-up's lower end for the choice among the ways at this load.
    """

    way: Annotated[str, "`target alone`, `draft`, `prompt-lookup`, `lookup+draft`, ..."]
    rule: Annotated[str, "engine rule"]
    concurrency: Annotated[int, "requests decoded at once"] = 1
    text: Annotated[
        str, "`held-out`, one of its domains, `training` (responses that it learned), or another target"
    ] = HELD_OUT
    prompts: Annotated[int | None, "prompts of the text"] = None
    tokens: Annotated[int | None, "tokens of their responses"] = None
    gamma: Annotated[int | None, "tokens proposed per block; 0: none"] = None
    alpha: Annotated[float | None, "acceptance rate; null where no model drafts"] = None
    alpha_ci: Annotated[Interval | None, "its interval"] = None
    tau: Annotated[float | None, "tokens per target call at this gamma"] = None
    tau_ci: Annotated[Interval | None, "its interval"] = None
    accepted_per_drafted: Annotated[float | None, "accepted over drafted tokens at this gamma"] = None
    tokens_per_second: Annotated[float | None, "of all requests; in a served row, of one among the others"] = None
    speed_up: Annotated[float | None, "tokens/s over the target alone's at the same load, pooled over prompts"] = None
    speed_up_ci: Annotated[Interval | None, "its interval; null: too few prompts to be certain"] = None
    first_token_ms: Annotated[Waits | None, "p50, p90, p99: arrival to first token, with prefill and queue"] = None
    per_token_ms: Annotated[Waits | None, "the same of (last token - first token) / (tokens - 1)"] = None
    stages_ms: Annotated[Waits | None, "mean per block: prefill, draft, verify, accept, host; or one, `block`"] = None
    how: Annotated[dict[str, How], "how each figure was obtained"] = field(default_factory=dict)
    ngrams: Annotated[tuple[int, int] | None, "longest and shortest n-gram that is looked up"] = None
    then_gamma: Annotated[int | None, "gamma of the draft used when the lookup finds nothing"] = None
    then_way: Annotated[str | None, "the way of that draft"] = None
    tuned_on: Annotated[str | None, "text that gamma and n-gram sizes were chosen on"] = None
    total_variation: Annotated[float | None, "LOSSY: from the target's distribution, at a drafted token, by replay"] = (
        None
    )
    total_variation_ci: Annotated[Interval | None, "its interval"] = None
    differing: Annotated[float | None, "LOSSY: share of responses that differ at temperature 0"] = None

    @property
    def certain(self) -> bool:
        """Whether it is certainly faster than the target alone."""
        return self.speed_up_ci is not None and self.speed_up_ci[0] > 1.0

    @property
    def sizes(self) -> str:
        """N-gram sizes of a lookup and gamma of the draft after it, what a lossy way costs, or that no engine runs it; else empty."""
        if (recipe := recipes().get(self.way)) is not None and not recipe.served:
            return "no engine runs it"
        if self.ngrams is None:
            if self.total_variation is None or self.total_variation_ci is None or self.differing is None:
                return ""
            distance = f"{self.total_variation:.3f} {interval(self.total_variation_ci, '.3f')}"
            return f"total variation {distance}, {100 * self.differing:.0f} % of responses differ at temperature 0"
        longest, shortest = self.ngrams
        lengths = f"{longest}" if longest == shortest else f"{shortest} to {longest}"
        return f"n-grams of {lengths}" + (f", then {self.then_gamma} by the draft" if self.then_gamma else "")

    def record(self) -> dict[str, Any]:
        """The known fields as plain values."""
        known = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in known.items() if value is not None}


# In a record, fields that are not known are not written.
Row = Annotated[Measured, PlainSerializer(Measured.record)]


def largest_load(rows: Iterable[Measured], way: str, limits_ms: Mapping[str, float]) -> int | None:
    """The largest concurrency at which the p90 of a way's waits is within all limits (`first_token`, `per_token`); None: there is none."""
    clocked = [one for one in rows if one.way == way and one.first_token_ms]
    waits = {
        one.concurrency: [(getattr(one, f"{name}_ms"), most) for name, most in limits_ms.items()] for one in clocked
    }
    return max(
        (load for load, of in waits.items() if all(own and own["p90"] <= most for own, most in of)), default=None
    )


def row_of(rows: list[Measured], way: str, concurrency: int = 1, text: str = HELD_OUT) -> Measured | None:
    """The row of a way, the timed one first; None where there is none."""
    found = [one for one in rows if (one.way, one.concurrency, one.text) == (way, concurrency, text)]
    return next((one for one in found if one.speed_up is not None), found[0] if found else None)
