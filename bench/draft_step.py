"""What a draft step costs in the block loop, split: the bare model call, cold caches, and what the loop adds.

    python bench/draft_step.py --threads 1                              # embedded target, its first and last layer
    python bench/draft_step.py --target DIR --draft DIR --threads 1

`hot`: the bare one-token call (transformers' own cache) right behind itself. `cold`: the same behind the target's verify
call, which touches all the target's weights: mean of the gamma calls of a block. `loop`: a step of the block loop,
drafting and all. Each is timed in turn, many times; the figure is a low quantile, which other programs disturb least.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from bench.decode import load_pair
from distill.run.provenance import describe_run
from speculative.decoder.block_loop import BlockLoop
from speculative.decoder.responses import DecodeSettings, Timing
from speculative.drafters.drafter import ModelDrafter
from speculative.engine.models import evaluating, vocab_rows
from speculative.rules.sampling import GREEDY, SamplingSettings

QUANTILE = 0.2
MODES = {
    "greedy": GREEDY,
    "sample": SamplingSettings(1.0),
    "sample, top-p": SamplingSettings(0.7, top_p=0.95),
}


class BareCalls:
    """Target and draft on transformers' own caches, both with the same text read."""

    def __init__(self, target: Any, draft: Any, ids: torch.Tensor, gamma: int):
        self.models, self.ids, self.gamma = {"target": target, "draft": draft}, ids, gamma
        self.caches = {name: DynamicCache(config=model.config) for name, model in self.models.items()}
        for name, model in self.models.items():
            model(input_ids=ids, past_key_values=self.caches[name], use_cache=True, logits_to_keep=1)

    def call(self, name: str, tokens: int) -> float:
        """Seconds of one call, which is rolled back."""
        began = time.perf_counter()
        self.models[name](input_ids=self.ids[:, :tokens], past_key_values=self.caches[name], use_cache=True)
        seconds = time.perf_counter() - began
        self.caches[name].crop(-tokens)
        return seconds

    def times(self) -> dict[str, float]:
        """Seconds of a draft call hot and cold, and of a verify call."""
        self.call("draft", 1)
        hot = [self.call("draft", 1) for _ in range(self.gamma)]
        verify = self.call("target", self.gamma + 1)
        cold = [self.call("draft", 1) for _ in range(self.gamma)]
        return {"hot": float(np.mean(hot)), "cold": float(np.mean(cold)), "verify": verify}


def in_the_loop(target: Any, draft: Any, ids: torch.Tensor, gamma: int, blocks: int) -> Callable[[str], dict[str, Any]]:
    """A function that runs one block of a mode and says what a draft step and the rest took."""
    loops = {}
    for mode, sampling in MODES.items():
        rule: Any = "greedy" if sampling.greedy else "sample"
        settings = DecodeSettings(sampling, gamma, rule, max_tokens=(blocks + 2) * (gamma + 1))
        loop = BlockLoop(target, ModelDrafter(draft), 1, ids.shape[1] + settings.max_tokens, settings)
        loop.admit([0], [(mode, ids[0].tolist())])
        loops[mode] = loop

    def run(mode: str) -> dict[str, Any]:
        loop = loops[mode]
        loop.timing = Timing()
        loop.run_block()
        timing = loop.timing
        return {f"loop, {mode}": timing.draft_seconds / gamma, f"verify, {mode}": timing.verify_seconds} | {
            f"accept, {mode}": timing.accept_seconds
        }

    return run


def main(
    target: Annotated[str, typer.Option(help="directory of the target, or `embedded`")] = "embedded",
    draft: Annotated[str, typer.Option(help="directory of the draft; empty = two layers of the target")] = "",
    gamma: Annotated[int, typer.Option(min=1)] = 3,
    context: Annotated[int, typer.Option(help="tokens of the text before the block", min=8)] = 120,
    blocks: Annotated[int, typer.Option(help="blocks timed of each kind", min=5)] = 100,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 = torch's own")] = 0,
    out: Annotated[Path | None, typer.Option(help="write the result here as JSON")] = None,
) -> None:
    """Time hot and cold bare calls and the steps of the loop in turn."""
    if threads:
        torch.set_num_threads(threads)
    model, small, _ = load_pair(target, draft, "float32", "cpu")
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocab_rows(model), size=(1, context)))
    seen: dict[str, list[float]] = {}
    with evaluating(model, small):
        bare = BareCalls(model, small, ids, gamma)
        run_block = in_the_loop(model, small, ids, gamma, blocks)
        for block in range(blocks):
            timed = [bare.times(), *(run_block(mode) for mode in MODES)]
            if block:  # The first of each is a warm-up.
                for name, seconds in (item for times in timed for item in times.items()):
                    seen.setdefault(name, []).append(seconds)
    milliseconds = {name: 1e3 * float(np.quantile(values, QUANTILE)) for name, values in seen.items()}
    table = Table("a draft step", "ms", "over the bare call, hot")
    for name, value in milliseconds.items():
        table.add_row(name, f"{value:.2f}", f"{value / milliseconds['hot']:.2f}")
    Console().print(table)
    if out is not None:
        result = {
            "machine": describe_run(0) | {"uncommitted_changes": None, "argv": None, "dtype": "float32"},
            "target": Path(target).name,
            "draft": Path(draft).name if draft else "carved 0,-1",
            "gamma": gamma,
            "context": context,
            "milliseconds": milliseconds,
        }
        partial = out.with_suffix(".tmp")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(out)


if __name__ == "__main__":
    typer.run(main)
