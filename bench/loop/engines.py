"""The engines of a loop: how each is started with a draft or without, and what a constrained request says to it."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from distill.commands.serve import BUILT
from distill.config.run import RunConfig
from distill.run.verdict_record import drafting_to_serve, load_verdict
from speculative.errors import UserError

STUB = Path(__file__).resolve().parents[1] / "stub_engine.py"
# What vLLM is started with besides SERVING.md's command, as its CPU build wants it.
_VLLM, _COUNTS = ("--enforce-eager", "--dtype", "float32"), ("--per-request-spec-decode-metrics", "detailed")
# Several engines share the cores: each of them would bind itself to the first one.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"
}  # fmt: skip
# vLLM takes no logit_bias beside a draft, ours no grammar.
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "vllm": {"response_format": {"type": "json_object"}}, "stub": {"logit_bias": {"4": -100.0}}
}  # fmt: skip


def engine_of(asked: str) -> str:
    """`vllm` or `stub`.

    Raises:
        UserError: another word, or vLLM where there is none.
    """
    if asked not in ("auto", "stub", "vllm"):
        raise UserError(f"--engine {asked}: auto, vllm or stub")
    installed = (BUILT / "vllm").exists() or shutil.which("vllm") is not None
    if asked == "vllm" and not installed:
        raise UserError("--engine vllm: it is not installed; `make engines` builds it for CPUs, or give --engine stub")
    return "vllm" if installed and asked != "stub" else "stub"


def engine_words(engine: str, config: RunConfig, draft: str, port: str, log: str, exported: str) -> list[str]:
    """The words that start an engine as the run judges: its gamma, rule and way of drafting.

    Args:
        draft: a version's folder, or `none`.
        log: of vLLM itself.
        exported: any version's folder: it says how the target is served.
    """
    verdict, gamma = load_verdict(config.folder), str(config.judge.gamma)
    drafting = drafting_to_serve(verdict, verdict.drafts[-1].drafting == "parallel")
    rule = "sample" if config.judge_rule == "sample" else "greedy-draft"
    if engine == "stub":
        words = [str(STUB), config.target.path, draft, "--gamma", gamma, "--rule", rule]
        return [sys.executable, *words, "--drafting", drafting, "--port", port]
    serve = [
        sys.executable, "-P", "-m", "distill.cli", "serve", "--target", config.target.path, "--port", port, "--log", log,
    ]  # fmt: skip
    if draft == "none":
        return [*serve, exported, "--alone", "--", *_VLLM]
    method: dict[str, Any] = {"method": "draft_model", "model": draft, "num_speculative_tokens": config.judge.gamma}
    method |= {"draft_sample_method": "probabilistic"} if rule == "sample" else {}
    method |= {"parallel_drafting": True} if drafting == "parallel" else {}
    return [*serve, draft, "--", *_VLLM, *_COUNTS, "--speculative-config", json.dumps(method)]
