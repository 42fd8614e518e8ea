"""Start vLLM with a pair and one answer: `python start_vllm.py TARGET DRAFT on|off` (of its hybrid cache manager)."""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    target, draft, manager = sys.argv[1:]
    drafting = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    engine = LLM(
        target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        speculative_config=drafting,
        disable_hybrid_kv_cache_manager=manager == "off",
    )
    settings = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (answer,) = engine.generate([{"prompt_token_ids": list(range(10, 40))}], settings)
    print("ids", *answer.outputs[0].token_ids)
