"""What a serving engine says of one request's drafts: a reader for each engine's own format, all into `RequestCounts`.

A reader takes the JSON of a response (or a line of an engine's request file) and returns None where it is not its format.
What contradicts itself is refused by a `CountsError` that names the field. Formats as read in

    vLLM           0.32, docs/features/speculative_decoding/acceptance_metrics.md (experimental there); pull request 48915
    SGLang         pull requests 11441 (first names), 33518 (`sglext`), 10973 (--export-metrics-to-file); main of 2026-09
    llama.cpp      tools/server, main of 2026-08: `timings`
    TensorRT-LLM   pull request 17082: `request_perf_metrics.speculative_decoding`; the same in its perf metrics files
    OpenVINO GenAI main of 2026-08: `extended_perf_metrics`, a Python object or what was written down of it
    AIPerf         0.13, docs/reference/spec-decode-acceptance.md: lines of profile_export.jsonl
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class CountsError(ValueError):
    """Counts that cannot be; the message names the field."""


@dataclass(frozen=True)
class RequestCounts:
    """Drafts of one request. None: not said.

    accepted, drafted: tokens; engines count those behind the end of a response too. blocks: target calls that verified a
    draft. tokens: of the response. gamma: as configured. accepted_B, drafted_B: block by block, empty where not said.
    histogram: [j] = blocks that accepted exactly j tokens, empty where not said.
    """

    engine: str
    accepted: int | None
    drafted: int | None
    blocks: int | None
    tokens: int | None = None
    gamma: int | None = None
    accepted_B: tuple[int, ...] = ()
    drafted_B: tuple[int, ...] = ()
    histogram: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        accepted, drafted, blocks = self.accepted, self.drafted, self.blocks
        if accepted is not None and drafted is not None and accepted > drafted:
            raise CountsError(f"{accepted} tokens accepted of only {drafted} drafted")
        if blocks == 0 and (drafted or accepted):
            raise CountsError(f"{drafted or accepted} drafted tokens in 0 blocks")
        if len(self.accepted_B) != len(self.drafted_B):
            raise CountsError(f"{len(self.accepted_B)} blocks accepted and {len(self.drafted_B)} drafted")
        if any(kept > tried for kept, tried in zip(self.accepted_B, self.drafted_B, strict=True)):
            raise CountsError("a block accepted more tokens than it drafted")
        if self.accepted_B and (sum(self.accepted_B), sum(self.drafted_B)) != (accepted, drafted):
            raise CountsError("the blocks do not add up to the request")
        if self.histogram and (
            (blocks is not None and sum(self.histogram) != blocks)
            or (accepted is not None and sum(j * count for j, count in enumerate(self.histogram)) != accepted)
        ):
            raise CountsError("the histogram does not add up to the request")


def read_counts(answer: Any) -> RequestCounts | None:
    """What the first reader that knows the format makes of an answer; None where nobody does, or nothing was drafted there.

    Raises:
        CountsError: counts that contradict themselves.
    """
    return next((found for read in READERS if (found := read(answer)) is not None), None)


def vllm_counts(answer: Any) -> RequestCounts | None:
    """`metrics.speculative_decoding` of --per-request-spec-decode-metrics, with blocks where it is `detailed`."""
    return _common(_at(answer, "metrics", "speculative_decoding"), "metrics.speculative_decoding", "vllm", answer)


def aiperf_counts(answer: Any) -> RequestCounts | None:
    """`spec_decode_acceptance` of a record of --export-level records."""
    stats = _at(answer, "spec_decode_acceptance")
    return _common(stats, "spec_decode_acceptance", str(_at(stats, "engine") or "aiperf"), stats)


def sglang_counts(answer: Any) -> RequestCounts | None:
    """`spec_*` of `meta_info`, of `sglext.spec_tokens_details`, or of a line of a request file, in each generation's names."""
    choice = _first_choice(answer)
    places = (("meta_info",), ("sglext", "spec_tokens_details"), ())
    stats = next(
        (found for top in (answer, choice) for place in places if _has(found := _at(top, *place), "spec_verify_ct")),
        None,
    )
    if stats is None:
        return None
    accepted = _first_whole(
        stats, "spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num", "spec_accepted_tokens"
    )
    drafted = _first_whole(stats, "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
    histogram = _counts(_at(stats, "spec_correct_drafts_histogram") or _at(stats, "spec_accept_histogram"), "histogram")
    if histogram:  # It is of drafts in every generation; the sums were of other things in some.
        accepted = sum(j * count for j, count in enumerate(histogram))
    blocks = _whole(stats, "spec_verify_ct")
    tokens = _tokens(stats) or _tokens(answer)
    return RequestCounts("sglang", accepted, drafted, blocks, tokens, histogram=histogram)


def llama_cpp_counts(answer: Any) -> RequestCounts | None:
    """`timings.draft_n` and `draft_n_accepted`: no blocks, and drafts cut at the end of a response."""
    timings = _at(answer, "timings")
    if not _has(timings, "draft_n"):
        return None
    accepted, drafted = _whole(timings, "draft_n_accepted", "timings."), _whole(timings, "draft_n", "timings.")
    tokens = _whole(timings, "predicted_n", "timings.") if _has(timings, "predicted_n") else _tokens(answer)
    return RequestCounts("llama.cpp", accepted, drafted, None, tokens)


def tensorrt_counts(answer: Any) -> RequestCounts | None:
    """`request_perf_metrics.speculative_decoding` of a response, a choice, or a line of perf_metrics_output_dir."""
    for top in (answer, _first_choice(answer)):
        for place in (("request_perf_metrics", "speculative_decoding"), ("perf_metrics", "speculative_decoding"), ()):
            stats = _at(top, *place)
            if _has(stats, "total_draft_tokens"):
                accepted = _whole(stats, "total_accepted_draft_tokens")
                return RequestCounts(
                    "tensorrt-llm", accepted, _whole(stats, "total_draft_tokens"), None, _tokens(answer)
                )
    return None


def openvino_counts(answer: Any) -> RequestCounts | None:
    """`extended_perf_metrics` of a result: SDPerModelsPerfMetrics, or a JSON object with the getters' names without `get_`.

    Blocks: the target's inferences but the first, the prefill.
    """
    stats = _at(answer, "extended_perf_metrics")
    if not _has(stats, "num_accepted_tokens"):
        return None
    drafted = stats if _has(stats, "num_draft_tokens") else _at(stats, "draft_model_metrics")
    name = "num_draft_tokens" if drafted is stats else "num_generated_tokens"
    durations = _at(stats, "main_model_metrics", "raw_metrics", "m_durations")
    blocks = max(0, len(durations) - 1) if durations is not None else None
    tokens = next(
        (
            _whole(part, "num_generated_tokens")
            for part in (_at(stats, "main_model_metrics"), stats)
            if _has(part, "num_generated_tokens")
        ),
        None,
    )
    return RequestCounts("openvino", _whole(stats, "num_accepted_tokens"), _whole(drafted, name), blocks, tokens)


READERS = (vllm_counts, aiperf_counts, sglang_counts, llama_cpp_counts, tensorrt_counts, openvino_counts)


def _common(stats: Any, where: str, engine: str, answer: Any) -> RequestCounts | None:
    """vLLM's fields, which AIPerf's record takes over; a histogram may be a list or {accepted: blocks}."""
    if not _has(stats, "num_draft_tokens"):
        return None
    where += "."
    return RequestCounts(
        engine,
        _whole(stats, "num_accepted_draft_tokens", where),
        _whole(stats, "num_draft_tokens", where),
        _whole(stats, "num_spec_steps", where),
        _tokens(answer),
        _whole(stats, "num_spec_tokens", where) if _has(stats, "num_spec_tokens") else None,
        _counts(_at(stats, "per_step_accepted"), where + "per_step_accepted"),
        _counts(_at(stats, "per_step_drafted"), where + "per_step_drafted"),
        _counts(_at(stats, "acceptance_histogram"), where + "acceptance_histogram"),
    )


def _first_choice(answer: Any) -> Any:
    choices = _at(answer, "choices")
    return choices[0] if isinstance(choices, list) and choices else None


def _tokens(answer: Any) -> int | None:
    for source in (answer, _at(answer, "usage")):
        if _has(source, "completion_tokens"):
            return _whole(source, "completion_tokens")
    return None


def _at(source: Any, *names: str) -> Any:
    """What lies under these names in nested objects; a Python object has it as an attribute or behind a getter."""
    for name in names:
        if source is None or isinstance(source, str | int | float | Sequence):
            return None
        if isinstance(source, Mapping):
            source = source.get(name)
        elif (getter := getattr(source, f"get_{name}", None)) is not None:
            source = getter()
        else:
            source = getattr(source, name, None)
    return source


def _has(source: Any, name: str) -> bool:
    return _at(source, name) is not None


def _whole(source: Any, name: str, where: str = "") -> int:
    value = _at(source, name)
    if type(value) is not int or value < 0:
        raise CountsError(f"{where}{name} is {'missing' if value is None else repr(value)[:40]}, not a whole number")
    return value


def _first_whole(source: Any, *names: str) -> int | None:
    return next((_whole(source, name) for name in names if _has(source, name)), None)


def _counts(values: Any, where: str) -> tuple[int, ...]:
    """A list of counts; {place: count} becomes one."""
    if isinstance(values, Mapping):
        if any(not str(place).isdecimal() or int(place) > 4096 for place in values):
            raise CountsError(f"{where} has the places {', '.join(map(str, values))[:60]}, not whole numbers")
        values = [
            values.get(str(place), values.get(place, 0)) for place in range(1 + max(map(int, values), default=-1))
        ]
    if values is None:
        return ()
    if not isinstance(values, list | tuple) or any(type(value) is not int or value < 0 for value in values):
        raise CountsError(f"{where} is {repr(values)[:60]}, not a list of whole numbers")
    return tuple(values)
