"""SGLang: drafts the argmax and compares vocabularies, including added tokens."""

from distill.export.engine import Engine, register
from distill.export.facts import EngineFacts


def _refusals(facts: EngineFacts) -> list[str]:
    return [] if facts.added_tokens_equal else ["the added tokens differ; use the target's tokenizer"]


register(Engine("SGLang", "0.5", "sglang.j2", 2, lambda facts: "greedy-draft", _refusals, equal_strings=True))
