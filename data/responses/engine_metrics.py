"""A server's own counters of its drafts: Prometheus pages, and the difference of two of them.

The formats: vLLM 0.32 `vllm:spec_decode_num_*` (with `_total` or, in its Python API and old versions, without);
llama.cpp's `llamacpp:spec_decode_num_*`, the same schema (pull request 26389); TensorRT-LLM's
`trtllm_spec_decode_{drafted,accepted}_tokens{token_position}` and `..._num_{draft,accepted}_tokens` under
/prometheus/metrics (pull requests 12545, 12636); SGLang's counter `sglang:spec_verify_calls`, its gauges
`sglang:spec_accept_length` and `..._rate`, and `avg_spec_accept_length` of /server_info, which no difference can be made of.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from data.responses.engine_counts import CountsError

PAGES = ("/metrics", "/prometheus/metrics")
_LINE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:\\.|[^"\\])*")*)\})?\s+(\S+)(?:\s+-?\d+)?')
_LABEL = re.compile(r'(\w+)="((?:\\.|[^"\\])*)"')

# name without `_total` -> [(labels, value)]
Page = dict[str, list[tuple[dict[str, str], float]]]


@dataclass(frozen=True)
class ServerCounts:
    """Counters since a server's start, or their difference. None: this engine does not say.

    blocks: verified drafts. accepted_G: by position, empty where not said. tokens, requests: of all responses.
    started: when the counters began, as far as they tell: another value is another start.
    """

    engine: str
    accepted: int | None
    drafted: int | None
    blocks: int | None
    accepted_G: tuple[int, ...] = ()
    tokens: int | None = None
    requests: int | None = None
    started: tuple[float, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.accepted is not None and self.drafted is not None and self.accepted > self.drafted:
            raise CountsError(f"{self.accepted:,} tokens accepted of only {self.drafted:,} drafted")


def parse_page(text: str) -> Page:
    """The samples of a page in Prometheus' text format; what is no sample is passed over."""
    page: Page = {}
    for line in text.splitlines():
        found = None if line.startswith("#") else _LINE.fullmatch(line.strip())
        if found is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        page.setdefault(found[1].removesuffix("_total"), []).append((dict(_LABEL.findall(found[2] or "")), value))
    return page


def counts_of(page: Page) -> ServerCounts | None:
    """The counters of the first engine whose names are on the page; None where it says nothing of drafts.

    Raises:
        CountsError: a counter that is no whole number, or more accepted than drafted.
    """
    return next((found for read in READERS if (found := read(page)) is not None), None)


def _like_vllm(engine: str, prefix: str, tokens: str, requests: str = "") -> Callable[[Page], ServerCounts | None]:
    """The reader of the four counters that vLLM and llama.cpp share."""

    def read(page: Page) -> ServerCounts | None:
        name = f"{prefix}spec_decode_num_"
        if name + "draft_tokens" not in page:
            return None
        return ServerCounts(
            engine,
            _sum(page, name + "accepted_tokens"),
            _sum(page, name + "draft_tokens"),
            _sum(page, name + "drafts"),
            _by_position(page, name + "accepted_tokens_per_pos", "position"),
            _sum(page, prefix + tokens),
            _sum(page, prefix + requests),
            _started(page, name),
        )

    return read


def _tensorrt(page: Page) -> ServerCounts | None:
    name = "trtllm_spec_decode_"
    drafted_G = _by_position(page, name + "drafted_tokens", "token_position")
    accepted_G = _by_position(page, name + "accepted_tokens", "token_position")
    tokens, requests = _sum(page, "trtllm_generation_tokens"), _sum(page, "trtllm_request_success")
    started = _started(page, name)
    if drafted_G:  # A block drafts its first token, so that position counts blocks.
        blocks = drafted_G[0]
        return ServerCounts(
            "tensorrt-llm", sum(accepted_G), sum(drafted_G), blocks, accepted_G, tokens, requests, started
        )
    if name + "num_draft_tokens" not in page:
        return None
    accepted, drafted = _sum(page, name + "num_accepted_tokens"), _sum(page, name + "num_draft_tokens")
    return ServerCounts("tensorrt-llm", accepted, drafted, None, (), tokens, requests, started)


