"""TensorRT-LLM: runs draft and target as one model, configured by a YAML file.

Counts as read in pull request 17082; counters of pull requests 12545 and 12636, under /prometheus/metrics.
"""

from typing import TYPE_CHECKING

from distill.engines.protocol.counters import CounterNames, named_counters
from distill.engines.protocol.counts import CountsFormat
from distill.engines.protocol.engine import Dialect, Engine, register

if TYPE_CHECKING:
    from distill.engines.protocol.facts import EngineFacts

_HYBRID = (
    "config.json: layer_types: only the target has layers with a state; with such a draft it can stop at "
    "start (TensorRT-LLM#18449, 2026-08-31, "
    "open, 1.3.0rc24); start it once before you rely on it"
)


def _warnings(facts: "EngineFacts") -> list[str]:
    return [_HYBRID] if facts.STATE in set(facts.layers.get("target", ())) - set(facts.layers.get("draft", ())) else []


_METRIC = "trtllm_spec_decode_"
_PLACES = "token_position", "trtllm_generation_tokens"
_DRAFTED, _ACCEPTED = f"{_METRIC}drafted_tokens", f"{_METRIC}accepted_tokens"
register(
    Engine(
        "tensorrt-llm",
        "TensorRT-LLM",
        "1.3",
        5,
        ("greedy-draft", "sample"),
        warnings=_warnings,
        one_pass=True,
        dialect=Dialect(
            owners=("tensorrt_llm",),
            counts=CountsFormat(
                "total_draft_tokens",
                ("request_perf_metrics.speculative_decoding",),
                ("total_accepted_draft_tokens",),
                ("total_draft_tokens",),
            ),
            counters=named_counters(
                CounterNames("tensorrt-llm", _DRAFTED, _ACCEPTED, _DRAFTED, _ACCEPTED, *_PLACES),
                CounterNames(
                    "tensorrt-llm", f"{_METRIC}num_draft_tokens", f"{_METRIC}num_accepted_tokens", "", "", *_PLACES
                ),
            ),
        ),
    )
)
