"""vLLM: what it refuses, and which rule its command asks for."""

from distill.export.engine import Engine, register, rerouted_word
from distill.export.facts import EngineFacts


def _refusals(facts: EngineFacts) -> list[str]:
    reasons = []
    word = rerouted_word(facts.draft)
    if word is not None:
        reasons.append(f"the path holds {word!r}, which vLLM takes for another method; rename the directory")
    if facts.sampled and facts.sampling is not None and facts.sampling.min_p:
        reasons.append(
            f"it refuses requests with min_p beside speculation, and this run serves at min_p {facts.sampling.min_p}"
        )
    return reasons


def _rule(facts: EngineFacts) -> str:
    return "sample" if facts.sampled_drafts_win else "greedy-draft"


register(Engine("vLLM", "0.32", "vllm.j2", 1, _rule, _refusals, one_pass=True))
