"""llama.cpp: sizes may differ by up to 128. It compares token strings from id 5 on, and bos and eos."""

from pathlib import Path

from distill.export.engine import Engine, Service, register
from distill.export.facts import LLAMA_CPP_FIRST_COMPARED_ID, EngineFacts

ROW_SLACK = 128
_SCRIPT = Path(__file__).with_name("servers") / "llamacpp_server.py"
_ROOM = "--parallel {requests} -c {tokens}"  # by default it decodes four, and more wait
_DRAFTING = ("--draft", "--spec-type", "--spec-draft-n-max")

# Model types whose own head it never loads (src/models), so an untied one is lost.
ALWAYS_TIED = ("cohere", "cohere2", "gemma", "gemma2")


def _refusals(facts: EngineFacts) -> list[str]:
    told = "it refuses such a pair (common/speculative.cpp); use the target's tokenizer files and bos_token_id in the draft"
    found = [facts.differences[name] for name in ("ends", "bos", "kind") if name in facts.differences]
    return [f"{one}; {told}" for one in found] + facts.lost_heads(ALWAYS_TIED)


register(
    Engine(
        "llama.cpp",
        "v0.5.0",
        "llama_cpp.j2",
        3,
        lambda facts: "greedy-draft",
        _refusals,
        ROW_SLACK,
        LLAMA_CPP_FIRST_COMPARED_ID,
        equal_strings=True,
        reads_gguf=True,
        service=Service("llama.cpp", "llama-server", ".venv-llamacpp", _DRAFTING, _SCRIPT, room=_ROOM),
    )
)
