"""The decoder on an accelerator at real shapes, beside transformers and beside what the memory bus allows.

    python bench/gpu_decode.py --out bench/results/gpu_decode.json                # 8 B target; 0.5 B and 4-layer drafts
    python bench/gpu_decode.py --tiny --device cpu --out /tmp/x.json              # the same program in seconds

Nothing is downloaded. Weights are random at the real sizes, but made so that acceptance is known: every attention and
MLP block adds zero to the residual stream (its last matrix is zero, its arithmetic is done all the same), and the
output head holds the input embeddings in permuted order, so the likeliest next token is a permutation of the last
one. The draft's permutation differs for a share 1 - alpha of the tokens. Any decoder, transformers' too, then accepts
alpha of the drafted tokens.

The floor of a block is the time in which the memory bus (at the bandwidth of a large copy, measured here) reads gamma
times the draft's weights and once the target's, with their caches. `outside_share` is the part of a block that is not
spent in the models: what a block takes over the same model calls alone, run the same way and back to back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedModel

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Timing
from speculative.drafters.drafter import ModelDrafter
from speculative.engine.cached_model import CachedModel
from speculative.engine.memory import cache_bytes
from speculative.rules.sampling import GREEDY, SamplingSettings

console = Console(width=140)


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int


TARGET = Shape(4096, 32, 32, 8, 14336)  # 8 B parameters with a vocabulary of 128 k
DRAFTS = {"0.5B": Shape(896, 24, 14, 2, 4864), "4 layers": Shape(2048, 4, 16, 4, 5632)}
TINY_TARGET = Shape(64, 4, 4, 2, 128)
TINY_DRAFTS = {"tiny": Shape(32, 1, 2, 1, 64)}


def permutation_model(
    shape: Shape, vocab: int, follows: torch.Tensor, dtype: torch.dtype, device: torch.device, context: int
) -> PreTrainedModel:
    """A Llama of this shape whose likeliest token behind token t is follows[t], by a wide margin."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = model.model.embed_tokens.weight
        embedding.normal_()
        # A row of the head times the normed embedding of its token is width / 4; of any other about sqrt(width) / 4.
        model.lm_head.weight[follows.to(device)] = embedding / 4
    model.generation_config.eos_token_id = None
    return model


def pair(
    shapes: tuple[Shape, Shape], vocab: int, alpha: float, dtype: torch.dtype, device: torch.device, context: int
) -> Any:
    """Target and draft whose likeliest tokens agree behind a share alpha of all tokens."""
    random = torch.Generator().manual_seed(0)
    follows = torch.randperm(vocab, generator=random)
    other = follows.clone()
    wrong = torch.rand(vocab, generator=random) > alpha
    other[wrong] = follows[wrong].roll(1)
    return (
        permutation_model(shapes[0], vocab, follows, dtype, device, context),
        permutation_model(shapes[1], vocab, other, dtype, device, context),
    )


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_bandwidth(device: torch.device, tiny: bool) -> float:
    """Bytes per second that a copy reads and writes, the best of some."""
    source = torch.empty((64 if tiny else 4096) * 1024**2, dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        wait(device)
        began = time.perf_counter()
        sink.copy_(source)
        wait(device)
        best = max(best, 2 * source.numel() / (time.perf_counter() - began))
    return best


def weight_bytes(model: PreTrainedModel) -> int:
    """What one forward has to read: all weights but the input embedding."""
    embedding = model.get_input_embeddings().weight
    return sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight is not embedding)


def roofline_seconds(target: Any, draft: Any, gamma: int, rows: int, positions: int, bandwidth: float) -> float:
    """Seconds to read everything one block needs once."""
    draft_bytes = weight_bytes(draft) + cache_bytes(draft, rows, positions)
    return (weight_bytes(target) + cache_bytes(target, rows, positions) + gamma * draft_bytes) / bandwidth


