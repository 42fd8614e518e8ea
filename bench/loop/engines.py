"""The engines of a loop: how each is started with or without a draft, and which constraint a request can have."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from distill.config.run import RunConfig
from distill.engines.protocol.engine import BUILT
from distill.run.verdict_record import drafting_to_serve, load_verdict
from speculative.errors import UserError

STUB = Path(__file__).resolve().parents[1] / "stub_engine.py"
# Options that vLLM's CPU build needs in addition to the command in SERVING.md.
_VLLM, _COUNTS = ("--enforce-eager", "--dtype", "float32"), ("--per-request-spec-decode-metrics", "detailed")
# Several engines share the cores; without this, each would bind itself to the first core.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
# vLLM rejects logit_bias with a draft; the stub engine has no grammars.
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "vllm": {"response_format": {"type": "json_object"}},
    "stub": {"logit_bias": {"4": -100.0}},
}


def engine_of(asked: str) -> str:
    """`vllm` or `stub`.

    Raises:
        UserError: an unknown engine, or vLLM is not installed.
    """
    if asked not in ("auto", "stub", "vllm"):
        raise UserError(f"--engine {asked}: give auto, vllm or stub")
    installed = (BUILT / ".venv-vllm" / "bin" / "vllm").exists() or shutil.which("vllm") is not None
    if asked == "vllm" and not installed:
        raise UserError("--engine vllm: not installed; run `make engines` (vLLM for CPUs), or give --engine stub")
    return "vllm" if installed and asked != "stub" else "stub"


def engine_words(engine: str, config: RunConfig, draft: str, port: str, exported: str) -> list[str]:
    """The command that starts an engine with the gamma, rule and drafting of the run's judgement.

    Args:
        draft: a version's folder, or `none`.
        exported: any version's folder; it describes how the target is served.
    """
    verdict = load_verdict(config.folder)
    drafting = drafting_to_serve(verdict, verdict.drafts[-1].drafting == "parallel")
    rule = "sample" if config.judge_rule.draws else "greedy-draft"
    method: dict[str, Any] = {"method": "draft_model", "model": draft, "num_speculative_tokens": config.judge.gamma}
    method |= {"draft_sample_method": "probabilistic"} if rule == "sample" else {}
    method |= {"parallel_drafting": True} if drafting == "parallel" else {}
    drafts = [] if draft == "none" else ["--speculative-config", json.dumps(method)]
    if engine == "stub":
        return [sys.executable, str(STUB), "serve", config.target.path, "--port", port, *drafts]
    serve = [sys.executable, "-P", "-m", "distill.cli", "serve", "--target", config.target.path, "--port", port]
    if draft == "none":
        return [*serve, exported, "--alone", "--", *_VLLM]
    return [*serve, draft, "--", *_VLLM, *_COUNTS, *drafts]
