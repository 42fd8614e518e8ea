"""vLLM: its refusals, and the rule that the command selects."""

from distill.export.engine import Engine, register, rerouted_word
from distill.export.facts import EngineFacts

# v1/attention/backends: flash_attn.py, triton_attn.py, cpu_attn.py
SMALLEST_HEAD = 32
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
    for side, shape in facts.shapes.items():
        if shape.head_size % 8 and shape.head_size < SMALLEST_HEAD:
            reasons.append(
                f"config.json: head_dim {shape.head_size} in the {side}; no attention kernel takes it (FlashAttention needs a multiple of 8, "
                f"Triton at least {SMALLEST_HEAD}); use a model with another head size"
            )
        few, many = sorted((shape.kv_heads, facts.tensor_parallel))
        if many % few or shape.heads % facts.tensor_parallel or shape.width % facts.tensor_parallel:
            reasons.append(
                f"config.json: {shape.heads} heads, {shape.kv_heads} key-value heads, intermediate_size {shape.width} in the {side}; it cannot "
                f"split them over --tensor-parallel-size {facts.tensor_parallel}, which the draft shares; use a size that divides them"
            )
    return reasons + facts.lost_heads(ALWAYS_TIED)


def _notes(facts: EngineFacts) -> list[str]:
    told = "it computes the draft in the target's dtype, so acceptance can differ from the measured one; export with the target's dtype"
    notes = [f"{facts.differences['dtype']}; {told}"] if "dtype" in facts.differences else []
    return notes + [
        f"config.json: head_dim {one.head_size} in the {side}; its CPU build has kernels for {CPU_HEADS} only; serve on a GPU"
        for side, one in facts.shapes.items()
        if one.head_size not in CPU_HEADS
    ]


def _rule(facts: EngineFacts) -> str:
    return "sample" if facts.sampled_drafts_win else "greedy-draft"


register(Engine("vLLM", "0.32", "vllm.j2", 1, _rule, _refusals, notes=_notes, one_pass=True))
