"""A distillation step on an accelerator at real shapes: tokens/s, MFU, peak memory, and the loss alone; ours beside the others.

    python bench/gpu_train.py --out bench/results/gpu_train.json            # 0.5 B learns from 7 B, vocabulary 151,936, 4 x 2,048 tokens
    python bench/gpu_train.py --tiny --device cpu --out tiny.json           # the same program in seconds

Nothing is downloaded: weights are random at the sizes of Qwen2.5-0.5B and -7B, with one vocabulary. The target is bfloat16, the
draft float32 under bfloat16 autocast, fused AdamW, no gradient checkpointing, for all. A contestant that runs out of memory is
noted as such. Times are medians of steps behind some that are not counted; contestants take turns.

Contestants: `floor`, full-vocabulary logits of both models at all positions and forward KL or JSD by autograd; `ours`, and
`ours, compiled` (torch.compile of the draft's layers and of the loss); TRL's GKDTrainer where TRL is installed; Liger's
fused linear JSD between the same two bodies where liger-kernel is installed.

FLOPs of a token: 6 per weight of the draft's matrices in its step (2 per weight of the target's), head included where its logits
are made, and attention's 12 (4) x layers x width x length / 2 for a causal mask. `mfu` counts both models over the step's time,
`mfu_student` the draft's and both heads' over the time of all but the target's body. Both over the bfloat16 peak of the device
by its data sheet where it is known; `mfu_student_of_matmul` is over what a large matmul reaches here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from data.batches.collate import Batch, Example, collate
from data.signals.signal import DenseSignal
from distill.loss.definitions import Objective
from distill.loss.objective import chunked_loss
from distill.models.heads import OutputHead, SplitModel
from distill.models.layers import layer_list
from distill.training.profiling import peak_flops
from distill.training.teacher import Teacher

OBJECTIVES = ("forward_kl", "jsd", "lk_hybrid")


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    tied: bool


@dataclass(frozen=True)
class Sizes:
    """One measurement's sizes."""

    target: Shape = Shape(3584, 28, 28, 4, 18944, False)
    draft: Shape = Shape(896, 24, 14, 2, 4864, True)
    vocab: int = 151_936
    length: int = 2048
    batch: int = 4
    prompt: int = 512


TINY = Sizes(Shape(64, 2, 4, 2, 128, False), Shape(32, 1, 2, 1, 64, True), 512, 32, 2, 8)


