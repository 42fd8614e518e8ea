"""One call of a model on this CPU by each way to compile it, side by side: eager, Inductor, OpenVINO, oneDNN Graph, our own code.

    python bench/backends.py --target DIR --out bench/results/backends_cpu.json     # `pip install openvino` for its backend

A call of a few tokens without a prefix and with all logits: what is compared is how fast weights are read and multiplied, which is
most of a decoding step. Only our own call also writes keys and values. Calls take turns; the fastest of each counts. `difference`:
the largest of a logit from the eager call's.
"""

from __future__ import annotations

from distill.faults import run_script

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from distill.models.load import load_model
from distill.run.provenance import describe_run
from large_steps import in_dtype, weight_bytes
from result_file import write_result
from speculative.engine.cached_model import CachedModel
from speculative.engine.models import evaluating
from speculative.engine.runners import COMPILED

Call = Callable[[], torch.Tensor]
WAYS = ("eager", "torch.compile, Inductor", "torch.compile, OpenVINO", "torch.jit, oneDNN Graph", "ours")


class _Logits(torch.nn.Module):
    """Token ids to logits alone, as exporters and tracers want it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


def call_by(way: str, model: PreTrainedModel, ids: torch.Tensor) -> Call:
    """The call, compiled. Raises whatever the backend raises."""
    logits = _Logits(model).eval()
    if way == "ours":
        cached = CachedModel(model, "target", 1, max(8, ids.shape[1]), COMPILED)
        if cached.compiled is None:
            raise RuntimeError("this model has no compiled code here")
        starts = np.zeros(1, dtype=np.int64)
        return lambda: cached.feed(ids, starts, ids.shape[1])
    if way == "torch.compile, Inductor":
        from torch._inductor import config

        with config.patch(freezing=True, max_autotune=True):
            compiled = torch.compile(logits, dynamic=False)
            compiled(ids)
        return lambda: compiled(ids)
    if way == "torch.compile, OpenVINO":
        import openvino.torch  # noqa: F401

        compiled = torch.compile(logits, backend="openvino", dynamic=False)
        compiled(ids)
        return lambda: compiled(ids)
    if way == "torch.jit, oneDNN Graph":
        torch.jit.enable_onednn_fusion(True)
        traced = torch.jit.freeze(torch.jit.trace(logits, ids, check_trace=False))
        for _ in range(3):
            traced(ids)
        return lambda: traced(ids)
    return lambda: logits(ids)


def measured(model: PreTrainedModel, tokens: int, seconds: float) -> list[dict[str, Any]]:
    """A cell for each way: seconds to prepare, milliseconds of a call, difference to eager; or why there is none."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=generator)
    cells: list[dict[str, Any]] = []
    calls: dict[str, Call] = {}
    with evaluating(model):
        expected = _Logits(model)(ids).float()
        for way in WAYS:
            cell: dict[str, Any] = {"way": way, "tokens": tokens}
            began = time.perf_counter()
            try:
                calls[way] = call_by(way, model, ids)
                found = calls[way]().float()
                if not found.isfinite().all():
                    raise RuntimeError("its logits are not finite")
                cell |= {
                    "prepare_seconds": time.perf_counter() - began,
                    "difference": (found - expected).abs().max().item(),
                }
            except Exception as error:  # a backend may fail in any way of its own
                cell["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
                calls.pop(way, None)
            cells.append(cell)
        best = dict.fromkeys(calls, np.inf)
        end = time.perf_counter() + seconds * len(calls)
        while time.perf_counter() < end:
            for way, call in calls.items():
                start = time.perf_counter()
                call()
                best[way] = min(best[way], time.perf_counter() - start)
    return [cell | ({"milliseconds": 1000 * best[cell["way"]]} if cell["way"] in best else {}) for cell in cells]


def main(
    target: Annotated[str, typer.Option(help="directory of a model")],
    out: Annotated[Path | None, typer.Option(help="write the result here as JSON")] = None,
    dtypes: Annotated[str, typer.Option(help="float32, bfloat16, int8 (torchao), comma-separated")] = "float32,int8",
    tokens: Annotated[str, typer.Option(help="tokens of a call, comma-separated")] = "1,5",
    threads: Annotated[int, typer.Option(help="CPU threads", min=1)] = 1,
    seconds: Annotated[float, typer.Option(help="of timing, for each way and cell", min=0.01)] = 5.0,
) -> None:
    """Time one call of a model by each backend."""
    torch.set_num_threads(threads)
    cells: list[dict[str, Any]] = []
    for dtype in dtypes.split(","):
        model = in_dtype(load_model("target", target).eval(), dtype)
        for count in map(int, tokens.split(",")):
            torch._dynamo.reset()
            cells += [{"dtype": dtype, **cell} for cell in measured(model, count, seconds)]
        megabytes = weight_bytes(model) / 1e6
        table = Table(
            "way", "tokens", "prepare, s", "call, ms", "largest difference", title=f"{dtype}, {megabytes:.1f} MB"
        )
        for cell in (cell for cell in cells if cell["dtype"] == dtype):
            rest = (
                [cell["error"], "", ""]
                if "error" in cell
                else [f"{cell['prepare_seconds']:.1f}", f"{cell['milliseconds']:.2f}", f"{cell['difference']:.1e}"]
            )
            table.add_row(cell["way"], str(cell["tokens"]), *rest)
        Console(width=140).print(table)
    if out is not None:
        write_result(out, {"machine": describe_run(0), "target": Path(target).name, "threads": threads, "cells": cells})


if __name__ == "__main__":
    run_script(main)
