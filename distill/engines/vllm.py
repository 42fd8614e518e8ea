"""vLLM: its refusals, and the rule that the command selects.

Counts as read in 0.32, docs/features/speculative_decoding/acceptance_metrics.md (experimental there), and pull request 48915. Counters:
`vllm:spec_decode_num_*` with `_total`, in its Python API and old versions without.
"""

import time
from typing import TYPE_CHECKING, Any

from distill.engines.protocol.counters import PREFIX, named_counters, names_like_vllm
from distill.engines.protocol.counts import CountsFormat
from distill.engines.protocol.engine import STREAM, Dialect, Engine, Service, register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distill.config.target import TargetConfig
    from distill.engines.protocol.facts import EngineFacts, LoadRange

NAME = "vLLM"
RULES, TRUNCATED_RULES = ("greedy-draft", "sample", "block"), ("greedy-draft", "sample-untruncated")
COUNTS = ("--per-request-spec-decode-metrics", "detailed")
# If the draft's path contains one of these words, it selects another speculation method and ignores the configuration.
REROUTED_WORDS = ("eagle-", "eagle3", "dflash", "dspark")
# Head sizes of v1/attention/backends/cpu_attn.py; on GPUs flash_attn.py takes multiples of 8.
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Of drafts whose layers have windows of attention.
WINDOW_THREADS = "vllm#46032, 2026-06-18, and vllm#50169, 2026-07-28, both open"
# Model types whose own head it never loads (model_executor/models), so an untied one is lost.
ALWAYS_TIED = ("cohere", "cohere2", "gemma2")
_START = time.time_ns()


def _path_fault(path: str) -> str:
    word = next((word for word in REROUTED_WORDS if word in path.lower()), None)
    return f"vLLM selects another speculation method for a path with {word!r} in it" if word else ""


def drawn_rule(facts: "EngineFacts") -> str:
    """The rule of sampled drafts, which vLLM draws at the temperature alone."""
    return (TRUNCATED_RULES if facts.sampling is not None and facts.sampling.truncates else RULES)[1]


def sampled_drafts_win(facts: "EngineFacts") -> bool:
    """Whether replay predicts more acceptance for sampled drafts than for argmax drafts."""
    drawn, argmax = (facts.taus.get(rule) for rule in (drawn_rule(facts), "greedy-draft"))
    return facts.sampled and drawn is not None and argmax is not None and drawn > argmax


def split_cache(facts: "EngineFacts") -> bool:
    """Whether vLLM puts the draft's layers into several groups of its cache."""
    target, draft = (set(facts.layers.get(side, ())) for side in ("target", "draft"))
    return len(draft) > 1 or (len(target) > 1 and draft != {facts.FULL} and draft <= target)


def schedule(facts: "EngineFacts") -> "tuple[LoadRange, ...]":
    """`gamma_by_load` with 1 for plain decoding."""
    return tuple((first, last, gamma or 1) for first, last, gamma in facts.gamma_by_load)


def _refusals(facts: "EngineFacts") -> list[str]:
    reasons = []
    if fault := _path_fault(facts.draft):
        reasons.append(f"{fault}; rename the directory")
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
                f"config.json: {heads} heads, {kv_heads} key-value heads, intermediate_size {width} in the {side}; it "
                "cannot split them over "
                f"--tensor-parallel-size {parts}, which the draft shares; use a size that divides them"
            )
    return reasons + facts.lost_heads(ALWAYS_TIED) + _cache(facts)[0]


def _warnings(facts: "EngineFacts") -> list[str]:
    effect = "it computes the draft in the target's dtype, so acceptance can differ from the measured one; export with the target's dtype"
    target, draft = facts.dtypes
    notes = [f"config.json: dtype: {target} in the target, {draft} in the draft; {effect}"] if target != draft else []
    sizes = {side: shape[0] for side, shape in facts.shapes.items() if shape[0] not in CPU_HEADS}
    effect = "its CPU build has no attention kernel for it; serve on a GPU"
    notes += [f"config.json: head_dim {size} in the {side}; {effect}" for side, size in sizes.items()]
    return notes + _cache(facts)[1] + _schedule(facts)


