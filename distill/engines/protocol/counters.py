"""A server's draft counters: Prometheus pages, and the difference of two of them. Gauges give no difference."""

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from distill.engines.protocol.counts import CountsError, DraftCounts

PREFIX = "vllm:"  # of metric names, which other servers use too
PAGES = ("/metrics", "/prometheus/metrics")

# name without `_total` -> [(labels, value)]
Page = dict[str, list[tuple[dict[str, str], float]]]


def parse_page(text: str) -> Page:
    """Parse a page in Prometheus' text format; empty for a page in another format."""
    from prometheus_client.parser import text_string_to_metric_families

    page: Page = {}
    with contextlib.suppress(ValueError, OverflowError):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                page.setdefault(sample.name.removesuffix("_total"), []).append((sample.labels, float(sample.value)))
    return page


class CounterNames(NamedTuple):
    """Metric names of an engine. blocks: the same as `drafted` if its first position counts blocks. label: of positions."""

    engine: str
    drafted: str
    accepted: str
    blocks: str
    accepted_G: str
    label: str
    tokens: str


def names_like_vllm(engine: str, prefix: str, tokens: str) -> CounterNames:
    """The names of an engine with vLLM's schema under a prefix of its own."""
    name = f"{prefix}spec_decode_num_"
    words = name + "draft_tokens", name + "accepted_tokens", name + "drafts", name + "accepted_tokens_per_pos"
    return CounterNames(engine, *words, "position", prefix + tokens)


def named_counters(*known: CounterNames) -> Callable[[Page], DraftCounts | None]:
    """Return the reader of a page with the first of these names that are on it.

    It raises CountsError: a counter is not a whole number, or more tokens were accepted than drafted.
    """

    def read(page: Page) -> DraftCounts | None:
        names = next((names for names in known if names.drafted in page), None)
        if names is None:
            return None
        if names.blocks == names.drafted:  # Every block drafts a first token, so the first position counts blocks.
            blocks: int | None = (*_by_position(page, names.drafted, names.label), 0)[0]
        else:
            blocks = sum_of(page, names.blocks)
        return DraftCounts(
            names.engine,
            sum_of(page, names.accepted),
            sum_of(page, names.drafted),
            blocks,
            accepted_G=_by_position(page, names.accepted_G, names.label),
            tokens=sum_of(page, names.tokens),
            started=started(page),
        )

    return read


def difference(before: DraftCounts, after: DraftCounts) -> DraftCounts:
    """Return the counts between two scrapes; CountsError if a counter fell or restarted, or another engine answers."""
    if before.engine != after.engine:
        raise CountsError(f"{before.engine} answered first, then {after.engine}")

    def change(name: str, old: int | None, new: int | None) -> int | None:
        if old is not None and (new is None or new < old):
            raise CountsError(f"the counter of {name} fell from {old:,} to {new or 0:,}: the server was restarted")
        return None if new is None else new - (old or 0)

    names = ("accepted", "drafted", "blocks", "tokens")
    changes: dict[str, Any] = {name: change(name, getattr(before, name), getattr(after, name)) for name in names}
    if before.started and after.started and before.started != after.started:
        raise CountsError("the counters have a new start time: the server was restarted")
    pairs = itertools.zip_longest(before.accepted_G, after.accepted_G, fillvalue=0)
    places = (change(f"position {place}", old, new) for place, (old, new) in enumerate(pairs))
    return DraftCounts(after.engine, accepted_G=tuple(place or 0 for place in places), **changes)


def as_counts(alone: DraftCounts) -> dict[str, Any]:
    """Counts of the one request between two scrapes, in vLLM's format of an answer; empty if they are sums only."""
    if alone.blocks is None or alone.accepted is None or alone.drafted is None:
        return {}
    at_least_G = (alone.blocks, *alone.accepted_G, 0)
    counts: dict[str, Any] = {
        "num_accepted_draft_tokens": alone.accepted,
        "num_draft_tokens": alone.drafted,
        "num_spec_steps": alone.blocks,
    }
    if alone.accepted_G:
        histogram = [one - more for one, more in itertools.pairwise(at_least_G)]
        counts |= {"num_spec_tokens": len(alone.accepted_G), "acceptance_histogram": histogram}
    return {"metrics": {"speculative_decoding": counts}}


def sum_of(page: Page, name: str) -> int | None:
    """Sum a counter over its labels (models, engines, workers); None if it is not on the page."""
    return sum(_whole(name, value) for _, value in page[name]) if name in page else None


def _by_position(page: Page, name: str, label: str) -> tuple[int, ...]:
    sums: dict[int, int] = {}
    for labels, value in page.get(name, []):
        place = labels.get(label, "")
        if not place.isdecimal() or len(place) > 4 or int(place) > 4096:
            raise CountsError(f"{name} has {label} {place[:40]!r}, not a whole number")
        sums[int(place)] = sums.get(int(place), 0) + _whole(name, value)
    return tuple(sums.get(place, 0) for place in range(1 + max(sums, default=-1)))


def _whole(name: str, value: float) -> int:
    if not math.isfinite(value) or value < 0 or value != int(value):
        raise CountsError(f"{name} is {value:g}, not a whole number")
    return int(value)


def started(page: Page) -> tuple[float, ...]:
    """Return the start times of draft counters (`_created`) and of the process, if the page has them."""
    names = [name for name in page if name == "process_start_time_seconds" or name.endswith("drafts_created")]
    return tuple(sorted(value for name in names for _, value in page[name]))
