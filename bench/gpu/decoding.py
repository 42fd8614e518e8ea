"""The decoder at real sizes, compared with the memory-bandwidth limit and with the target alone.

`limit_share`, by wall clock: the bandwidth limit of a block is the time in which the bus (at the bandwidth of a large copy,
measured there) reads gamma times the draft and once the target, with their caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpu.pairs import PAIRS, least_bytes, pair, tiny
from gpu.place import Place, best_of, tried
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Prompt, Timing
from speculative.drafters.drafter import ModelDrafter
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

ALPHA, GAMMA = 0.7, 5
MARKS = {"Qwen3 8B, 0.6B": 0.70, "Qwen3 8B, its first 4 layers": 0.85}  # of the bandwidth limit, at batch 1
RULES = ("sample", "greedy-draft", "block")
BATCHES, TINY_BATCHES = (1, 16, 64), (1, 4)


def settings_of(rule: str, gamma: int, max_tokens: int) -> DecodeSettings:
    return DecodeSettings(SamplingSettings(1.0), gamma, Rule.named(rule), max_tokens)


Run = tuple[int, int, Timing]  # tokens, blocks of all rows, where the time went


def ours(target: Any, draft: Any, prompts: list[Prompt], settings: DecodeSettings) -> Run:
    """All prompts in one batch."""
    drafter = ModelDrafter(draft) if settings.gamma else None
    responses, timing = decode(target, drafter, prompts, settings, batch_size=len(prompts))
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


def cells(place: Place) -> Iterator[dict[str, Any]]:
    """A cell for each pair, batch and rule; tokens per second are behind the prefill."""
    length, max_tokens = (16, 16) if place.tiny else (128, 128)
    dtype = torch.float32 if place.tiny else torch.bfloat16
    bandwidth = place.bandwidth()
    for name, mark in MARKS.items():
        place.free()
        shapes = PAIRS[name]
        target_shape, draft_shape = (tiny(shapes[0]), tiny(shapes[1], 1)) if place.tiny else shapes
        target, draft = pair(target_shape, draft_shape, ALPHA, dtype, place.device, 2 * (length + max_tokens))
        alone: dict[int, float] = {}

        def measure(batch: int, rule: str) -> dict[str, Any]:
            random = torch.Generator().manual_seed(batch)
            ids = torch.randint(1, target_shape.vocab, (batch, length), generator=random).tolist()  # noqa: B023
            prompts = [(str(row), row_ids) for row, row_ids in enumerate(ids)]

            def best(runs: int, gamma: int) -> Run:
                settings = settings_of(rule, gamma, max_tokens)
                return best_of(runs, lambda: ours(target, draft, prompts, settings), tokens_per_second)  # noqa: B023

            tokens, blocks_of_rows, timing = run = best(2, GAMMA)
            if batch not in alone:  # noqa: B023
                alone[batch] = tokens_per_second(best(1, 0))  # noqa: B023
            seconds, blocks = steady(timing)
            read = least_bytes(target_shape, draft_shape, GAMMA, batch, length + max_tokens // 2, dtype.itemsize)  # noqa: B023
            return {
                "tokens_per_second": tokens_per_second(run),
                "tau": tokens / blocks_of_rows,
                "milliseconds_per_block": 1e3 * seconds / blocks,
                "limit_share": read / bandwidth / (seconds / blocks),
                "over_target_alone": tokens_per_second(run) / alone[batch],  # noqa: B023
                "stages_ms": {
                    stage: 1e3 * getattr(timing, f"{stage}_seconds") / blocks
                    for stage in ("block", "draft", "verify", "accept")
                },
                "peak_bytes": timing.peak_bytes,
            }

        for batch in TINY_BATCHES if place.tiny else BATCHES:
            for rule in RULES:
                cell = {"pair": name, "batch": batch, "rule": rule, "gamma": GAMMA, "alpha_by_construction": ALPHA}
                judged = {"marks": {"limit_share": mark}} if batch == 1 else {}
                yield tried(cell | judged, lambda: measure(batch, rule))  # noqa: B023
