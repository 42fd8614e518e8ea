"""Time and memory of the loss alone, from hidden states to the gradients of hidden states and head, compared with full logits.

    python bench/loss.py --out bench/results/loss.json                   # vocabulary 151,936: minutes per case on one core
    python bench/loss.py --vocabulary 4096 --rows 512 --widths 128

`naive` is forward KL over full logits by autograd, as in most trainers. Every case runs in its own process. Memory is the
growth of the process (on CUDA: of allocated memory) after weights and hidden states exist. It includes the gradient
of the head's weight, which every case needs (`weight_gradient_mb`). With one thread, seconds are CPU time of the process, so other load
does not matter; otherwise they are wall-clock time. Ratios are relative to the naive case of the same width and rows. If that
was not run, they are relative to the naive case with the first number of rows, scaled.
"""

from __future__ import annotations

from distill.faults import run_script

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from data.signals.signal import DenseSignal, Signal, TopKSignal
from distill.loss.chunk_heads import OutputHead, Student
from distill.loss.definitions import Objective
from distill.loss.objective import chunked_loss
from distill.run.provenance import describe_run
from result_file import write_result

STORED = 64
OBJECTIVES = "forward_kl,reverse_kl,jsd,tv,neg_log_alpha,lk_hybrid"


def peak_memory(device: torch.device) -> tuple[Callable[[], None], Callable[[], float]]:
    """(reset function, function that returns MB of growth since): allocated memory on CUDA, the process's own on Linux."""
    if device.type == "cuda":
        held = 0

        def start() -> None:
            nonlocal held
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()

        return start, lambda: (torch.cuda.max_memory_allocated() - held) / 2**20

    if not Path("/proc/self/clear_refs").exists():
        # The peak of the whole life so far: too little where loading took more than the loss.
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return lambda: None, lambda: (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit

    def field(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    resident = 0

    def begin() -> None:
        nonlocal resident
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is held now
        resident = field("VmRSS:")

    return begin, lambda: (field("VmHWM:") - resident) / 2**10


def stored(head: nn.Linear, hidden_RD: Tensor) -> TopKSignal:
    """The most probable tokens of each row, a few rows at a time."""
    parts = []
    for start in range(0, len(hidden_RD), 64):
        log_probs_CV = head(hidden_RD[start : start + 64]).log_softmax(-1)
        best = log_probs_CV.topk(min(STORED, log_probs_CV.shape[-1] - 1))
        tail_C = log_probs_CV.scatter_(-1, best.indices, -torch.inf).logsumexp(-1)
        parts.append((best.indices, best.values, tail_C))
    return TopKSignal(*(torch.cat(column) for column in zip(*parts, strict=True)))


def naive_loss(head: nn.Linear, hidden_RD: Tensor, target_head: nn.Linear, target_hidden_RD: Tensor) -> Tensor:
    """Forward KL over all logits at once."""
    with torch.no_grad():
        target_RV = target_head(target_hidden_RD).float().log_softmax(-1)
    student_RV = head(hidden_RD).float().log_softmax(-1)
    return nn.functional.kl_div(student_RV, target_RV, log_target=True, reduction="sum")


@torch.no_grad()
def spread(layer: nn.Linear) -> nn.Linear:
    """Logits of spread 2: neither uniform nor certain."""
    layer.weight.normal_(std=2 / layer.in_features**0.5)
    return layer


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """One contestant in this process: its memory in the first run, its median time in later ones."""
    torch.manual_seed(0)
    torch.set_num_threads(case["threads"])
    device, dtype = torch.device(case["device"]), getattr(torch, case["dtype"])
    vocabulary, rows, width = case["vocabulary"], case["rows"], case["width"]
    head, target_head = (spread(nn.Linear(width, vocabulary, bias=False, dtype=dtype, device=device)) for _ in range(2))
    target_head.requires_grad_(False)
    hidden_RD = torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True)
    target_hidden_RD = torch.randn(rows, width, dtype=dtype, device=device)
    labels_R = torch.randint(vocabulary, (rows,), device=device)
    signal: Signal = DenseSignal(target_hidden_RD, target_head)
    if case["signal"] == "topk":
        signal = stored(target_head, target_hidden_RD)
    objective = Objective(
        {case["objective"]: 1.0}, compile=case["what"] == "compiled", chunk_tokens=case["chunk_tokens"]
    )

    def step(count: int = rows) -> None:
        head.weight.grad = hidden_RD.grad = None
        if case["what"] == "naive":
            loss = naive_loss(head, hidden_RD[:count], target_head, target_hidden_RD[:count])
        else:
            part = signal.rows(slice(0, count))
            loss = chunked_loss(objective, Student(hidden_RD[:count], OutputHead(head)), part, labels_R[:count]).loss
        (loss / count).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    step(min(rows, 8))  # libraries load, kernels compile
    head.weight.grad = hidden_RD.grad = None
    start, grown = peak_memory(device)
    clock = time.process_time if device.type == "cpu" and case["threads"] == 1 else time.perf_counter
    start()
    seconds, wall = [], []
    for repeat in range(case["repeats"]):
        began, began_wall = clock(), time.perf_counter()
        step()
        seconds.append(clock() - began)
        wall.append(time.perf_counter() - began_wall)
        if repeat == 0:
            memory = grown()
    return {
        **{key: case[key] for key in ("what", "objective", "signal", "rows", "width", "vocabulary", "device", "dtype")},
        "seconds": sorted(seconds)[len(seconds) // 2],
        "wall_seconds": sorted(wall)[len(wall) // 2],
        "peak_memory_mb": round(memory, 1),
        "weight_gradient_mb": round(head.weight.numel() * head.weight.itemsize / 2**20, 1),
    }


def with_ratios(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each cell with its time and memory over the naive case's."""
    naive = {(cell["width"], cell["rows"]): cell for cell in cells if cell["what"] == "naive"}
    for cell in cells:
        rows = min(one for width, one in naive if width == cell["width"])
        beside = naive.get((cell["width"], cell["rows"]), naive[cell["width"], rows])
        times = cell["rows"] / beside["rows"]
        cell["vs_naive"] = round(cell["seconds"] / (times * beside["seconds"]), 3)
        cell["loss_memory_ratio"] = round(cell["peak_memory_mb"] / max(1e-9, times * beside["peak_memory_mb"]), 4)
    return cells


def cases(rows: list[int], objectives: list[str], compiled: bool) -> list[dict[str, Any]]:
    """The cases of one width: naive at the first number of rows; forward KL, compiled and stored at the first, too."""
    found = [{"what": "naive", "objective": "forward_kl", "signal": "dense", "rows": rows[0]}]
    for count in rows:
        for objective in objectives if count == rows[0] else objectives[:1]:
            found.append({"what": "ours", "objective": objective, "signal": "dense", "rows": count})
        found.append({"what": "ours", "objective": objectives[0], "signal": "topk", "rows": count})
    if compiled:
        found += [{"what": "compiled", "objective": one, "signal": "dense", "rows": rows[0]} for one in objectives]
    return found


def show(cells: list[dict[str, Any]]) -> None:
    """The cells as a table."""
    table = Table(title=f"loss alone, vocabulary {cells[0]['vocabulary']:,}, {cells[0]['dtype']}, {cells[0]['device']}")
    for column in ("what", "objective", "signal", "rows", "width", "seconds", "vs naive", "peak MB", "memory ratio"):
        table.add_column(column)
    for cell in cells:
        table.add_row(
            *(str(cell[key]) for key in ("what", "objective", "signal", "rows", "width")),
            f"{cell['seconds']:.3g}",
            f"{cell['vs_naive']:.2f}",
            f"{cell['peak_memory_mb']:.0f}",
            f"{cell['loss_memory_ratio']:.3f}",
        )
    Console().print(table)


def main(
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
    vocabulary: Annotated[int, typer.Option(min=2)] = 151_936,
    rows: Annotated[str, typer.Option(help="response tokens; naive runs at the first number only")] = "2048,8192",
    widths: Annotated[str, typer.Option(help="hidden width of student and target")] = "896,256",
    objectives: Annotated[
        str, typer.Option(help="comma-separated; the first also stored and at all rows")
    ] = OBJECTIVES,
    chunk_tokens: Annotated[int, typer.Option(help="0 = automatic", min=0)] = 0,
    device: Annotated[str, typer.Option()] = "cpu",
    dtype: Annotated[str, typer.Option(help="of weights and hidden states")] = "float32",
    threads: Annotated[int, typer.Option(min=1)] = 1,
    repeats: Annotated[int, typer.Option(help="timed runs of each case; the median counts", min=1)] = 1,
    compiled: Annotated[bool, typer.Option(help="also with torch.compile")] = False,
    case: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Times every case in a process of its own and writes one JSON."""
    if case:
        print(json.dumps(run_case(json.loads(case))))
        return
    shared = {
        "vocabulary": vocabulary,
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "repeats": repeats,
        "chunk_tokens": chunk_tokens or None,
    }
    cells = []
    for width in map(int, widths.split(",")):
        for one in cases([int(count) for count in rows.split(",")], objectives.split(","), compiled):
            command = [sys.executable, __file__, "--case", json.dumps({**shared, **one, "width": width})]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            cells.append(json.loads(done.stdout.splitlines()[-1]))
    show(with_ratios(cells))
    if out is not None:
        machine = describe_run(0) | {"argv": None, "threads": threads}
        write_result(out, {"machine": machine, "cells": cells})


if __name__ == "__main__":
    run_script(main)
