"""OpenVINO GenAI for bench/peers.py, in the environment that `make peers` builds."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from worker import Setting, die_with_parent, serve

PROMPTS_TOKENS = 4096  # of one prefill call: what 48 short prompts need together


class OpenVino:
    """The stateful pipeline for the target alone at batch 1, where it is the faster one; else continuous batching."""

    def __init__(self) -> None:
        self.pipeline: Any = None
        self.stateful = False

    def convert(self, model: str, to: str, weights: str) -> str:
        """The weights in OpenVINO's own format (16-bit ones as fp16), and the tokenizer, without which it takes no draft."""
        words = [str(Path(sys.prefix) / "bin/optimum-cli"), "export", "openvino", "--task", "text-generation-with-past"]
        made = subprocess.run(
            [
                *words,
                "--weight-format",
                {"float32": "fp32", "bfloat16": "fp16", "int8": "int8"}[weights],
                "--model",
                model,
                to,
            ],
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=die_with_parent,
        )
        if made.returncode:
            raise RuntimeError((made.stderr.strip().splitlines() or ["optimum-cli failed"])[-1])
        return to

    def open(self, setting: Setting) -> None:
        precision = "f32" if setting.weights == "float32" else "bf16"
        hints: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": setting.threads,
        }
        self.stateful = setting.batch == 1 and setting.draft is None
        if self.stateful:
            self.pipeline = genai.LLMPipeline(setting.target, "CPU", ATTENTION_BACKEND="SDPA", **hints)
        else:
            scheduler = genai.SchedulerConfig()
            scheduler.max_num_seqs = setting.batch
            scheduler.max_num_batched_tokens = PROMPTS_TOKENS
            # A repeated prompt would be read from the cache, and nobody else's is.
            scheduler.enable_prefix_caching = False
            drafting = (
                {} if setting.draft is None else {"draft_model": genai.draft_model(setting.draft, "CPU", **hints)}
            )
            self.pipeline = genai.ContinuousBatchingPipeline(setting.target, scheduler, "CPU", {**hints, **drafting})
        self.config = genai.GenerationConfig()
        self.config.max_new_tokens = setting.max_tokens
        self.config.do_sample = False
        if setting.eos_ids:
            self.config.eos_token_id = setting.eos_ids[0]
            self.config.stop_token_ids = set(setting.eos_ids)
        if setting.draft is not None:
            self.config.num_assistant_tokens = setting.gamma

    def decode(self, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
        tensors = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        began = time.perf_counter()
        if self.stateful:
            said = [self.pipeline.generate(tensor, self.config).tokens[0] for tensor in tensors]
        else:
            results = self.pipeline.generate(tensors, [self.config] * len(tensors))
            said = [result.m_generation_ids[0] for result in results]
        seconds = time.perf_counter() - began
        return [[int(one) for one in ids] for ids in said], seconds

    def close(self) -> None:
        self.pipeline = None

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("openvino", "openvino-genai", "optimum-intel")}


if __name__ == "__main__":
    serve(OpenVino())