def ours(target: Any, draft: Any, prompts: list, settings: DecodeSettings, runner: str) -> tuple[int, int, Timing]:
    responses, timing = decode(
        target,
        ModelDrafter(draft) if settings.gamma else None,
        prompts,
        settings,
        batch_size=len(prompts),
        runner=runner,
    )
    tokens = sum(len(response.response_ids) for response in responses)
    return tokens, sum(response.blocks for response in responses), timing


def theirs(target: Any, draft: Any, prompt: tuple, gamma: int, max_tokens: int, greedy: bool) -> float:
    """Tokens per second of transformers' assisted generation (plain with gamma 0); batch 1 is all it does."""
    if gamma:
        draft.generation_config.num_assistant_tokens = gamma
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
    config = GenerationConfig(do_sample=not greedy, top_k=0, max_new_tokens=max_tokens, pad_token_id=-1)
    ids = torch.tensor([prompt[1]], device=target.device)
    wait(target.device)
    began = time.perf_counter()
    with torch.no_grad():
        out = target.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            **({"assistant_model": draft} if gamma else {}),
        )
    wait(target.device)
    return (out.shape[1] - ids.shape[1]) / (time.perf_counter() - began)


def bare_block_seconds(target: Any, draft: Any, rows: int, gamma: int, runner: str, blocks: int = 20) -> float:
    """Seconds of a block's model calls and nothing else: gamma draft steps and one verify call, in our cache."""
    capacity, starts = 512, np.full(rows, 200)
    models = [CachedModel(model, "bare", rows, capacity, runner) for model in (target, draft)]
    one, all_of_them = (torch.ones((rows, width), dtype=torch.int64, device=target.device) for width in (1, gamma + 1))
    with torch.no_grad():
        for block in range(blocks + 2):
            if block == 2:
                wait(target.device)
                began = time.perf_counter()
            for _ in range(gamma):
                models[1].feed(one, starts, 1)
            models[0].feed(all_of_them, starts, gamma + 1)
        wait(target.device)
    return (time.perf_counter() - began) / blocks


def best_of(repeats: int, run: Callable[[], Any], rate: Callable[[Any], float]) -> Any:
    """The fastest of some runs, behind one that is not counted."""
    run()
    return max((run() for _ in range(repeats)), key=rate)


