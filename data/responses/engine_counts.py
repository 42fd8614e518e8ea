"""Draft counts of one request: each engine's format, parsed into `RequestCounts`.

Counts that contradict themselves raise a `CountsError` with the field. Formats as read in

    vLLM           0.32, docs/features/speculative_decoding/acceptance_metrics.md (experimental there); pull request 48915
    SGLang         pull requests 11441 (first names), 33518 (`sglext`), 10973 (--export-metrics-to-file); main of 2026-09
    llama.cpp      tools/server, main of 2026-08: `timings`
    TensorRT-LLM   pull request 17082: `request_perf_metrics.speculative_decoding`; the same in its perf metrics files
    OpenVINO GenAI main of 2026-08: `extended_perf_metrics`, a Python object or its values as JSON
    AIPerf         0.13, docs/reference/spec-decode-acceptance.md: lines of profile_export.jsonl
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class CountsError(ValueError):
    """Counts that contradict themselves; the message contains the field."""


@dataclass(frozen=True)
class RequestCounts:
    """Draft counts of one request. None: not reported.

    accepted, drafted: tokens; engines also count tokens after the end of a response. blocks: target calls that verified a
    draft. gamma: as configured. accepted_B, drafted_B: per block, empty if not reported.
    histogram: [j] = blocks that accepted exactly j tokens, empty if not reported.
    """

    engine: str
    accepted: int | None
    drafted: int | None
    blocks: int | None
    gamma: int | None = None
    accepted_B: tuple[int, ...] = ()
    drafted_B: tuple[int, ...] = ()
    histogram: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        accepted, drafted, blocks = self.accepted, self.drafted, self.blocks
        if accepted is not None and drafted is not None and accepted > drafted:
            raise CountsError(f"{accepted} tokens accepted, but only {drafted} drafted")
        if blocks == 0 and (drafted or accepted):
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


class _Format(NamedTuple):
    """Where an engine reports counts: in one of `places` of an answer or of its first choice, if `mark` is there. Dots separate levels."""

    engine: str
    mark: str
    places: tuple[str, ...]
    accepted: tuple[str, ...]
    drafted: tuple[str, ...]
    blocks: tuple[str, ...] = ()
    optional: bool = False  # whether counts may be missing


_VLLM = ("num_accepted_draft_tokens",), ("num_draft_tokens",), ("num_spec_steps",)
_FORMATS = (
    _Format("vllm", "num_draft_tokens", ("metrics.speculative_decoding",), *_VLLM),
    _Format("aiperf", "num_draft_tokens", ("spec_decode_acceptance",), *_VLLM),
    _Format(
        "sglang",
        "spec_verify_ct",
        ("meta_info", "sglext.spec_tokens_details", ""),
        ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num", "spec_accepted_tokens"),
        ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num"),
        ("spec_verify_ct",),
        True,
    ),
    _Format("llama.cpp", "draft_n", ("timings",), ("draft_n_accepted",), ("draft_n",)),
    _Format(
        "tensorrt-llm",
        "total_draft_tokens",
        ("request_perf_metrics.speculative_decoding", "perf_metrics.speculative_decoding", ""),
        ("total_accepted_draft_tokens",),
        ("total_draft_tokens",),
    ),
    # A Python object, or JSON whose keys are its getters' names without `get_`. The target's first inference is the prefill.
    _Format(
        "openvino",
        "num_accepted_tokens",
        ("extended_perf_metrics",),
        ("num_accepted_tokens",),
        ("num_draft_tokens", "draft_model_metrics.num_generated_tokens"),
        ("main_model_metrics.raw_metrics.m_durations",),
        True,
    ),
)


def read_counts(answer: Any) -> RequestCounts | None:
    """The counts of an answer (JSON of a response, or a line of a request file); None without drafts; CountsError if they contradict."""
    choices = _at(answer, "choices")
    tops = (answer, choices[0] if isinstance(choices, list) and choices else None)
    for form in _FORMATS:
        for stats, place in ((_at(top, place), place) for top in tops for place in form.places):
            if _at(stats, form.mark) is not None:
                return _read(form, stats, f"{place}." if place else "")
    return None


def _read(form: _Format, stats: Any, where: str) -> RequestCounts:
    def whole(names: tuple[str, ...]) -> int | None:
        for name in names:
            value = _at(stats, name)
            if name.endswith("m_durations") and isinstance(value, list):
                return max(0, len(value) - 1)
            if value is not None:
                if type(value) is not int or value < 0:
                    raise CountsError(f"{where}{name} is {repr(value)[:40]}, not a whole number")
                return value
        if names and not form.optional:
            raise CountsError(f"{where}{names[0]} is missing")
        return None

    def counts(*names: str) -> tuple[int, ...]:
        return next((found for name in names if (found := _counts(_at(stats, name), where + name))), ())

    accepted = whole(form.accepted)
    histogram = counts("acceptance_histogram", "spec_correct_drafts_histogram", "spec_accept_histogram")
    # In all versions of SGLang the histogram counts drafts; in some versions the sums do not.
    if histogram and form.engine == "sglang":
        accepted = sum(j * count for j, count in enumerate(histogram))
    engine = str(_at(stats, "engine") or form.engine) if form.engine == "aiperf" else form.engine
    gamma = whole(("num_spec_tokens",)) if _at(stats, "num_spec_tokens") is not None else None
    blocks_of = counts("per_step_accepted"), counts("per_step_drafted")
    return RequestCounts(engine, accepted, whole(form.drafted), whole(form.blocks), gamma, *blocks_of, histogram)


def _at(source: Any, names: str) -> Any:
    """Return the value at a dotted path in nested objects; in a Python object it is an attribute or has a getter."""
    for name in names.split(".") if names else ():
        if source is None or isinstance(source, str | int | float | Sequence):
            return None
        if isinstance(source, Mapping):
            source = source.get(name)
        elif (getter := getattr(source, f"get_{name}", None)) is not None:
            source = getter()
        else:
            source = getattr(source, name, None)
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
