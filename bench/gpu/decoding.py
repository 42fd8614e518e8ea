"""The decoder at real sizes, compared with transformers' assisted generation and with the memory-bandwidth limit.

The bandwidth limit of a block is the time in which the bus (at the bandwidth of a large copy, measured there) reads gamma times the draft
and once the target, with their caches.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from transformers import GenerationConfig

from gpu.pairs import PAIRS, least_bytes, pair, tiny
from gpu.place import Place, best_of, tried
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Prompt, Timing
from speculative.drafters.drafter import ModelDrafter
from speculative.engine import cached_model
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings

ALPHA, GAMMA = 0.7, 5
SHALLOW, DEEP, ASSISTED = (
    0.90,
    0.70,
    3.0,
)  # marks: share of the bandwidth limit with a draft of few layers, of many; over assisted
LAYERS = "graph of layers"  # as `graph` for a model that fused kernels do not serve
# (batch, mode, runner): what matters most comes first.
PLAN = (
    (1, "greedy", "graph"),
    (1, "sample", "graph"),
    (16, "greedy", "graph"),
    (64, "greedy", "graph"),
    (1, "greedy", LAYERS),
    (1, "greedy", "eager"),
    (16, "sample", "graph"),
    (64, "sample", "graph"),
)
TINY_PLAN = ((1, "greedy", "auto"), (4, "sample", "eager"))


def settings_of(mode: str, gamma: int, max_tokens: int) -> DecodeSettings:
    sampling, rule = (GREEDY, "greedy") if mode == "greedy" else (SamplingSettings(1.0), "sample")
    return DecodeSettings(sampling, gamma, Rule.named(rule), max_tokens)


Run = tuple[int, int, Timing]  # tokens, blocks of all rows, where the time went


def ours(target: Any, draft: Any, prompts: list[Prompt], settings: DecodeSettings, runner: str) -> Run:
    """All prompts in one batch."""
    drafter, batch = ModelDrafter(draft) if settings.gamma else None, len(prompts)
    switched = mock.patch.object(cached_model, "fused_weights", return_value=None)
    with switched if runner == LAYERS else contextlib.nullcontext():
        kind = "graph" if runner == LAYERS else runner
        responses, timing = decode(target, drafter, prompts, settings, batch_size=batch, runner=kind)
    return sum(len(text.response_ids) for text in responses), sum(text.blocks for text in responses), timing


def steady(timing: Timing) -> tuple[float, int]:
    """Seconds and blocks after the prefill, without those that captured or compiled something."""
    seconds = timing.total_seconds - timing.prefill_seconds - timing.recording_seconds
    return seconds, timing.target_calls - timing.recording_calls


def tokens_per_second(run: Run) -> float:
    """Behind the prefill."""
    tokens, _, timing = run
    seconds, blocks = steady(timing)
    return tokens / timing.target_calls * blocks / seconds


def assisted(target: Any, draft: Any, prompt: Prompt, settings: DecodeSettings) -> float:
    """Tokens per second of transformers' assisted generation, prompt included."""
    draft.generation_config.num_assistant_tokens = settings.gamma
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    config = GenerationConfig(
        do_sample=not settings.sampling.greedy, top_k=0, max_new_tokens=settings.max_tokens, pad_token_id=-1
    )
    ids = torch.tensor([prompt[1]], device=target.device)
    began = time.perf_counter()
    with torch.no_grad():
        out = target.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, assistant_model=draft
        )
    return (len(out[0].tolist()) - ids.shape[1]) / (time.perf_counter() - began)


def cells(name: str, place: Place) -> Iterator[dict[str, Any]]:
    """A cell for each batch, mode and runner of one pair."""
    shapes = PAIRS[name]
    deep = shapes[1].layers > 8
    target_shape, draft_shape = (tiny(shapes[0]), tiny(shapes[1], 1)) if place.tiny else shapes
    length, max_tokens = (16, 16) if place.tiny else (128, 128)
    dtype = torch.float32 if place.tiny else torch.bfloat16
    bandwidth = place.bandwidth()
    place.free()
    target, draft = pair(target_shape, draft_shape, ALPHA, dtype, place.device, 2 * (length + max_tokens))
    theirs: dict[str, float] = {}

    def measure(batch: int, mode: str, runner: str) -> dict[str, Any]:
        random = torch.Generator().manual_seed(batch)
        ids = torch.randint(1, target_shape.vocab, (batch, length), generator=random).tolist()
        prompts = [(str(row), row_ids) for row, row_ids in enumerate(ids)]
        settings = settings_of(mode, GAMMA, max_tokens)
        best = best_of(2, lambda: ours(target, draft, prompts, settings, runner), tokens_per_second)
        alone = settings_of(mode, 0, max_tokens)
        plain = best_of(1, lambda: ours(target, draft, prompts, alone, runner), tokens_per_second)
        if batch == 1 and mode not in theirs:
            assisted(target, draft, prompts[0], settings_of(mode, GAMMA, 8))
            theirs[mode] = assisted(target, draft, prompts[0], settings)
        tokens, blocks_of_rows, timing = best
        seconds, blocks = steady(timing)
        own = tokens_per_second(best)
        read = least_bytes(target_shape, draft_shape, GAMMA, batch, length + max_tokens // 2, dtype.itemsize)
        from_start = tokens / (timing.total_seconds - timing.recording_seconds)
        return {
            "tokens_per_second": own,
            "tau": tokens / blocks_of_rows,
            "milliseconds_per_block": 1e3 * seconds / blocks,
            "floor_share": read / bandwidth / (seconds / blocks),
            # Their time has the prompt in it, so has ours; capturing graphs is done once and not counted.
            "vs_hf_assisted": from_start / theirs[mode] if batch == 1 else None,
            "vs_plain": own / tokens_per_second(plain),
            "stages_ms": {
                stage: 1e3 * getattr(timing, f"{stage}_seconds") / blocks
                for stage in ("block", "draft", "verify", "accept")
            },
            "peak_bytes": timing.peak_bytes,
        }

    marks = {"floor_share": DEEP if deep else SHALLOW, "vs_hf_assisted": ASSISTED}
    for batch, mode, runner in TINY_PLAN if place.tiny else PLAN:
        cell = {
            "pair": name,
            "batch": batch,
            "mode": mode,
            "runner": runner,
            "gamma": GAMMA,
            "alpha_by_construction": ALPHA,
        }
        judged = {"marks": marks} if batch == 1 and runner in ("auto", "graph") else {}
        yield tried(cell | judged, lambda: measure(batch, mode, runner))  # noqa: B023
