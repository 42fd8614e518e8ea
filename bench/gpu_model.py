"""GPU operations of a decoder block, counted on the pretend device, and a time predicted from them.

    python bench/gpu_model.py --out bench/results/gpu_model.json         # needs g++, no GPU: launches, copies, waits, kernels

The product's decoder runs real layers at tiny width in bfloat16. Only steady blocks count: the first blocks, blocks that capture
a graph and those around the end of a response are left out. The cost of each further layer is counted too, and added for the real depth.

The time model: bytes over bandwidth, each kernel's own time in a graph or outside, and a launch for every graph, every
kernel outside a graph and every copy. It ignores gaps between blocks, attention over long texts, and arithmetic of large batches.
`eager` is the same decoder without graphs; `layers` is one graph of the model's own layers; `fused` is the default on a GPU, the
same graph with the six kernels a layer of speculative/engine/fused, which do not run on the pretend device.
"""

from __future__ import annotations

from distill.faults import run_script

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path += [folder for folder in (str(ROOT), str(ROOT / "tests" / "support")) if folder not in sys.path]
from pretend_cuda import library  # noqa: E402

if __name__ == "__main__":
    if (obstacle := library.why_not()) is not None:
        sys.exit(f"error: {obstacle}")
    library.load()

# isort: split
import torch  # noqa: E402
import typer  # noqa: E402
from pretend_cuda.device import pretend_cuda  # noqa: E402
from pretend_cuda.ledger import LEDGER  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from gpu.pairs import PAIRS, QWEN3_8B, QWEN3_600M, Shape, least_bytes, pair, tiny  # noqa: E402
from result_file import write_result  # noqa: E402
from speculative.decode import generate  # noqa: E402
from speculative.decoder.responses import DecodeSettings, Timing  # noqa: E402
from speculative.drafters.drafter import ModelDrafter  # noqa: E402
from speculative.engine.fused.products import FEW_TOKENS  # noqa: E402
from speculative.rules.rule import Rule  # noqa: E402
from speculative.rules.sampling import GREEDY, SamplingSettings  # noqa: E402

NUCLEUS = SamplingSettings(0.7, top_p=0.95)
# (rule, sampling) of each cell.
WAYS = (("greedy", GREEDY), ("sample", SamplingSettings(1.0)), ("sample", NUCLEUS), ("block", SamplingSettings(1.0)))
BATCHES = (1, 16)
NAMES = list(PAIRS)[:2]  # of one architecture, whose layers take the same kernels at any width
FIRST, BEHIND = 3, 2  # Blocks left out: at the beginning, and after a block that ends a response.
TOKENS = 56


class Counts(NamedTuple):
    """Average operations of a steady block."""

    launches: float
    uploads: float
    downloads: float
    waits: float
    kernels_outside: float
    kernels_in_graphs: float


@dataclass(frozen=True)
class Prices:
    """Seconds, and bytes per second."""

    launch: float
    kernel: float
    bandwidth: float
    positions: int

    def seconds(self, counts: Counts, least_seconds: float) -> float:
        """Seconds of a block."""
        launched = counts.launches + counts.kernels_outside + counts.uploads + counts.downloads
        return (
            least_seconds + self.launch * launched + self.kernel * (counts.kernels_outside + counts.kernels_in_graphs)
        )


def so_far() -> Counts:
    """Operations since the ledger was cleared."""
    waits = LEDGER.reads.total() + LEDGER.synchronized.total()
    copies = LEDGER.uploads.total(), LEDGER.downloads.total()
    return Counts(LEDGER.replays, *copies, waits, LEDGER.kernels, LEDGER.replayed_kernels)


