"""vLLM: its refusals, and the rule that the command selects."""

from distill.export.engine import Engine, Service, register, rerouted_word
from distill.export.facts import FULL, STATE, EngineFacts
from distill.export.load_table import load_words

# Head sizes of v1/attention/backends/cpu_attn.py; on GPUs flash_attn.py takes multiples of 8.
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Of drafts whose layers have windows of attention.
WINDOW_THREADS = "vllm#46032, 2026-06-18, and vllm#50169, 2026-07-28, both open"
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
    return reasons + facts.lost_heads(ALWAYS_TIED) + _cache(facts)[0]


def _warnings(facts: EngineFacts) -> list[str]:
    told = "it computes the draft in the target's dtype, so acceptance can differ from the measured one; export with the target's dtype"
    target, draft = facts.dtypes
    notes = [f"config.json: dtype: {target} in the target, {draft} in the draft; {told}"] if target != draft else []
    sizes = {side: shape[0] for side, shape in facts.shapes.items() if shape[0] not in CPU_HEADS}
    told = "its CPU build has no attention kernel for it; serve on a GPU"
    notes += [f"config.json: head_dim {size} in the {side}; {told}" for side, size in sizes.items()]
    return notes + _cache(facts)[1] + _schedule(facts)


def _cache(facts: EngineFacts) -> tuple[list[str], list[str]]:
    """Return (reasons, warnings) that come from the kinds of layers, as vLLM's cache groups them."""
    target, draft = (facts.layers.get(side, ()) for side in ("target", "draft"))
    reads = f"config.json: layer_types, sliding_window: the draft's layers read {' and '.join(draft)}, the target's {' and '.join(target)}"
    if facts.split_cache and (STATE in (*target, *draft) or len({*target, *draft} - {FULL, STATE}) > 1):
        threads = "vllm#49112, 2026-07-19, open" if STATE in draft else WINDOW_THREADS
        told = f"model runner V1 stops at start, since a draft must fit one group of its cache ({threads})"
        return [f"{reads}; {told}; use a draft whose layers all read {FULL}"], []
    if set(draft) - {FULL, STATE}:
        told = "the command turns that off, which costs memory" if facts.split_cache else "if it does, turn that off"
        flag = "--disable-hybrid-kv-cache-manager"
        return [], [
            f"{reads}; such a draft can stop at start with the hybrid cache manager ({WINDOW_THREADS}); {told} ({flag})"
        ]
    if STATE in target and STATE not in draft:
        told = "such a pair can stop at start (vllm#43626, 2026-05-26, mended in 0.32; vllm#57721, 2026-09-19, open)"
        return [], [f"{reads}; {told}; start it once before you rely on it"]
    return [], []


def _schedule(facts: EngineFacts) -> list[str]:
    plain = load_words([one for one in facts.gamma_by_load if one not in facts.schedule])
    told = (
        "is faster by the run's timings, but rows of gamma 0 can be slower than either (232 to 24 tokens/s at the threshold: vllm#49548, open, "
        "also in 0.27.1 on 2026-08-24), so the command drafts 1 token there; to get the row, start vLLM with it, run `understudy readback --plain "
        "URL --concurrency N` at that load, and export again"
    )
    return [f"num_speculative_tokens_per_batch_size: {plain}, {told}"] if plain and facts.by_load else []


def _rule(facts: EngineFacts) -> str:
    return facts.drawn_rule if facts.sampled_drafts_win else "greedy-draft"


_SERVICE = Service(
    "vllm",
    "vllm",
    ".venv-vllm",
    ("--speculative-config",),
    key_variable="VLLM_API_KEY",
    counts=("--per-request-spec-decode-metrics", "detailed"),
)
register(Engine("vLLM", "0.32", "vllm.j2", 1, _rule, _refusals, warnings=_warnings, one_pass=True, service=_SERVICE))
