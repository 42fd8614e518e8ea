"""Products of a layer's matrices with few tokens, alone: fused kernels by their division, and torch's own.

The matrices take turns in more memory than the cache holds. `floor_share`: the time in which the memory bus reads the matrix once, over the
time taken from one launch to the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, silu

from gpu.pairs import QWEN3_8B, QWEN3_600M, Shape
from gpu.place import Place, tried
from speculative.engine.fused.products import FEWEST_TOKENS, Matrix, Products, Tile, Workspace, power_of_two, tile_of

LAUNCHES, MOST_SHARED, MOST_INPUTS, CACHE_BYTES = 24, 227 * 1024, 4096, 3e8
Contestant = Callable[[torch.Tensor], torch.Tensor]


def matrices(shape: Shape) -> dict[str, tuple[int, int, str]]:
    """Outputs, inputs and form of the products of a layer, and of the head."""
    heads, inner = shape.heads * shape.head_width, shape.mlp
    return {
        "heads": (heads + 2 * shape.kv_heads * shape.head_width, shape.width, "normed"),
        "out": (shape.width, heads, "added"),
        "gated": (inner, shape.width, "gated"),
        "down": (shape.width, inner, "added"),
        "head": (shape.vocab, shape.width, "normed"),
    }


def tiles(form: str, tokens: int, outputs: int, inputs: int) -> Iterator[Any]:
    """Divisions of a product: what is chosen first, then others that fit."""
    chosen = tile_of(tokens, outputs, inputs, form == "gated", form == "added", 2, MOST_SHARED)
    yield chosen
    if tokens <= FEWEST_TOKENS and inputs <= MOST_INPUTS:
        for rows, width, warps in itertools.product((4, 8, 16), {1024, power_of_two(inputs)}, (4, 8)):
            yield Tile(rows, width, warps=warps, rows=True)
        return
    splits = (1, 2, 4, 8) if form == "added" else (1,)
    for width, split, stages in itertools.product((64, 128, 256), splits, (3, 5)):
        loaded = (64 * (2 if form == "gated" else 1) + max(16, power_of_two(tokens))) * width * 2 * stages
        if loaded <= MOST_SHARED:
            yield Tile(64, width, split, stages)


def seconds_each(place: Place, work: Contestant, weights: list[torch.Tensor]) -> float:
    """Seconds from one launch to the next, in a CUDA graph."""

    def all_of_them() -> None:
        for turn in range(LAUNCHES):
            work(weights[turn % len(weights)])

    all_of_them()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        all_of_them()
    return min(place.seconds(graph.replay) for _ in range(5)) / LAUNCHES


def contestants(place: Place, outputs: int, inputs: int, form: str, tokens: int) -> Iterator[tuple[str, Contestant]]:
    """(name, product of one weight), torch's own first."""
    x_MK = torch.randn(tokens, inputs, device=place.device, dtype=torch.bfloat16)
    norm = torch.rand(inputs, device=place.device, dtype=torch.bfloat16) if form != "added" else None
    add = torch.randn(tokens, outputs, device=place.device, dtype=torch.bfloat16) if form == "added" else None

    def plain(weight: torch.Tensor) -> torch.Tensor:
        y_MN = linear(x_MK if norm is None else rms_norm(x_MK, (inputs,), norm, 1e-6), weight)
        if form == "gated":
            return silu(y_MN[:, :outputs]) * y_MN[:, outputs:]
        return y_MN if add is None else y_MN + add

    yield "torch", plain
    products = Products(place.device, torch.bfloat16, 1e-6, Workspace(place.device))
    for tile in tiles(form, tokens, outputs, inputs):
        yield (
            " ".join(str(int(number)) for number in tile),
            lambda weight, tile=tile: products(  # type: ignore[misc]
                x_MK, Matrix(weight, None), norm, add, form == "gated", tile
            ),
        )


def cells(place: Place) -> Iterator[dict[str, Any]]:
    """A cell for each matrix and number of tokens: torch's time, and the best division with its time."""
    if not place.cuda:
        yield {"skipped": "fused kernels need CUDA"}
        return
    bandwidth = place.bandwidth()
    for name, shape, tokens in (("0.6B", QWEN3_600M, 1), ("0.6B", QWEN3_600M, 2), ("8B", QWEN3_8B, 6)):
        for matrix, (outputs, inputs, form) in matrices(shape).items():
            place.free()

            def measure() -> dict[str, Any]:
                size = (outputs * (2 if form == "gated" else 1), inputs)  # noqa: B023
                copies = 1 + int(CACHE_BYTES / (2 * size[0] * size[1]))
                weights = [torch.randn(size, device=place.device, dtype=torch.bfloat16) / 64 for _ in range(copies)]
                times, expected, worst = {}, None, 0.0
                for way, work in contestants(place, outputs, inputs, form, tokens):  # noqa: B023
                    found = work(weights[0]).float()
                    expected = found if expected is None else expected
                    worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
                    times[way] = seconds_each(place, work, weights)
                best = min((way for way in times if way != "torch"), key=times.__getitem__)
                least = 2 * size[0] * size[1] / bandwidth
                return {
                    "microseconds": 1e6 * times[best],
                    "way": best,
                    "floor_share": least / times[best],
                    "over": {"torch": times["torch"] / times[best]},
                    "difference": worst,
                    "all_microseconds": {
                        way: round(1e6 * seconds, 2)
                        for way, seconds in sorted(times.items(), key=lambda one: one[1])[:8]
                    },
                }

            yield tried({"model": name, "matrix": matrix, "queries": tokens}, measure)
