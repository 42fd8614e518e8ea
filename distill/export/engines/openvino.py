"""OpenVINO GenAI: on CPUs, in its own model format, and at temperature 0 only, because its sampled text changes.

Its `validate_candidate` compares the draft's probability of one token with the target's of another, which it samples itself.
"""

from pathlib import Path

from distill.export.engine import Engine, Service, register
from distill.export.facts import EngineFacts

_SAMPLES = "at temperature > 0 its speculation does not keep the target's distribution; set serving.temperature to 0"
_QUANTISED = "its converter does not read 8-bit weights; export with --quantize none"
_SCRIPT = Path(__file__).with_name("servers") / "openvino_server.py"


def _refusals(facts: EngineFacts) -> list[str]:
    return [_SAMPLES] * facts.sampled + [_QUANTISED] * facts.draft_quantised


register(
    Engine(
        "OpenVINO GenAI",
        "2026.4.1",
        "openvino.j2",
        6,
        lambda facts: "greedy",
        _refusals,
        equal_strings=True,
        service=Service("openvino", "optimum-cli", ".venv-openvino", ("--draft", "--gamma"), _SCRIPT),
    )
)
