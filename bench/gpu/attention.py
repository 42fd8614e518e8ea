"""Ways to attend over the cache of a Qwen3 8B layer, alone: 32 rows, 512 positions, each row of its own length; one token and six.

`floor_share`: the time in which the memory bus reads the keys and values once, over the time taken. `difference`: the largest
from what transformers' own function gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gpu.place import Place, tried
from speculative.engine.calls import grouped_attention

RUNS = 20


def flex(lengths_R: torch.Tensor, queries: int, positions: int) -> Callable[..., torch.Tensor]:
    """torch's compiled kernel with a block mask: no mask tensor, groups kept."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(row: Any, head: Any, query: Any, position: Any) -> Any:
        return position <= lengths_R[row] + query

    blocks = create_block_mask(visible, len(lengths_R), None, queries, positions, device=str(lengths_R.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda query, key, value, mask: compiled(query, key, value, block_mask=blocks, enable_gqa=True).transpose(
        1, 2
    )


def cells(place: Place) -> Iterator[dict[str, Any]]:
    """A cell for each way and number of tokens."""
    rows, heads, kv_heads, positions, width = (2, 4, 2, 64, 8) if place.tiny else (32, 32, 8, 512, 128)
    dtype = torch.float32 if place.tiny else torch.bfloat16
    bandwidth = place.bandwidth()
    place.free()
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = heads // kv_heads, True  # type: ignore[assignment]
    torch.manual_seed(0)
    key, value = (torch.randn(rows, kv_heads, positions, width, dtype=dtype, device=place.device) for _ in range(2))
    lengths_R = torch.randint(positions // 2, positions - 6, (rows,)).to(place.device)
    for queries in (1, 6):
        query = torch.randn(rows, heads, queries, width, dtype=dtype, device=place.device)
        places_Q1 = torch.arange(queries, device=place.device).unsqueeze(1)
        visible_RQP = torch.arange(positions, device=place.device) <= lengths_R.view(-1, 1, 1) + places_Q1
        mask = (
            torch.zeros(visible_RQP.shape, dtype=dtype, device=place.device)
            .masked_fill_(~visible_RQP, -torch.inf)
            .unsqueeze(1)
        )
        ways: dict[str, Callable[[], Callable[..., torch.Tensor]]] = {
            "transformers": lambda: lambda *given: sdpa_attention_forward(module, *given)[0],
            "grouped (ours)": lambda: lambda *given: grouped_attention(module, *given)[0],
            "enable_gqa": lambda: (
                lambda q, k, v, m: scaled_dot_product_attention(q, k, v, m, enable_gqa=True).transpose(1, 2)
            ),
        }
        if place.cuda and not place.tiny:
            ways["flex"] = lambda: flex(lengths_R, queries, positions)  # noqa: B023

        def measure(make: Callable[[], Callable[..., torch.Tensor]], given: tuple[torch.Tensor, ...]) -> dict[str, Any]:
            attend = make()
            found, expected = attend(*given), sdpa_attention_forward(module, *given)[0]
            seconds = min(place.seconds(lambda: [attend(*given) for _ in range(RUNS)]) for _ in range(3)) / RUNS
            share = 2 * key.numel() * key.itemsize / bandwidth / seconds
            return {
                "microseconds": 1e6 * seconds,
                "floor_share": share,
                "difference": (found - expected).abs().max().item(),
            }

        for name, make in ways.items():
            yield tried({"way": name, "queries": queries}, lambda: measure(make, (query, key, value, mask)))  # noqa: B023
