"""Draft counts of a request or of a server. Counts that contradict themselves raise a `CountsError` with the field."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_MOST = 1 << 31  # tokens of one request


class CountsError(ValueError):
    """Counts that contradict themselves; the message contains the field."""


@dataclass(frozen=True)
class DraftCounts:
    """Draft counts of one request, of a server since its start, or between two looks at its counters. None, empty: not reported.

    accepted, drafted: tokens; engines also count tokens after the end of a response. blocks: target calls that verified a draft.

    Of a request: gamma, as configured. accepted_B, drafted_B: per block. histogram: [j] = blocks that accepted exactly j tokens.
    Of a server: accepted_G, by position. tokens: of all responses. started: start times of the counters; other values mean a restart.
    """

    engine: str
    accepted: int | None
    drafted: int | None
    blocks: int | None
    gamma: int | None = None
    accepted_B: tuple[int, ...] = ()
    drafted_B: tuple[int, ...] = ()
    histogram: tuple[int, ...] = ()
    accepted_G: tuple[int, ...] = ()
    tokens: int | None = None
    started: tuple[float, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        accepted, drafted, blocks = self.accepted, self.drafted, self.blocks
        if accepted is not None and drafted is not None and accepted > drafted:
            raise CountsError(f"{accepted:,} tokens accepted, but only {drafted:,} drafted")
        # Of SGLang's server, tokens of responses that it decoded without a draft are among the accepted ones.
        if blocks == 0 and (drafted or (accepted and self.tokens is None)):
            raise CountsError(f"{drafted or accepted} drafted tokens in 0 blocks")
        if len(self.accepted_B) != len(self.drafted_B):
            raise CountsError(f"accepted for {len(self.accepted_B)} blocks, but drafted for {len(self.drafted_B)}")
        if any(kept > tried for kept, tried in zip(self.accepted_B, self.drafted_B, strict=True)):
            raise CountsError("a block accepted more tokens than it drafted")
        if self.accepted_B and (sum(self.accepted_B), sum(self.drafted_B)) != (accepted, drafted):
            raise CountsError("the blocks do not add up to the request")
        if self.histogram and (
            (blocks is not None and sum(self.histogram) != blocks)
            or (accepted is not None and sum(j * count for j, count in enumerate(self.histogram)) != accepted)
        ):
            raise CountsError("the histogram does not add up to the request")


class CountsFormat(NamedTuple):
    """Where an engine reports counts: in one of `places` of an answer or of its first choice, if `mark` is there. Dots separate levels."""

    mark: str
    places: tuple[str, ...]
    accepted: tuple[str, ...]
    drafted: tuple[str, ...]
    blocks: tuple[str, ...] = ()
    optional: bool = False  # whether counts may be missing
    sums_miscount: bool = (
        False  # the histogram counts drafts where in some versions the sum of accepted tokens does not
    )


def read_format(form: CountsFormat, engine: str, tops: Sequence[Any]) -> DraftCounts | None:
    """The counts in this format in the first of `tops` that has them. Raises CountsError."""
    for stats, place in ((_at(top, place), place) for top in tops for place in form.places):
        if _at(stats, form.mark) is not None:
            return _read(form, engine, stats, f"{place}.")
    return None


def _read(form: CountsFormat, engine: str, stats: Any, where: str) -> DraftCounts:
    def whole(names: tuple[str, ...]) -> int | None:
        for name in names:
            value = _at(stats, name)
            if value is not None:
                if type(value) is not int or not 0 <= value < _MOST:
                    raise CountsError(f"{where}{name} is {repr(value)[:40]}, not a whole number")
                return value
        if names and not form.optional:
            raise CountsError(f"{where}{names[0]} is missing")
        return None

    def counts(*names: str) -> tuple[int, ...]:
        return next((found for name in names if (found := _counts(_at(stats, name), where + name))), ())

    accepted = whole(form.accepted)
    histogram = counts("acceptance_histogram", "spec_correct_drafts_histogram", "spec_accept_histogram")
    if histogram and form.sums_miscount:
        accepted = sum(j * count for j, count in enumerate(histogram))
    gamma = whole(("num_spec_tokens",)) if _at(stats, "num_spec_tokens") is not None else None
    blocks_of = counts("per_step_accepted"), counts("per_step_drafted")
    return DraftCounts(engine, accepted, whole(form.drafted), whole(form.blocks), gamma, *blocks_of, histogram)


def _at(source: Any, names: str) -> Any:
    """Return the value at a dotted path in nested objects; None if there is none."""
    for name in names.split("."):
        source = source.get(name) if isinstance(source, Mapping) else None
    return source


def _counts(values: Any, where: str) -> tuple[int, ...]:
    """Return counts as a tuple; a mapping {position: count} is accepted too."""
    if isinstance(values, Mapping):
        if any(not str(place).isdecimal() or len(str(place)) > 4 or int(place) > 4096 for place in values):
            raise CountsError(f"{where} has the positions {', '.join(map(str, values))[:60]}, not whole numbers")
        counts = {int(place): count for place, count in values.items()}
        values = [counts.get(place, 0) for place in range(1 + max(counts, default=-1))]
    if values is None:
        return ()
    if not isinstance(values, list | tuple) or any(type(value) is not int or value < 0 for value in values):
        raise CountsError(f"{where} is {repr(values)[:60]}, not a list of whole numbers")
    return tuple(values)