def make_model(shape: Shape, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Any:
    config = Qwen2Config(
        vocab_size=sizes.vocab, hidden_size=shape.width, intermediate_size=shape.mlp, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, max_position_embeddings=sizes.length,
        tie_word_embeddings=shape.tied, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    return model


def body_weights(model: Any) -> int:
    """Weights of the layers' matrices: what a token is multiplied with, head and embedding aside."""
    return sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.dim() == 2 and "embed" not in name and "lm_head" not in name
    )


def attention_flops(shape: Shape, length: int) -> float:
    """Forward FLOPs of a token in causal attention: two products over half the positions, all layers."""
    return 4 * shape.layers * shape.width * length / 2


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_flops(device: torch.device, tiny: bool) -> float:
    """FLOP/s that a large bfloat16 matmul reaches here, the best of some."""
    size = 256 if tiny else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = math.inf
    for _ in range(8):
        wait(device)
        began = time.perf_counter()
        left @ right
        wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


class Peak:
    """The most megabytes that the allocator held since `start`; None off CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before = device, 0

    def start(self) -> None:
        """From here."""
        gc.collect()
        if self.device.type == "cuda":
            wait(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)

    def read(self) -> float | None:
        """All of it."""
        return torch.cuda.max_memory_allocated(self.device) / 1e6 if self.device.type == "cuda" else None

    def growth(self) -> float | None:
        """Over what was held at the start."""
        held = self.read()
        return None if held is None else held - self.before / 1e6


class Race:
    """The models and tokens that all share."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        torch.manual_seed(0)
        self.sizes, self.device = sizes, device
        self.target = make_model(sizes.target, sizes, torch.bfloat16, device)
        self.student = make_model(sizes.draft, sizes, torch.float32, device)
        self.teacher = Teacher(self.target)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=1e-5, fused=True)
        mask = np.arange(sizes.length) >= sizes.prompt
        ids = np.random.default_rng(0).integers(1, sizes.vocab, (4 * sizes.batch, sizes.length)).astype(np.int32)
        self.examples = [Example(row, mask) for row in ids]
        self.batch: Batch = collate(self.examples[: sizes.batch], 0).to(device)
        mask_BT = torch.from_numpy(mask).to(device).expand(sizes.batch, -1)
        self.keep_BT = mask_BT[:, 1:]
        self.tokens = sizes.batch * sizes.length

    def autocast(self) -> Any:
        """The draft's precision."""
        return torch.autocast(self.device.type, torch.bfloat16)

    def update(self) -> None:
        """Clips and steps."""
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def weights_mb(self) -> float:
        """Both models' weights, which everybody needs."""
        return sum(p.numel() * p.element_size() for m in (self.target, self.student) for p in m.parameters()) / 1e6

    def idle_mb(self) -> float:
        """The shared draft and its optimizer: TRL has its own, and these only wait."""
        state = [t for values in self.optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in (*self.student.parameters(), *state)) / 1e6

    def flops(self) -> dict[str, float]:
        """FLOPs of a step: {student, teacher, heads}. Heads: what a step cannot do without, of response rows only."""
        sizes, rows = self.sizes, self.batch.labels_R.numel()
        student = 3 * self.tokens * (2 * body_weights(self.student) + attention_flops(sizes.draft, sizes.length))
        teacher = self.tokens * (2 * body_weights(self.target) + attention_flops(sizes.target, sizes.length))
        heads = 2 * rows * sizes.vocab * (3 * sizes.draft.width + sizes.target.width)
        return {"student": student, "teacher": teacher, "heads": heads}


def floor_loss(objective: str, target_log_probs: Tensor, student_log_probs: Tensor) -> Tensor:
    """Per position, by autograd."""
    if objective == "forward_kl":
        return F.kl_div(student_log_probs, target_log_probs, reduction="none", log_target=True).sum(-1)
    middle = torch.logaddexp(target_log_probs, student_log_probs) - math.log(2.0)
    first = F.kl_div(middle, target_log_probs, reduction="none", log_target=True).sum(-1)
    second = F.kl_div(middle, student_log_probs, reduction="none", log_target=True).sum(-1)
    return 0.5 * (first + second)