def _cache(facts: "EngineFacts") -> tuple[list[str], list[str]]:
    """Return (reasons, warnings) that come from the kinds of layers, as vLLM's cache groups them."""
    target, draft = (facts.layers.get(side, ()) for side in ("target", "draft"))
    reads = f"config.json: layer_types, sliding_window: the draft's layers read {' and '.join(draft)}, the target's {' and '.join(target)}"
    if split_cache(facts) and (
        facts.STATE in (*target, *draft) or len({*target, *draft} - {facts.FULL, facts.STATE}) > 1
    ):
        threads = "vllm#49112, 2026-07-19, open" if facts.STATE in draft else WINDOW_THREADS
        effect = f"model runner V1 stops at start, since a draft must fit one group of its cache ({threads})"
        return [f"{reads}; {effect}; use a draft whose layers all read {facts.FULL}"], []
    if set(draft) - {facts.FULL, facts.STATE}:
        effect = "the command turns that off, which costs memory" if split_cache(facts) else "if it does, turn that off"
        flag = "--disable-hybrid-kv-cache-manager"
        return [], [
            f"{reads}; such a draft can stop at start with the hybrid cache manager ({WINDOW_THREADS}); {effect} ({flag})"
        ]
    if facts.STATE in target and facts.STATE not in draft:
        effect = "such a pair can stop at start (vllm#43626, 2026-05-26, mended in 0.32; vllm#57721, 2026-09-19, open)"
        return [], [f"{reads}; {effect}; start it once before you rely on it"]
    return [], []


def _schedule(facts: "EngineFacts") -> list[str]:
    plain = facts.load_words([one for one in facts.gamma_by_load if not one[-1]])
    effect = (
        "is faster by the run's timings, but rows of gamma 0 can be slower than either (232 to 24 tokens/s "
        "at the threshold: vllm#49548, open, "
        "also in 0.27.1 on 2026-08-24), so the command drafts 1 token there"
    )
    return [f"num_speculative_tokens_per_batch_size: {plain}, {effect}"] if plain and facts.by_load else []


def _rule(facts: "EngineFacts") -> str:
    return drawn_rule(facts) if sampled_drafts_win(facts) else "greedy-draft"


def _words(facts: "EngineFacts") -> dict[str, Any]:
    return {
        "drawn_rule": drawn_rule(facts),
        "sampled_drafts_win": sampled_drafts_win(facts),
        "split_cache": split_cache(facts),
        "schedule": schedule(facts),
    }


def _answering(
    target: "TargetConfig", dtype: str, context: int | None, cores: "Sequence[int]", memory: float
) -> tuple[list[str], dict[str, str]]:
    words = [
        "serve",
        target.path,
        "--dtype",
        dtype,
        "--logprobs-mode",
        "processed_logprobs",
        "--generation-config",
        "vllm",
    ]
    words += ["--revision", target.revision, "--tokenizer-revision", target.revision] if target.revision else []
    words += ["--trust-remote-code"] if target.trust_remote_code else []
    words += ["--max-model-len", str(context)] if context else []
    if not cores:
        return [*words, "--gpu-memory-utilization", f"{memory:.2f}"], {}
    # By itself each would bind to the same cores and reserve most of the memory. A prompt that is read in parts ends a CPU
    # server of vLLM 0.32, because it sets the generator of a request with a seed back, which torch has for GPUs only.
    gigabytes = max(1, int(memory / 2**30))
    return [*words, "--no-enable-chunked-prefill"], {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(gigabytes),
    }


register(
    Engine(
        "vllm",
        NAME,
        "0.32",
        1,
        RULES,
        _rule,
        _refusals,
        _warnings,
        _words,
        _path_fault,
        TRUNCATED_RULES,
        one_pass=True,
        reads_int8="runs int8 on GPUs only: for a CPU export with --quantize int8-dynamic",
        service=Service(
            "vllm",
            ".venv-vllm",
            ("--speculative-config",),
            key_variable="VLLM_API_KEY",
            counts=COUNTS,
            answering=_answering,
        ),
        dialect=Dialect(
            owners=("vllm",),
            reports=" ".join(COUNTS),
            asks=STREAM,
            # Another salt for each seed: no turn finds its prompts in the prefix cache.
            timed=lambda seed: STREAM | {"cache_salt": f"{_START}-{seed}"},
            counts=CountsFormat(
                "num_draft_tokens",
                ("metrics.speculative_decoding",),
                ("num_accepted_draft_tokens",),
                ("num_draft_tokens",),
                ("num_spec_steps",),
            ),
            counters=named_counters(names_like_vllm("vllm", PREFIX, "generation_tokens")),
            log_lines={
                r"enforce_eager=True": "graphs are not engaged: the steps of target and draft are eager (--enforce-eager)",
                r"Using V2 Model Runner": "the draft is eager: model runner V2 captures no graphs of its steps",
                r"Async scheduling (not supported|is not compatible|will be disabled|is disabled)": (
                    "asynchronous scheduling is off"
                ),
            },
        ),
    )
)
