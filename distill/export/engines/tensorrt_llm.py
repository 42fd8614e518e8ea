"""TensorRT-LLM: runs draft and target as one model, configured by a YAML file."""

from distill.export.engine import Engine, register
from distill.export.facts import STATE, EngineFacts

_HYBRID = (
    "config.json: layer_types: only the target has layers with a state; with such a draft it can stop at start (TensorRT-LLM#18449, 2026-08-31, "
    "open, 1.3.0rc24); start it once before you rely on it"
)


def _warnings(facts: EngineFacts) -> list[str]:
    return [_HYBRID] if STATE in set(facts.layers.get("target", ())) - set(facts.layers.get("draft", ())) else []


_RULE = "greedy-draft"
register(Engine("TensorRT-LLM", "1.3", "tensorrt_llm.j2", 5, lambda facts: _RULE, warnings=_warnings, one_pass=True))
