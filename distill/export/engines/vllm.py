"""vLLM: its refusals, and the rule that the command selects."""

from distill.export.engine import Engine, register, rerouted_word
from distill.export.facts import EngineFacts


def _refusals(facts: EngineFacts) -> list[str]:
    reasons = []
    word = rerouted_word(facts.draft)
    if word is not None:
        reasons.append(f"the path contains {word!r}, so vLLM selects another method; rename the directory")
    if facts.sampled and facts.sampling is not None and facts.sampling.min_p:
        reasons.append(
            f"vLLM refuses min_p with speculation, and this run serves with min_p {facts.sampling.min_p}; set serving.min_p to 0"
        )
    return reasons


def _rule(facts: EngineFacts) -> str:
    return "sample" if facts.sampled_drafts_win else "greedy-draft"


register(Engine("vLLM", "0.32", "vllm.j2", 1, _rule, _refusals, one_pass=True))
