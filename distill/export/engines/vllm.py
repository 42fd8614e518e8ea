"""vLLM: its refusals, and the rule that the command selects."""

from distill.export.engine import Engine, Service, register, rerouted_word
from distill.export.facts import EngineFacts

# Head sizes of v1/attention/backends/cpu_attn.py; on GPUs flash_attn.py takes multiples of 8.
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Model types whose own head it never loads (model_executor/models), so an untied one is lost.
ALWAYS_TIED = ("cohere", "cohere2", "gemma2")


def _refusals(facts: EngineFacts) -> list[str]:
    reasons = []
    word = rerouted_word(facts.draft)
    if word is not None:
        reasons.append(f"the path contains {word!r}, so vLLM selects another method; rename the directory")
    if facts.sampled and facts.sampling is not None and facts.sampling.min_p:
        reasons.append(
            f"vLLM refuses min_p with speculation, and this run serves with min_p {facts.sampling.min_p}; set serving.min_p to 0"
        )
    parts = facts.tensor_parallel
    for side, (size, heads, kv_heads, width, _) in facts.shapes.items():
        if size % 8:
            reasons.append(
                f"config.json: head_dim {size} in the {side}; it has no attention kernel for it; use another model"
            )
        if max(kv_heads, parts) % min(kv_heads, parts) or heads % parts or width % parts:
            reasons.append(
                f"config.json: {heads} heads, {kv_heads} key-value heads, intermediate_size {width} in the {side}; it cannot split them over "
                f"--tensor-parallel-size {parts}, which the draft shares; use a size that divides them"
            )
    return reasons + facts.lost_heads(ALWAYS_TIED)


def _notes(facts: EngineFacts) -> list[str]:
    told = "it computes the draft in the target's dtype, so acceptance can differ from the measured one; export with the target's dtype"
    target, draft = facts.dtypes
    notes = [f"config.json: dtype: {target} in the target, {draft} in the draft; {told}"] if target != draft else []
    sizes = {side: shape[0] for side, shape in facts.shapes.items() if shape[0] not in CPU_HEADS}
    told = "its CPU build has no attention kernel for it; serve on a GPU"
    return notes + [f"config.json: head_dim {size} in the {side}; {told}" for side, size in sizes.items()]


def _rule(facts: EngineFacts) -> str:
    return facts.drawn_rule if facts.sampled_drafts_win else "greedy-draft"


_SERVICE = Service(
    "vllm", "vllm", ".venv-vllm", ("--speculative-config",), key_variable="VLLM_API_KEY",
    counts=("--per-request-spec-decode-metrics", "detailed"),
)  # fmt: skip
register(Engine("vLLM", "0.32", "vllm.j2", 1, _rule, _refusals, notes=_notes, one_pass=True, service=_SERVICE))
