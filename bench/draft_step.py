"""What a draft step costs in the block loop, split: the bare model call, cold caches, and what the loop adds.

    python bench/draft_step.py                                          # embedded target, its first and last layer
    python bench/draft_step.py --target DIR --draft DIR

`hot`: the bare one-token call (transformers' own cache) right behind itself. `cold`: the same behind the target's verify
call, which touches all the target's weights: mean of the gamma calls of a block. `loop`: a step of the block loop,
drafting and all. `twin`: the same with the slow twins of what makes the loop fast (the model's own forward for its layers
called directly, `no_grad` for inference mode, a sort for top-p). All in turn, many times, on one thread; seconds are CPU
time of that thread, of which other programs take nothing but cache lines, and figures are low quantiles, which those
disturb least.
"""

from distill.faults import run_script

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from distill.models.carving import carve
from distill.models.load import load_model
from distill.run.provenance import describe_run
from result_file import write_result
from speculative.decoder import responses as clock_module
from speculative.decoder.block_loop import BlockLoop
from speculative.decoder.responses import DecodeSettings, Timing
from speculative.drafters.drafter import ModelDrafter
from speculative.engine.models import evaluating, vocab_rows
from speculative.rules import sampling as sampling_rules
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
        began = time.thread_time()
        self.models[name](input_ids=self.ids[:, :tokens], past_key_values=self.caches[name], use_cache=True)
        seconds = time.thread_time() - began
        self.caches[name].crop(-tokens)
        return seconds

    def times(self) -> dict[str, float]:
        """Seconds of a draft call hot and cold, and of a verify call."""
        self.call("draft", 1)
        hot = [self.call("draft", 1) for _ in range(self.gamma)]
        verify = self.call("target", self.gamma + 1)
        cold = [self.call("draft", 1) for _ in range(self.gamma)]
        return {"hot": float(np.mean(hot)), "cold": float(np.mean(cold)), "verify": verify}


def in_the_loop(target: Any, draft: Any, ids: torch.Tensor, gamma: int, blocks: int) -> Callable[[], dict[str, float]]:
    """A function that runs one block of every mode, fast and twin, and gives the seconds of its stages by name."""
    loops = {}
    for mode, sampling in MODES.items():
        for twin in (False, True):
            rule: Any = "greedy" if sampling.greedy else "sample"
            settings = DecodeSettings(sampling, gamma, rule, max_tokens=(blocks + 2) * (gamma + 1))
            loop = BlockLoop(target, ModelDrafter(draft), 1, ids.shape[1] + settings.max_tokens, settings)
            if twin:
                loop._step_mode = torch.no_grad
                for cached in (loop.target, loop.drafter.cached):
                    cached._direct = None
            loop.admit([0], [(mode, ids[0].tolist())])
            loops[mode, twin] = loop

    def run() -> dict[str, float]:
        seconds = {}
        for (mode, twin), loop in loops.items():
            loop.timing = Timing()
            with ExitStack() as stack:
                stack.enter_context(patch.object(clock_module, "time", SimpleNamespace(perf_counter=time.thread_time)))
                if twin:
                    stack.enter_context(patch.object(sampling_rules, "nucleus", sampling_rules.nucleus_by_sorting))
                began = time.thread_time()
                loop.run_block()
                name = mode + (", twin" if twin else "")
                seconds[f"block, {name}"] = time.thread_time() - began
            timing = loop.timing
            seconds[f"loop, {name}"] = timing.draft_seconds / gamma
            seconds[f"verify, {name}"] = timing.verify_seconds
            seconds[f"accept, {name}"] = timing.accept_seconds
        return seconds

    return run


def main(
    target: Annotated[str, typer.Option(help="directory of the target, or `embedded`")] = "embedded",
    draft: Annotated[str, typer.Option(help="directory of the draft; empty = two layers of the target")] = "",
    gamma: Annotated[int, typer.Option(min=1)] = 3,
    context: Annotated[int, typer.Option(help="tokens of the text before the block", min=8)] = 120,
    blocks: Annotated[int, typer.Option(help="blocks timed of each kind", min=5)] = 100,
    out: Annotated[Path | None, typer.Option(help="write the result here as JSON")] = None,
) -> None:
    """Time hot and cold bare calls and the steps of the loop in turn."""
    torch.set_num_threads(1)
    model = load_model("target", target, dtype=torch.float32).eval()
    small = load_model("draft", draft, dtype=torch.float32).eval() if draft else carve(model, [0, -1]).eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocab_rows(model), size=(1, context)))
    seen: dict[str, list[float]] = {}
    with evaluating(model, small):
        bare = BareCalls(model, small, ids, gamma)
        run_block = in_the_loop(model, small, ids, gamma, blocks)
        for block in range(blocks):
            timed = bare.times() | run_block()
            if block:  # The first of each is a warm-up.
                for name, seconds in timed.items():
                    seen.setdefault(name, []).append(seconds)
    milliseconds = {name: 1e3 * float(np.quantile(values, QUANTILE)) for name, values in seen.items()}
    ratios = {mode: float(np.median(np.divide(seen[f"block, {mode}, twin"], seen[f"block, {mode}"]))) for mode in MODES}
    table = Table("", "ms", "over the bare call, hot")
    for name, value in milliseconds.items():
        table.add_row(name, f"{value:.2f}", f"{value / milliseconds['hot']:.2f}")
    console = Console()
    console.print(table)
    console.print("a block with the slow twins over one without:", {mode: round(r, 3) for mode, r in ratios.items()})
    if out is not None:
        result = {
            "machine": describe_run(0) | {"uncommitted_changes": None, "argv": None, "dtype": "float32"},
            "target": Path(target).name,
            "draft": Path(draft).name if draft else "carved 0,-1",
            "gamma": gamma,
            "context": context,
            "milliseconds": milliseconds,
            "twin_over_fast": ratios,
        }
        write_result(out, result)


if __name__ == "__main__":
    run_script(main)
