"""llama.cpp: sizes may differ by up to 128. It compares token strings from id 5 on, and bos and eos."""

from distill.export.engine import Engine, register
from distill.export.facts import LLAMA_CPP_FIRST_COMPARED_ID, EngineFacts

ROW_SLACK = 128


def _refusals(facts: EngineFacts) -> list[str]:
    reasons = []
    if not facts.added_ends_equal:
        reasons.append("the tokenizers add different bos or eos tokens; use the target's tokenizer")
    if not facts.tokenizer_kind_equal:
        reasons.append("the tokenizers are of different kinds; use the target's tokenizer")
    return reasons


register(
    Engine(
        "llama.cpp", "v0.5.0", "llama_cpp.j2", 3, lambda facts: "greedy-draft", _refusals, ROW_SLACK,
        LLAMA_CPP_FIRST_COMPARED_ID, equal_strings=True,
    )
)  # fmt: skip
