"""A distillation step at real sizes: tokens/s, share of the matrix-product rate, peak memory. Compares ours with full
logits, TRL's GKDTrainer and Liger's fused loss.

0.5 B learns from 8 B, vocabulary 151,936, 4 x 2,048 tokens of which 512 are prompt, Jensen-Shannon divergence, which all have. The
target is bfloat16, the draft float32 under bfloat16 autocast, fused AdamW, no gradient checkpointing, for all. Random weights.

FLOPs of a token: 6 per weight of the draft's matrices (2 of the target's), heads where logits are needed, and attention's
12 (4) x layers x width x length / 2. `mfu_of_matmul` is over a large product's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from data.batches.collate import Batch, Example, collate
from distill.loss.chunk_heads import Student
from distill.loss.definitions import Objective
from distill.loss.objective import chunked_loss
from distill.models.carving.layers import layer_list
from distill.models.heads import SplitModel
from distill.training.teacher import Teacher
from gpu.pairs import QWEN2_500M, QWEN3_8B, Shape, tiny
from gpu.place import Place, tried


def loss_of(split: SplitModel, teacher: Teacher, objective: Objective, batch: Batch) -> Tensor:
    """The product's loss per response token. (Its DraftModule needs the configuration library.)"""
    signal = teacher.signal(batch)
    hidden_BTD = split.hidden(batch.input_ids_BT)
    hidden_RD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[batch.rows_R]
    return chunked_loss(objective, Student(hidden_RD, split.head), signal, batch.labels_R).loss / batch.labels_R.numel()


class Race:
    """The models and tokens that all share."""

    def __init__(self, place: Place) -> None:
        torch.manual_seed(0)
        self.place = place
        self.shapes = (tiny(QWEN3_8B, 2), tiny(QWEN2_500M, 1)) if place.tiny else (QWEN3_8B, QWEN2_500M)
        self.length, self.batch_size, prompt = (32, 2, 8) if place.tiny else (2048, 4, 512)
        self.target = self.model(self.shapes[0], torch.bfloat16).requires_grad_(False)
        self.student = self.model(self.shapes[1], torch.float32)
        self.teacher = Teacher(self.target)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=1e-5, fused=True)
        mask = np.arange(self.length) >= prompt
        ids = np.random.default_rng(0).integers(1, self.shapes[0].vocab, (4 * self.batch_size, self.length))
        self.examples = [Example(row.astype(np.int32), mask) for row in ids]
        self.batch: Batch = collate(self.examples[: self.batch_size], 0).to(place.device)
        self.keep_BT = torch.from_numpy(mask).to(place.device).expand(self.batch_size, -1)[:, 1:]
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
        """Of a step; heads of response rows only."""
        (target, draft), rows = self.shapes, self.batch.labels_R.numel()
        heads = 2 * rows * draft.vocab * (3 * draft.width + target.width)
        return heads + sum(
            times
            * self.tokens
            * (2 * shape.layer_weights + 4 * shape.layers * shape.heads * shape.head_width * self.length / 2)
            for times, shape in ((1, target), (3, draft))
        )


def naive_step(race: Race) -> Callable[[], None]:
    """Full logits of both models at all positions, and autograd."""

    def step() -> None:
        ids_BT = race.batch.input_ids_BT
        with torch.no_grad():
            target_BTV = race.target(input_ids=ids_BT, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        with race.autocast():
            logits_BTV = race.student(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        student_BTV = logits_BTV.float().log_softmax(-1)
        middle_BTV = torch.logaddexp(target_BTV, student_BTV) - math.log(2.0)
        loss_BT = sum(
            0.5 * F.kl_div(middle_BTV, side, reduction="none", log_target=True).sum(-1)
            for side in (target_BTV, student_BTV)
        )
        race.update((loss_BT * race.keep_BT).sum() / race.keep_BT.sum())

    return step


def our_step(race: Race, compiled: bool) -> Callable[[], None]:
    """The product's loss; `compiled`: that, and the draft's layers."""
    objective, split = Objective({"jsd": 1.0}, compile=compiled), SplitModel(race.student)
    for layer in layer_list(race.student)[1] if compiled else ():
        layer.compile()

    def step() -> None:
        with race.autocast():
            loss = loss_of(split, race.teacher, objective, race.batch)
        race.update(loss)

    return step


def liger_step(race: Race) -> Callable[[], None]:
    """Liger's fused linear JSD between the same two bodies."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    fused = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, compiled=True)
    split, head = SplitModel(race.student), race.student.get_output_embeddings()
    teacher_weight_VD = race.target.get_output_embeddings().weight

    def step() -> None:
        signal, labels_R = race.teacher.signal(race.batch), race.batch.labels_R
        with race.autocast():
            hidden_BTD = split.hidden(race.batch.input_ids_BT)
            hidden_RD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[race.batch.rows_R].bfloat16()
            loss = fused(hidden_RD, head.weight.bfloat16(), signal.hidden_RD, teacher_weight_VD, labels_R, None, None)
        race.update(loss[0] if isinstance(loss, tuple) else loss)

    return step


def trl_step(race: Race) -> Callable[[], None]:
    """TRL's GKDTrainer off policy, on a copy of the draft."""
    import trl_peer
    from distill.models.load import load_tokenizer

    peer = trl_peer.Peer("gkd", trl_peer.BETA["jsd"], 0.0, lr=1e-5)
    trainer = trl_peer.make_trainer(
        peer,
        race.model(race.shapes[1], torch.float32),
        race.target,
        load_tokenizer("embedded"),
        race.examples,
        batch_size=race.batch_size,
        max_new_tokens=1,
        max_steps=1_000_000,
        bf16=True,
    )
    return trl_peer.Stepped(trainer).step


def cells(place: Place) -> Iterator[dict[str, Any]]:
    """A cell for each contestant; times are medians after two steps that are not counted."""
    race, matmul = Race(place), place.matmul_flops()
    made: dict[str, tuple[str | None, Callable[[], Callable[[], None]]]] = {
        "floor": (None, lambda: naive_step(race)),
        "ours": (None, lambda: our_step(race, False)),
        "trl gkd": ("trl", lambda: trl_step(race)),
        "liger": ("liger_kernel", lambda: liger_step(race)),
        "ours, compiled": (None, lambda: our_step(race, True)),
    }
    if place.tiny:
        del made["ours, compiled"]
    known: dict[str, float] = {}

    def measure(name: str) -> dict[str, Any]:
        needs, make = made[name]
        if needs is not None and importlib.util.find_spec(needs) is None:
            return {"skipped": f"{needs} is not installed"}
        place.free()
        step = make()
        warm = [place.seconds(step) for _ in range(1 if place.tiny else 2)]
        seconds = known[name] = statistics.median(place.seconds(step) for _ in range(1 if place.tiny else 5))
        flops = race.flops()
        return {
            "tokens_per_second": race.tokens / seconds,
            "seconds": seconds,
            "first_step_seconds": warm[0],
            "over": {other: known[other] / seconds for other in known if other != name},
            "mfu_of_matmul": flops / seconds / matmul,
            "peak_memory_mb": torch.cuda.max_memory_allocated(place.device) / 1e6 if place.cuda else None,
        }

    for name in made:
        yield tried({"contestant": name, "objective": "jsd"}, lambda: measure(name))  # noqa: B023
        with contextlib.suppress(Exception):
            race.optimizer.zero_grad(set_to_none=True)
