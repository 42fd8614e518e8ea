"""A distillation step at real sizes: tokens/s and peak memory of ours and of full logits, the memory that bench/memory.py predicts.

0.6 B learns from 8 B, vocabulary 151,936, 4 x 2,048 tokens, forward KL. The target is bfloat16, the draft float32 under bfloat16
autocast, fused AdamW, no gradient checkpointing, for both. Random weights.

FLOPs of a token: 6 per weight of the draft's matrices (2 of the target's), and attention's 12 (4) x layers x width x length / 2.
`mfu_of_matmul` is over a large product's.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from data.batches.collate import Batch, Example, collate
from distill.loss.definitions import Objective
from distill.training.module import DraftModule
from distill.training.teacher import Teacher
from gpu.pairs import QWEN3_8B, QWEN3_600M, Shape, tiny
from gpu.place import Place, tried
from memory import step_bytes

OVER_NAIVE = 1.2  # seconds of our step over those of the naive one, at most


class Race:
    """The models and tokens that all share."""

    def __init__(self, place: Place) -> None:
        torch.manual_seed(0)
        self.place = place
        self.shapes = (tiny(QWEN3_8B, 2), tiny(QWEN3_600M, 1)) if place.tiny else (QWEN3_8B, QWEN3_600M)
        self.length, self.batch_size = (32, 2) if place.tiny else (2048, 4)
        self.target = self.model(self.shapes[0], torch.bfloat16).requires_grad_(False)
        self.student = self.model(self.shapes[1], torch.float32)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=1e-5, fused=True)
        ids = np.random.default_rng(0).integers(1, self.shapes[0].vocab, (self.batch_size, self.length))
        learned = np.ones(self.length, bool)
        self.batch: Batch = collate([Example(row.astype(np.int32), learned) for row in ids], 0).to(place.device)
        self.tokens = self.batch_size * self.length

    def model(self, shape: Shape, dtype: torch.dtype) -> Any:
        with torch.device(self.place.device):
            model = AutoModelForCausalLM.from_config(shape.config(self.length), dtype=dtype)
        model.generation_config.eos_token_id = None
        return model

    def autocast(self) -> Any:
        """The draft's precision."""
        return torch.autocast(self.place.device.type, torch.bfloat16)

    def update(self, loss: Tensor) -> None:
        """Backward, clip, step."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def flops(self) -> float:
        """Of a step."""
        (target, draft), rows = self.shapes, self.batch.labels_R.numel()
        heads = 2 * rows * draft.vocab * (3 * draft.width + target.width)
        return heads + sum(
            times
            * self.tokens
            * (2 * shape.layer_weights + 4 * shape.layers * shape.heads * shape.head_width * self.length / 2)
            for times, shape in ((1, target), (3, draft))
        )


def naive_step(race: Race) -> Callable[[], None]:
    """Full logits of both models, and autograd."""

    def step() -> None:
        ids_BT = race.batch.input_ids_BT
        with torch.no_grad():
            target_BTV = race.target(input_ids=ids_BT, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        with race.autocast():
            logits_BTV = race.student(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        student_BTV = logits_BTV.float().log_softmax(-1)
        loss_BT = F.kl_div(student_BTV, target_BTV, reduction="none", log_target=True).sum(-1)
        race.update(loss_BT.mean())

    return step


def our_step(race: Race) -> Callable[[], None]:
    """The product's module, teacher and loss."""
    module, teacher = DraftModule(race.student, Objective({"forward_kl": 1.0})), Teacher(race.target)

    def step() -> None:
        signal = teacher.signal(race.batch)
        with race.autocast():
            loss, _, _ = module(race.batch, signal)
        race.update(loss / race.batch.labels_R.numel())

    return step


def predicted_bytes(race: Race) -> int:
    """Peak of our step by bench/memory.py, with AdamW's moments."""
    configs = (shape.config(race.length) for shape in race.shapes)
    states = 8 * sum(weight.numel() for weight in race.student.parameters())
    return step_bytes(*configs, race.batch_size, race.length, "forward_kl")[1] + states


def cells(place: Place) -> Iterator[dict[str, Any]]:
    """A cell for each contestant; times are medians after two steps that are not counted."""
    race, matmul = Race(place), place.matmul_flops()
    seconds_of: dict[str, float] = {}

    def measure(name: str, make: Callable[[Race], Callable[[], None]]) -> dict[str, Any]:
        place.free()
        step = make(race)
        warm = [place.seconds(step) for _ in range(1 if place.tiny else 2)]
        seconds = seconds_of[name] = statistics.median(place.seconds(step) for _ in range(1 if place.tiny else 5))
        return {
            "tokens_per_second": race.tokens / seconds,
            "seconds": seconds,
            "first_step_seconds": warm[0],
            "mfu_of_matmul": race.flops() / seconds / matmul,
            "peak_mb": torch.cuda.max_memory_allocated(place.device) / 1e6 if place.cuda else None,
        }

    def compared() -> dict[str, Any]:
        cell = measure("ours", our_step)
        naive = seconds_of.get("naive")  # None: it did not fit
        cell |= {"over_naive": naive and seconds_of["ours"] / naive, "predicted_mb": predicted_bytes(race) / 1e6}
        return cell | {"peak_over_predicted": cell["peak_mb"] / cell["predicted_mb"] if place.cuda else None}

    yield tried({"contestant": "naive"}, lambda: measure("naive", naive_step))
    with contextlib.suppress(Exception):
        race.optimizer.zero_grad(set_to_none=True)
    yield tried({"contestant": "ours", "limits": {"over_naive": OVER_NAIVE}}, compared)