def _sglang(page: Page) -> ServerCounts | None:
    blocks = _sum(page, "sglang:spec_verify_calls")
    if blocks is None and "sglang:spec_accept_length" not in page:
        return None
    tokens, requests = _sum(page, "sglang:generation_tokens"), _sum(page, "sglang:num_requests")
    accepted = None
    if blocks is not None and tokens is not None and requests is not None:
        # The first token of a response is the prefill's; each block emits one more than it accepts.
        accepted = max(0, tokens - requests - blocks)
    return ServerCounts("sglang", accepted, None, blocks, (), tokens, requests, _started(page, "sglang:"))


READERS = (
    _like_vllm("vllm", "vllm:", "generation_tokens", "request_success"),
    _like_vllm("llama.cpp", "llamacpp:", "tokens_predicted"),
    _tensorrt,
    _sglang,
)


def difference(before: ServerCounts, after: ServerCounts) -> ServerCounts:
    """What was counted between two scrapes.

    Raises:
        CountsError: a counter fell or began anew: the server was restarted between them; another engine answers.
    """
    if before.engine != after.engine:
        raise CountsError(f"{before.engine} answered first, then {after.engine}")
    names = ("accepted", "drafted", "blocks", "tokens", "requests")
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in names}
    for name, (old, new) in pairs.items():
        if old is not None and (new is None or new < old):
            raise CountsError(f"the counter of {name} fell from {old:,} to {new or 0:,}: the server was restarted")
    if before.started and after.started and before.started != after.started:
        raise CountsError("the counters began anew: the server was restarted")
    width = max(len(before.accepted_G), len(after.accepted_G))
    olds, news = (side.accepted_G + (0,) * (width - len(side.accepted_G)) for side in (before, after))
    changes: dict[str, Any] = {name: None if new is None else new - (old or 0) for name, (old, new) in pairs.items()}
    accepted_G = tuple(new - old for old, new in zip(olds, news, strict=True))
    return ServerCounts(after.engine, accepted_G=accepted_G, **changes)


def mean_length_of(server_info: Any) -> float | None:
    """`avg_spec_accept_length` of SGLang's /server_info, tokens a block since its start; None where it does not say."""
    states = server_info.get("internal_states") if isinstance(server_info, Mapping) else None
    value = states[0].get("avg_spec_accept_length") if isinstance(states, list) and states else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value >= 1 else None


def mean_length_on(page: Page) -> float | None:
    """The gauge `sglang:spec_accept_length` of a page, the mean over its ranks; None where it is not there."""
    values = [value for _, value in page.get("sglang:spec_accept_length", []) if value >= 1]
    return sum(values) / len(values) if values else None


def _sum(page: Page, name: str) -> int | None:
    """A counter summed over its labels (models, engines, workers); None where it is not on the page."""
    return sum(_whole(name, value) for _, value in page[name]) if name in page else None


def _by_position(page: Page, name: str, label: str) -> tuple[int, ...]:
    sums: dict[int, int] = {}
    for labels, value in page.get(name, []):
        place = labels.get(label, "")
        if not place.isdecimal() or int(place) > 4096:
            raise CountsError(f"{name} has {label} {place!r}, not a whole number")
        sums[int(place)] = sums.get(int(place), 0) + _whole(name, value)
    return tuple(sums.get(place, 0) for place in range(1 + max(sums, default=-1)))


def _whole(name: str, value: float) -> int:
    if not math.isfinite(value) or value < 0 or value != int(value):
        raise CountsError(f"{name} is {value:g}, not a whole number")
    return int(value)


def _started(page: Page, prefix: str) -> tuple[float, ...]:
    """When counters were made (`_created`) and the process was started, where the page says so."""
    times = [
        value
        for name, samples in page.items()
        if name == "process_start_time_seconds" or (name.startswith(prefix) and name.endswith("drafts_created"))
        for _, value in samples
    ]
    return tuple(sorted(times))
