"""transformers' own `generate` for bench/peers.py, in a process of its own but in the project's environment."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from worker import Setting, serve


class Transformers:
    """Plain or assisted generation; assisted takes one prompt at a time, so it refuses a larger batch."""

    def convert(self, model: str, to: str, weights: str) -> str:
        if weights == "int8":
            raise ValueError("its 8-bit weights need a GPU's library")
        return model

    def open(self, setting: Setting) -> None:
        if setting.draft is not None and setting.batch > 1:
            raise ValueError("assisted generation takes one prompt at a time")
        torch.set_num_threads(setting.threads)
        self.target = _load(setting.target, setting.weights)
        self.options: dict[str, Any] = {}
        self.pad = setting.eos_ids[0] if setting.eos_ids else 0
        if setting.draft is not None:
            draft = _load(setting.draft, setting.weights)
            draft.generation_config.num_assistant_tokens = setting.gamma
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0
            self.options["assistant_model"] = draft
        self.options["generation_config"] = GenerationConfig(
            do_sample=False,
            max_new_tokens=setting.max_tokens,
            eos_token_id=list(setting.eos_ids) or None,
            pad_token_id=self.pad,
        )

    def decode(self, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
        width = max(map(len, prompts))
        ids_BT = torch.tensor([[self.pad] * (width - len(ids)) + ids for ids in prompts])
        mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        began = time.perf_counter()
        with torch.inference_mode():
            out_BT = self.target.generate(input_ids=ids_BT, attention_mask=mask_BT, **self.options)
        seconds = time.perf_counter() - began
        return out_BT[:, width:].tolist(), seconds

    def close(self) -> None:
        self.target, self.options = None, {}

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("transformers", "torch")}


def _load(folder: str, weights: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, weights)).eval()


if __name__ == "__main__":
    serve(Transformers())