def count_blocks(
    target: PreTrainedModel, draft: PreTrainedModel, settings: DecodeSettings, rows: int, runner: str
) -> Counts:
    """Decode twice as many prompts as rows, so that rows are recycled; both models are on the pretend device."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 20, (2 * rows,), generator=random).tolist()
    prompts = [
        (str(n), torch.randint(1, 512, (length,), generator=random).tolist()) for n, length in enumerate(lengths)
    ]
    timing = Timing()
    blocks: list[tuple[int, Counts, int, bool]] = []  # calls of the target, counts, captures, whether a response ended
    LEDGER.clear()
    stream = generate(target, ModelDrafter(draft), prompts, settings, batch_size=rows, runner=runner, timing=timing)
    for event in stream:
        ended = event.finish_reason is not None
        if blocks and blocks[-1][0] == timing.target_calls:
            blocks[-1] = (*blocks[-1][:3], blocks[-1][3] or ended)
        else:
            blocks.append((timing.target_calls, so_far(), len(LEDGER.captures), ended))
    totals, steady = [0.0] * len(Counts._fields), 0
    for number in range(FIRST, len(blocks)):
        (calls_before, before, captures_before, _), (calls, now, captures, _) = blocks[number - 1 : number + 1]
        if captures > captures_before or any(ended for *_, ended in blocks[number - BEHIND : number + 1]):
            continue
        steady += calls - calls_before
        totals = [total + new - old for total, new, old in zip(totals, now, before, strict=True)]
    assert steady >= 5, f"{steady} steady blocks: give longer responses"
    return Counts(*(total / steady for total in totals))


def small_pair(target_layers: int = 1, draft_layers: int = 1) -> tuple[Any, Any]:
    """Real layers, tiny width, on the pretend device."""
    shapes = tiny(QWEN3_8B, target_layers), tiny(QWEN3_600M, draft_layers)
    target, draft = pair(*shapes, 0.7, torch.bfloat16, torch.device("cpu"), 256)
    return target.to("cuda"), draft.to("cuda")


def settings_of(rule: str, sampling: SamplingSettings, gamma: int) -> DecodeSettings:
    return DecodeSettings(sampling, gamma, Rule.named(rule), max_tokens=TOKENS)


def per_layer(rows: int, gamma: int, runner: str) -> tuple[float, float]:
    """Kernels of a block that one more layer of the target, and one more of the draft, add."""
    settings = settings_of("greedy", GREEDY, gamma)
    kernels = []
    for layers in ((1, 1), (2, 1), (1, 2)):
        counts = count_blocks(*small_pair(*layers), settings, rows, runner)
        kernels.append(counts.kernels_in_graphs if runner == "graph" else counts.kernels_outside)
    return kernels[1] - kernels[0], kernels[2] - kernels[0]


def at_depth(counts: Counts, runner: str, layer: tuple[float, float], target: Shape, draft: Shape) -> Counts:
    """The counts of one layer each, with those of the real depth."""
    more = (target.layers - 1) * layer[0] + (draft.layers - 1) * layer[1]
    if runner == "graph":
        return counts._replace(kernels_in_graphs=counts.kernels_in_graphs + more)
    return counts._replace(kernels_outside=counts.kernels_outside + more)


def cell_of(counts: Counts, prices: Prices, least_seconds: float) -> dict[str, float]:
    """Values of a column."""
    seconds = prices.seconds(counts, least_seconds)
    return {f"{name}_per_block": round(value, 2) for name, value in counts._asdict().items()} | {
        "predicted_ms_per_block": round(1e3 * seconds, 3),
        "predicted_floor_share": round(least_seconds / seconds, 4),
    }


def measure(gamma: int, prices: Prices, fused: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(a cell for each pair, way and batch, kernels of a layer)."""
    cells, layers = [], {}
    models = small_pair()
    for rows in BATCHES:
        added = {runner: per_layer(rows, gamma, runner) for runner in ("graph", "eager")}
        for runner, (of_target, of_draft) in added.items():
            layers[f"{runner}, batch {rows}"] = {"verify": of_target, "draft_step": of_draft / gamma}
        for rule, sampling in WAYS:
            settings = settings_of(rule, sampling, gamma)
            counted = {runner: count_blocks(*models, settings, rows, runner) for runner in added}
            for pair_name in NAMES:
                target, draft = PAIRS[pair_name]
                least_seconds = least_bytes(target, draft, gamma, rows, prices.positions) / prices.bandwidth
                found = {
                    runner: at_depth(counted[runner], runner, layer, target, draft) for runner, layer in added.items()
                }
                found["layers"] = found.pop("graph")
                if rows * (gamma + 1) <= FEW_TOKENS:  # Others take torch's products, which are more kernels.
                    verify, steps = added["graph"]
                    saved = target.layers * (verify - fused) + draft.layers * (steps - gamma * fused)
                    kernels = found["layers"].kernels_in_graphs - saved
                    found["fused"] = found["layers"]._replace(kernels_in_graphs=kernels)
                cell = {
                    "pair": pair_name,
                    "rule": rule,
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "batch": rows,
                    "gamma": gamma,
                    "floor_ms": round(1e3 * least_seconds, 3),
                }
                cells.append(cell | {name: cell_of(counts, prices, least_seconds) for name, counts in found.items()})
    return cells, layers


def show(result: dict[str, Any]) -> None:
    """A line for each cell."""
    shares = ("eager", "layers", "fused")
    names = ("pair", "rule", "temperature", "top_p", "batch")
    table = Table(
        *names, "bandwidth limit, ms", "kernels, fused", *shares, title="predicted shares of the bandwidth limit"
    )
    for cell in result["cells"]:
        found = [f"{cell[name]['predicted_floor_share']:.0%}" if name in cell else "" for name in shares]
        kernels = f"{cell['fused']['kernels_in_graphs_per_block']:g}" if "fused" in cell else ""
        table.add_row(*(str(cell[name]) for name in names), f"{cell['floor_ms']:.2f}", kernels, *found)
    Console(width=150).print(table)


def main(
    out: Annotated[Path | None, typer.Option(help="JSON to write")] = None,
    gamma: Annotated[int, typer.Option(help="drafted tokens per block", min=1)] = 5,
    launch: Annotated[float, typer.Option(help="microseconds of a launch from the host")] = 3.0,
    kernel: Annotated[float, typer.Option(help="microseconds of a kernel beyond its bytes")] = 2.0,
    bandwidth: Annotated[float, typer.Option(help="terabytes per second")] = 3.0,
    fused: Annotated[int, typer.Option(help="kernels of a fused layer")] = 6,
    positions: Annotated[int, typer.Option(help="tokens of a text, in the caches that are read")] = 128,
) -> None:
    """Count, predict, print."""
    prices = Prices(launch / 1e6, kernel / 1e6, bandwidth * 1e12, positions)
    with pretend_cuda():
        cells, layers = measure(gamma, prices, fused)
    result = {"prices": asdict(prices), "kernels_per_layer": layers, "cells": cells}
    show(result)
    if out is not None:
        write_result(out, result)


if __name__ == "__main__":
    run_script(main)