def measure(
    target: Any,
    draft: Any,
    name: str,
    batch: int,
    mode: str,
    gamma: int,
    max_tokens: int,
    bandwidth: float,
    repeats: int,
) -> list[dict[str, Any]]:
    """Cells of one batch size and mode: our decoder with each runner."""
    vocab = target.config.vocab_size
    ids = np.random.default_rng(batch).integers(1, vocab, size=(batch, 128))
    prompts = [(str(row), row_ids.tolist()) for row, row_ids in enumerate(ids)]
    sampling, rule = (GREEDY, "greedy") if mode == "greedy" else (SamplingSettings(1.0), "sample")
    settings = DecodeSettings(sampling, gamma, rule, max_tokens)  # type: ignore[arg-type]
    alone = DecodeSettings(sampling, 0, rule, max_tokens)  # type: ignore[arg-type]
    runners = ("eager", "graph") if target.device.type == "cuda" else ("eager",)

    def steady(timing: Timing) -> tuple[float, int]:
        """Seconds and target calls behind the prefill and without blocks that captured a graph."""
        seconds = timing.total_seconds - timing.prefill_seconds - timing.recording_seconds
        return seconds, timing.target_calls - timing.recording_calls

    def rate(result: tuple[int, int, Timing]) -> float:
        seconds, calls = steady(result[2])
        return result[0] / result[2].target_calls * calls / seconds

    theirs_assisted = theirs_plain = None
    if batch == 1:
        theirs_assisted = best_of(
            repeats, lambda: theirs(target, draft, prompts[0], gamma, max_tokens, mode == "greedy"), float
        )
        theirs_plain = best_of(
            repeats, lambda: theirs(target, draft, prompts[0], 0, max_tokens, mode == "greedy"), float
        )

    def from_start(result: tuple[int, int, Timing]) -> float:
        # Prefill included, as transformers' time is; capturing graphs is done once and not counted.
        return result[0] / (result[2].total_seconds - result[2].recording_seconds)

    cells = []
    for runner in runners:
        tokens, blocks, timing = best_of(repeats, lambda how=runner: ours(target, draft, prompts, settings, how), rate)
        plain = best_of(repeats, lambda how=runner: ours(target, draft, prompts, alone, how), rate)
        seconds, calls = steady(timing)
        own_rate = rate((tokens, blocks, timing))
        floor = calls * roofline_seconds(target, draft, gamma, batch, 128 + max_tokens // 2, bandwidth)
        cells.append(
            {
                "device": target.device.type,
                "draft": name,
                "runner": runner,
                "batch": batch,
                "mode": mode,
                "gamma": gamma,
                "drafter": "draft",
                "tokens_per_second": own_rate,
                "tau": tokens / blocks,
                "floor_share": floor / seconds,
                "outside_share": 1 - calls * bare_block_seconds(target, draft, batch, gamma, runner) / seconds,
                "vs_hf_assisted": from_start((tokens, blocks, timing)) / theirs_assisted if theirs_assisted else None,
                "vs_hf_plain": from_start((tokens, blocks, timing)) / theirs_plain if theirs_plain else None,
                "vs_plain": own_rate / rate(plain),
                "milliseconds_per_block": 1e3 * seconds / calls,
                "stages_ms": {
                    stage: 1e3 * getattr(timing, f"{stage}_seconds") / calls for stage in ("draft", "verify", "accept")
                },
                "peak_bytes": timing.peak_bytes,
            }
        )
    return cells


def main(
    out: Annotated[Path, typer.Option(help="JSON to write")] = Path("bench/results/gpu_decode.json"),
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    alpha: Annotated[float, typer.Option(help="share of tokens behind which the draft agrees", min=0, max=1)] = 0.8,
    gamma: Annotated[int, typer.Option(help="drafted tokens per block", min=1)] = 5,
    max_tokens: Annotated[int, typer.Option(help="tokens of a response", min=8)] = 256,
    batches: Annotated[str, typer.Option(help="rows, comma-separated")] = "1,8,32",
    repeats: Annotated[int, typer.Option(help="counted runs of each; the fastest is kept", min=1)] = 2,
    tiny: Annotated[bool, typer.Option(help="small shapes: the program in seconds")] = False,
) -> None:
    """Measure at real shapes."""
    place = torch.device(device)
    vocab, dtype = (512, torch.float32) if tiny else (128_256, torch.bfloat16)
    target_shape, drafts = (TINY_TARGET, TINY_DRAFTS) if tiny else (TARGET, DRAFTS)
    bandwidth = measured_bandwidth(place, tiny)
    cells: list[dict[str, Any]] = []
    for name, shape in drafts.items():
        target, draft = pair((target_shape, shape), vocab, alpha, dtype, place, 128 + max_tokens + 64)
        for batch in map(int, batches.split(",")):
            for mode in ("greedy", "sample"):
                cells += measure(target, draft, name, batch, mode, gamma, max_tokens, bandwidth, repeats)
                console.print({key: value for key, value in cells[-1].items() if key != "stages_ms"})
        del target, draft
        if place.type == "cuda":
            torch.cuda.empty_cache()
    machine = {
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": __import__("transformers").__version__,
        "bandwidth_bytes_per_second": bandwidth,
        "dtype": str(dtype).removeprefix("torch."),
        "alpha_by_construction": alpha,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".tmp")
    partial.write_text(json.dumps({"machine": machine, "max_tokens": max_tokens, "cells": cells}, indent=1) + "\n")
    partial.replace(out)
    columns = (
        "draft",
        "runner",
        "batch",
        "mode",
        "tokens_per_second",
        "tau",
        "floor_share",
        "outside_share",
        "vs_hf_assisted",
        "vs_plain",
    )
    table = Table(*columns)
    for cell in cells:
        table.add_row(
            *(f"{cell[name]:.3f}" if isinstance(cell[name], float) else str(cell[name] or "") for name in columns)
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
