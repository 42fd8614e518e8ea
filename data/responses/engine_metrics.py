"""A server's draft counters: Prometheus pages, and the difference of two of them.

Formats: vLLM 0.32 `vllm:spec_decode_num_*` (with `_total`; in its Python API and old versions without);
llama.cpp's `llamacpp:spec_decode_num_*`, the same schema (pull request 26389); TensorRT-LLM's
`trtllm_spec_decode_{drafted,accepted}_tokens{token_position}` and `..._num_{draft,accepted}_tokens` under
/prometheus/metrics (pull requests 12545, 12636); SGLang's counter `sglang:spec_verify_calls`, its gauges
`sglang:spec_accept_length` and `..._rate`, and `avg_spec_accept_length` of /server_info. Gauges give no difference of two pages.
"""

import contextlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from data.responses.engine_counts import CountsError

PAGES = ("/metrics", "/prometheus/metrics")

# name without `_total` -> [(labels, value)]
Page = dict[str, list[tuple[dict[str, str], float]]]


@dataclass(frozen=True)
class ServerCounts:
    """Counters since a server's start, or their difference. None: not reported by this engine.

    blocks: verified drafts. accepted_G: by position, empty if not reported. tokens: of all responses.
    started: start times of the counters, if reported; another value means a restart.
    """

    engine: str
    accepted: int | None
    drafted: int | None
    blocks: int | None
    accepted_G: tuple[int, ...] = ()
    tokens: int | None = None
    started: tuple[float, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.accepted is not None and self.drafted is not None and self.accepted > self.drafted:
            raise CountsError(f"{self.accepted:,} tokens accepted, but only {self.drafted:,} drafted")


def parse_page(text: str) -> Page:
    """Parse a page in Prometheus' text format; empty for a page in another format."""
    from prometheus_client.parser import text_string_to_metric_families

    page: Page = {}
    with contextlib.suppress(ValueError, OverflowError):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                page.setdefault(sample.name.removesuffix("_total"), []).append((sample.labels, float(sample.value)))
    return page


class _Format(NamedTuple):
    """Metric names of an engine. blocks: the same as `drafted` if its first position counts blocks. label: of positions."""

    engine: str
    drafted: str
    accepted: str
    blocks: str
    accepted_G: str
    label: str
    tokens: str


def _like_vllm(engine: str, prefix: str, tokens: str) -> _Format:
    name = f"{prefix}spec_decode_num_"
    words = name + "draft_tokens", name + "accepted_tokens", name + "drafts", name + "accepted_tokens_per_pos"
    return _Format(engine, *words, "position", prefix + tokens)


_TENSORRT, _POSITION, _MADE = "trtllm_spec_decode_", "token_position", "trtllm_generation_tokens"
_FORMATS = (
    _like_vllm("vllm", "vllm:", "generation_tokens"),
    _like_vllm("llama.cpp", "llamacpp:", "tokens_predicted"),
    _Format(
        "tensorrt-llm",
        _TENSORRT + "drafted_tokens",
        _TENSORRT + "accepted_tokens",
        _TENSORRT + "drafted_tokens",
        _TENSORRT + "accepted_tokens",
        _POSITION,
        _MADE,
    ),
    _Format(
        "tensorrt-llm", _TENSORRT + "num_draft_tokens", _TENSORRT + "num_accepted_tokens", "", "", _POSITION, _MADE
    ),
)


def counts_of(page: Page) -> ServerCounts | None:
    """Return the counters of the first engine whose names are on the page; None if it has no draft counters.

    Raises CountsError: a counter is not a whole number, or more tokens were accepted than drafted.
    """
    form = next((form for form in _FORMATS if form.drafted in page), None)
    if form is None:
        return _sglang(page)
    if form.blocks == form.drafted:  # Every block drafts a first token, so the first position counts blocks.
        blocks: int | None = (*_by_position(page, form.drafted, form.label), 0)[0]
    else:
        blocks = _sum(page, form.blocks)
    return ServerCounts(
        form.engine,
        _sum(page, form.accepted),
        _sum(page, form.drafted),
        blocks,
        _by_position(page, form.accepted_G, form.label),
        _sum(page, form.tokens),
        _started(page),
    )


def _sglang(page: Page) -> ServerCounts | None:
    blocks, tokens, requests = (
        _sum(page, f"sglang:{name}") for name in ("spec_verify_calls", "generation_tokens", "num_requests")
    )
    if blocks is None:
        return None
    # The first token of a response comes from the prefill; each block emits one token more than it accepts.
    accepted = None if tokens is None or requests is None else max(0, tokens - requests - blocks)
    return ServerCounts("sglang", accepted, None, blocks, (), tokens, _started(page))


def difference(before: ServerCounts, after: ServerCounts) -> ServerCounts:
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
    return ServerCounts(after.engine, accepted_G=tuple(place or 0 for place in places), **changes)


def as_counts(alone: ServerCounts) -> dict[str, Any]:
    """Counts of the one request between two scrapes, in the format that `read_counts` reads (AIPerf's); empty if they are sums only."""
    if alone.blocks is None or alone.accepted is None or alone.drafted is None:
        return {}
    at_least_G = (alone.blocks, *alone.accepted_G, 0)
    found: dict[str, Any] = {
        "engine": alone.engine,
        "num_accepted_draft_tokens": alone.accepted,
        "num_draft_tokens": alone.drafted,
        "num_spec_steps": alone.blocks,
    }
    if alone.accepted_G:
        histogram = [one - more for one, more in itertools.pairwise(at_least_G)]
        found |= {"num_spec_tokens": len(alone.accepted_G), "acceptance_histogram": histogram}
    return {"spec_decode_acceptance": found}


def mean_length(page: Page, server_info: Any) -> float | None:
    """Return tokens per block since the start of an SGLang: the gauge's mean over ranks, or /server_info; None if not reported."""
    values: list[Any] = [value for _, value in page.get("sglang:spec_accept_length", [])]
    states = server_info.get("internal_states") if isinstance(server_info, Mapping) else None
    if not values and isinstance(states, list) and states and isinstance(states[0], Mapping):
        values = [states[0].get("avg_spec_accept_length")]
    told = [float(value) for value in values if isinstance(value, int | float) and 1 <= value < 2**31]
    return sum(told) / len(told) if told else None


def _sum(page: Page, name: str) -> int | None:
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


def _started(page: Page) -> tuple[float, ...]:
    """Return the start times of draft counters (`_created`) and of the process, if the page has them."""
    names = [name for name in page if name == "process_start_time_seconds" or name.endswith("drafts_created")]
    return tuple(sorted(value for name in names for _, value in page[name]))
