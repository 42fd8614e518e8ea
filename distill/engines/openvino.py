"""OpenVINO GenAI: on CPUs, in its own model format, and at temperature 0 only, because its sampled text changes.

Its `validate_candidate` compares the draft's probability of one token with the target's of another, which it samples itself.
"""

from typing import TYPE_CHECKING

from distill.engines.protocol.engine import Engine, register

if TYPE_CHECKING:
    from distill.engines.protocol.facts import EngineFacts

_SAMPLES = "at temperature > 0 its speculation does not keep the target's distribution; set serving.temperature to 0"
_QUANTISED = "its converter does not read 8-bit weights; export with --quantize none"


def _refusals(facts: "EngineFacts") -> list[str]:
    return [_SAMPLES] * facts.sampled + [_QUANTISED] * facts.draft_quantised


register(Engine("openvino", "OpenVINO GenAI", "2026.4.1", 6, ("greedy",), refusals=_refusals, equal_strings=True))
