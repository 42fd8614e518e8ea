"""SGLang: drafts the argmax and compares vocabularies, including added tokens."""

from distill.export.engine import Engine, register
from distill.export.facts import EngineFacts


def _refusals(facts: EngineFacts) -> list[str]:
    told = "it refuses such a pair; older versions emitted wrong text without an error (sglang#24051); use the target's tokenizer files"
    return [f"{facts.differences['added']}; {told}"] if "added" in facts.differences else []


register(Engine("SGLang", "0.5", "sglang.j2", 2, lambda facts: "greedy-draft", _refusals, equal_strings=True))