def floor_step(race: Race, objective: str) -> Callable[[], None]:
    def step() -> None:
        ids_BT = race.batch.input_ids_BT
        with torch.no_grad():
            target_log_probs_BTV = race.target(input_ids=ids_BT, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        with race.autocast():
            student_logits_BTV = race.student(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        loss_BT = floor_loss(objective, target_log_probs_BTV, student_logits_BTV.float().log_softmax(-1))
        ((loss_BT * race.keep_BT).sum() / race.keep_BT.sum()).backward()
        race.update()

    return step


def our_step(
    race: Race, objective: str, compiled: bool, phases: dict[str, list[float]] | None = None
) -> Callable[[], None]:
    """One step through the product's loss; with ``phases`` it also notes the teacher's seconds and the rest's."""
    chosen, split = Objective({objective: 1.0}, compile=compiled), SplitModel(race.student)
    race.student.train()

    def step() -> None:
        batch = race.batch
        began = time.perf_counter()
        signal = race.teacher.signal(batch)
        if phases is not None:
            wait(race.device)
            middle = time.perf_counter()
        with race.autocast():
            # What the product's DraftModule does; that one needs the configuration library.
            hidden_BTD = split.hidden(batch.input_ids_BT)
            hidden_RD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[batch.rows_R]
            sums = chunked_loss(chosen, hidden_RD, split.head, signal, batch.labels_R)
        (sums.loss / batch.labels_R.numel()).backward()
        race.update()
        if phases is not None:
            wait(race.device)
            phases.setdefault("teacher", []).append(middle - began)
            phases.setdefault("student", []).append(time.perf_counter() - middle)

    return step


@contextlib.contextmanager
def compiled_layers(race: Race, yes: bool) -> Any:
    """The draft's layers compiled, and as they were afterwards."""
    layers = layer_list(race.student)[1]
    if yes:
        for layer in layers:
            layer.compile()
    yield
    for layer in layers:
        layer._compiled_call_impl = None


def liger_step(race: Race) -> Callable[[], None]:
    """Liger's fused linear JSD between the two bodies, response rows only."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    fused = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, compiled=True)
    split, head = SplitModel(race.student), race.student.get_output_embeddings()

    def step() -> None:
        batch = race.batch
        signal = race.teacher.signal(batch)
        with race.autocast():
            hidden_BTD = split.hidden(batch.input_ids_BT)
            hidden_RD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[batch.rows_R].to(torch.bfloat16)
            weight_VD = head.weight.to(torch.bfloat16)
            teacher_weight_VD = race.target.get_output_embeddings().weight
            loss = fused(hidden_RD, weight_VD, signal.hidden_RD, teacher_weight_VD, batch.labels_R, None, None)
        (loss[0] if isinstance(loss, tuple) else loss).backward()
        race.update()

    return step


def trl_step(race: Race, objective: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """(one step of TRL's GKDTrainer off policy on a copy of the draft, its end)."""
    import trl_peer

    from distill.models.load import load_tokenizer

    tokenizer = load_tokenizer("embedded")  # only its padding is used
    learner = make_model(race.sizes.draft, race.sizes, torch.float32, race.device)
    peer = trl_peer.Peer("gkd", trl_peer.BETA[objective], 0.0, lr=1e-5)
    trainer = trl_peer.make_trainer(
        peer, learner, race.target, tokenizer, race.examples, batch_size=race.sizes.batch, max_new_tokens=1,
        max_steps=1_000_000, bf16=True,
    )  # fmt: skip
    stepped = trl_peer.Stepped(trainer)
    return stepped.step, stepped.close


def contestants(race: Race, compile_too: bool) -> dict[str, tuple[str, Callable[[], tuple[Callable, Callable | None]]]]:
    """{name: (objective, how to make its step and its end)}."""
    made: dict[str, tuple[str, Callable[[], tuple[Callable, Callable | None]]]] = {}
    for objective in OBJECTIVES:
        if objective != "lk_hybrid":
            made[f"floor, {objective}"] = objective, lambda o=objective: (floor_step(race, o), None)
        made[f"ours, {objective}"] = objective, lambda o=objective: (our_step(race, o, False), None)
        if compile_too:
            made[f"ours compiled, {objective}"] = objective, lambda o=objective: (our_step(race, o, True), None)
        if objective == "jsd" and importlib.util.find_spec("liger_kernel"):
            made["liger, jsd"] = "jsd", lambda: (liger_step(race), None)
        if objective != "lk_hybrid" and importlib.util.find_spec("trl") and importlib.util.find_spec("datasets"):
            made[f"trl gkd, {objective}"] = objective, lambda o=objective: trl_step(race, o)
    return made


def timed_steps(race: Race, step: Callable[[], None], count: int) -> list[float]:
    """Seconds of each step."""
    seconds = []
    for _ in range(count):
        wait(race.device)
        began = time.perf_counter()
        step()
        wait(race.device)
        seconds.append(time.perf_counter() - began)
    return seconds


def measure(
    race: Race, rounds: int, steps: int, compile_too: bool, until: float, show: Callable[[str], None]
) -> dict[str, dict]:
    """{name: {seconds, peak_memory_mb, ...} or {error}}: every contestant has a few steps each round; two are not counted.

    A contestant is made anew every round, so that only one of them is in memory. No round is begun behind ``until``.
    """
    results: dict[str, dict] = {}
    for turn in range(rounds):
        for name, (objective, make) in contestants(race, compile_too).items():
            result = results.setdefault(name, {"objective": objective, "seconds_of_steps": []})
            if "error" in result or (turn and time.perf_counter() > until):
                continue
            peak, end = Peak(race.device), None
            peak.start()
            try:
                with compiled_layers(race, "compiled" in name):
                    step, end = make()
                    timed_steps(race, step, 2)
                    result["seconds_of_steps"] += timed_steps(race, step, steps)
                    held = peak.read()
                    if held is not None:
                        held -= race.idle_mb() if name.startswith("trl") else 0.0
                        result |= {"peak_memory_mb": held, "beyond_weights_mb": held - race.weights_mb()}
            except (RuntimeError, ImportError, TypeError, ValueError) as error:
                result["error"] = str(error).splitlines()[0][:200]
            finally:
                if end is not None:
                    end()
                race.optimizer.zero_grad(set_to_none=True)
            results[name] = result
            show(f"round {turn + 1}: {name}: " + (result.get("error") or f"{result['seconds_of_steps'][-1]:.3f} s"))
    for result in results.values():
        if result["seconds_of_steps"]:
            result["seconds"] = statistics.median(result.pop("seconds_of_steps"))
    return results


def weigh_losses(race: Race) -> dict[str, Any]:
    """Megabytes of one forward and backward of the loss from hidden states, response rows only: {name: growth}."""
    sizes, device, rows = race.sizes, race.device, race.batch.labels_R.numel()
    target_hidden_RD = torch.randn(rows, sizes.target.width, device=device, dtype=torch.bfloat16)
    student_hidden_RD = torch.randn(rows, sizes.draft.width, device=device, dtype=torch.bfloat16).requires_grad_(True)
    target_head = torch.nn.Linear(sizes.target.width, sizes.vocab, bias=False, device=device, dtype=torch.bfloat16)
    student_head = torch.nn.Linear(sizes.draft.width, sizes.vocab, bias=False, device=device)
    target_head.requires_grad_(False)
    labels_R = race.batch.labels_R

    def floor(objective: str) -> None:
        with torch.no_grad():
            target_log_probs_RV = target_head(target_hidden_RD).float().log_softmax(-1)
        with race.autocast():
            logits_RV = student_head(student_hidden_RD)
        floor_loss(objective, target_log_probs_RV, logits_RV.float().log_softmax(-1)).sum().backward()

    def ours(objective: str) -> None:
        with race.autocast():
            signal = DenseSignal(target_hidden_RD, target_head)
            sums = chunked_loss(
                Objective({objective: 1.0}), student_hidden_RD, OutputHead(student_head), signal, labels_R
            )
        sums.loss.backward()

    found: dict[str, Any] = {"rows": rows, "one_models_logits_mb": rows * sizes.vocab * 4 / 1e6}
    for name, work in (("floor", floor), ("ours", ours)):
        for objective in OBJECTIVES:
            if name == "floor" and objective == "lk_hybrid":
                continue
            peak = Peak(device)
            peak.start()
            began = time.perf_counter()
            try:
                work(objective)
                wait(device)
                found[f"{name}, {objective}"] = {"growth_mb": peak.growth(), "seconds": time.perf_counter() - began}
            except RuntimeError as error:
                found[f"{name}, {objective}"] = {"error": str(error).splitlines()[0][:200]}
            student_head.zero_grad(set_to_none=True)
            student_hidden_RD.grad = None
    return found


def make_cells(
    race: Race,
    results: dict[str, dict],
    weights: dict[str, Any],
    peak: float | None,
    matmul: float,
    phases: dict[str, dict],
) -> list[dict]:
    """One cell per contestant."""
    flops, cells = race.flops(), []
    for name, result in results.items():
        objective, seconds = result["objective"], result.get("seconds")
        cell: dict[str, Any] = {
            "device": race.device.type, "contestant": name.rpartition(", ")[0], "objective": objective, "policy": "off",
            "tokens_per_second": None, "vs_floor": None, "vs_trl": None, "peak_memory_mb": result.get("peak_memory_mb"),
            "loss_memory_ratio": None, "beyond_weights_mb": result.get("beyond_weights_mb"), "error": result.get("error"),
        }  # fmt: skip
        if seconds:
            floor, trl = (
                results.get("floor, forward_kl", {}).get("seconds"),
                results.get(f"trl gkd, {objective}", {}).get("seconds"),
            )
            cell |= {
                "tokens_per_second": race.tokens / seconds,
                "vs_floor": seconds / floor if floor else None,
                "vs_trl": trl / seconds if trl else None,
                "mfu": sum(flops.values()) / seconds / peak if peak else None,
            }
        if name in phases:
            spent = phases[name]
            work = flops["student"] + flops["heads"]
            cell |= {
                "teacher_seconds": spent["teacher"],
                "student_seconds": spent["student"],
                "mfu_teacher": flops["teacher"] / spent["teacher"] / peak if peak else None,
                "mfu_student": work / spent["student"] / peak if peak else None,
                "mfu_student_of_matmul": work / spent["student"] / matmul,
            }
        ours, full = (
            weights.get(f"{who}, {kind}", {}).get("growth_mb")
            for who, kind in (("ours", objective), ("floor", "forward_kl"))
        )
        if name.startswith("ours") and ours and full:
            cell["loss_memory_ratio"] = ours / full
        cells.append(cell)
    return cells


def time_phases(race: Race, results: dict[str, dict], steps: int) -> dict[str, dict[str, float]]:
    """Median seconds of the target's body and of the rest, with a wait between them, for each of ours that ran."""
    found = {}
    for name, result in results.items():
        if not name.startswith("ours") or "seconds" not in result:
            continue
        spent: dict[str, list[float]] = {}
        with compiled_layers(race, "compiled" in name):
            step = our_step(race, result["objective"], "compiled" in name, spent)
            timed_steps(race, step, steps + 2)
        found[name] = {phase: statistics.median(values[2:]) for phase, values in spent.items()}
    return found


def main(
    out: Annotated[Path, typer.Option(help="JSON to write")] = Path("bench/results/gpu_train.json"),
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    rounds: Annotated[int, typer.Option(help="turns of each contestant", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="counted steps of a turn", min=1)] = 5,
    batch: Annotated[int, typer.Option(help="sequences of a step", min=1)] = 4,
    compile_too: Annotated[bool, typer.Option("--compile/--no-compile", help="race ours compiled as well")] = True,
    minutes: Annotated[float, typer.Option(help="begin no round behind this")] = 6.0,
    tiny: Annotated[bool, typer.Option(help="small shapes: the program in seconds")] = False,
) -> None:
    """Measure at real shapes."""
    began, console = time.perf_counter(), Console(width=150)
    place = torch.device(device)
    sizes = TINY if tiny else Sizes(batch=batch)
    race = Race(sizes, place)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
    peak = peak_flops(name, torch.bfloat16)
    matmul = matmul_flops(place, tiny)
    weights = weigh_losses(race)
    console.print(weights)
    results = measure(race, rounds, steps, compile_too, began + 60 * minutes, console.print)
    phases = time_phases(race, results, steps)
    installed = {p: importlib.metadata.version(p) for p in ("torch", "transformers", "trl", "liger-kernel") if importlib.util.find_spec(p.replace("-", "_"))}  # fmt: skip
    result = {
        "machine": {"device": name, "versions": installed, "peak_flops": peak, "matmul_flops": matmul},
        "sizes": asdict(sizes),
        "parameters": {"target": race.target.num_parameters(), "draft": race.student.num_parameters()},
        "flops_of_a_step": race.flops(),
        "cells": make_cells(race, results, weights, peak, matmul, phases),
        "loss_alone": weights,
        "minutes": (time.perf_counter() - began) / 60,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".tmp")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(out)
    columns = ("contestant", "objective", "tokens_per_second", "vs_floor", "vs_trl", "mfu", "mfu_student", "mfu_student_of_matmul", "peak_memory_mb", "loss_memory_ratio", "error")  # fmt: skip
    table = Table(*columns, title=f"{name}, {sizes.batch} x {sizes.length} tokens, vocabulary {sizes.vocab:,}")
    for cell in result["cells"]:
        values = [cell.get(column) for column in columns]
        table.add_row(*("" if v is None else f"{v:,.3g}" if isinstance(v, float) and v < 100 else f"{v:,.0f}" if isinstance(v, float) else str(v) for v in values))  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
