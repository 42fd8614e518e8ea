"""The trained module: a student and its objective in one forward, so that every gradient passes Accelerate's hooks."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from data.batches.collate import Batch
from data.signals.signal import Signal
from distill.config.layout import STUDENT, step_folder
from distill.loss.chunk_heads import Student
from distill.loss.definitions import Objective
from distill.loss.objective import acceptance_sum, chunked_loss, kept_probs
from distill.loss.offsets import Survival, survival_sums
from distill.loss.rows import part_of
from distill.models.heads import SplitModel
from speculative.decoder.responses import StageClock
from speculative.engine.models import mask_token_of, masked_pass


@dataclass(frozen=True)
class Adapter:
    """Adapters saved as a peft directory next to a checkpoint's merged student. Their base is the run's first student."""

    student: Any

    def save_pretrained(self, folder: str) -> None:
        """Save with the base as a path relative to the run, so that the run can be moved."""
        config = self.student.peft_config[self.student.active_adapter]
        config.base_model_name_or_path = f"../../{step_folder(Path(), 0).name}/{STUDENT}"
        # Otherwise peft asks the hub whether the vocabulary grew. The base already has the rows that the adapter was trained on.
        self.student.save_pretrained(folder, save_embedding_layers=False)


class DraftModule(nn.Module):
    """The module that Accelerate wraps. Its forward returns the loss, so every gradient passes the wrapper's hooks."""

    def __init__(self, student: nn.Module, objective: Objective, survival: Survival | None = None) -> None:
        """``student`` is a causal LM, or a peft model around one. ``survival``: for a parallel draft, whose config has a mask token."""
        super().__init__()
        self.student, self.objective, self.survival = student, objective, survival
        self.clock: StageClock | None = None
        # A peft model wraps a causal LM whose layers carry the adapters in place.
        adapted: Any = student
        inner: Any = adapted.get_base_model() if hasattr(student, "get_base_model") else student
        # A tuple keeps the attribute from being registered as a second copy of the module.
        self._split = (SplitModel(inner),)

    @property
    def inner(self) -> PreTrainedModel:
        """The trained causal LM, without the peft wrapper."""
        return self._split[0].model

    def forward(self, batch: Batch, signal: Signal | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(summed loss, summed acceptance, its possible error) of a micro-batch: the loss of all R tokens, the others of responses.

        The acceptance is at the serving settings. With `depths_BT`
        each position starts a block of that many tokens (`distill/loss/offsets.py`), and the acceptance is that of the first.
        """
        split, rows_R, labels_R = self._split[0], batch.rows_R, batch.labels_R
        weights_R, answers_R, depths_BT = batch.weights_R, batch.answers_R, batch.depths_BT
        if batch.drawn_R is not None:
            whole = rows_R, labels_R, weights_R, answers_R, signal
            rows_R, labels_R, weights_R, answers_R, signal = (part_of(one, batch.drawn_R) for one in whole)
        if depths_BT is None:
            hidden_BTD = split.hidden(batch.input_ids_BT, batch.position_ids_BT)
            hidden_RD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[rows_R]
        else:
            hidden_RD, sources_R, offsets_R = self._asked(batch.input_ids_BT, rows_R, depths_BT)
            signal, labels_R = part_of(signal, sources_R), labels_R[sources_R]
            weights_R = self._weighted(part_of(weights_R, sources_R), offsets_R)
            answers_R = offsets_R == 1 if answers_R is None else (offsets_R == 1) & answers_R[sources_R]
        if self.clock is not None:
            self.clock.mark("student")
        student = Student(hidden_RD, split.head)
        loss, overlap_R, slack_R = chunked_loss(self.objective, student, signal, labels_R, weights_R)
        chosen = slice(None) if answers_R is None else answers_R
        accepted = None
        if signal is not None and not self.objective.overlap_is_acceptance:
            accepted = acceptance_sum(self.objective, student.rows(chosen), signal.rows(chosen))
        if accepted is None:
            accepted = overlap_R[chosen].double().sum()
        if depths_BT is not None:
            self._note_survival(depths_BT, rows_R, student, signal, labels_R)
        if self.clock is not None:
            self.clock.mark("loss")
        return loss, accepted, slack_R[chosen].double().sum()

    def _asked(self, input_ids_BT: Tensor, rows_R: Tensor, depths_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden states, row with the same label, offset): first for the R rows of offset 1, then for later offsets, start by start."""
        mask_token, length = mask_token_of(self.inner.config), input_ids_BT.shape[1]
        assert mask_token is not None
        masked = masked_pass(self.inner, input_ids_BT, depths_BT, mask_token)
        hidden_BLD = self._split[0].hidden(masked.input_ids_BL, masked.position_ids_BL, masked.attention)
        width = hidden_BLD.shape[1]
        places_R = torch.cat([rows_R // length * width + rows_R % length, masked.texts_N * width + masked.columns_N])
        numbers = _numbers(rows_R, depths_BT)
        behind_N = numbers[masked.texts_N * length + masked.starts_N + masked.offsets_N - 1]
        sources_R = torch.cat([numbers[rows_R], behind_N])
        offsets_R = torch.cat([torch.ones_like(rows_R), masked.offsets_N])
        return hidden_BLD.reshape(-1, hidden_BLD.shape[-1])[places_R], sources_R, offsets_R

    def _weighted(self, weights_R: Tensor | None, offsets_R: Tensor) -> Tensor:
        assert self.survival is not None
        by_offset_R = torch.tensor(self.survival.weights(), dtype=torch.float64, device=offsets_R.device)[offsets_R - 1]
        return by_offset_R if weights_R is None else by_offset_R * weights_R

    def _note_survival(
        self, depths_BT: Tensor, rows_R: Tensor, student: Student, signal: Signal | None, labels_R: Tensor
    ) -> None:
        """Record how far a server would keep one block of each text, the first of the deepest ones."""
        assert self.survival is not None
        depths_B, starts_B = depths_BT.max(-1)
        flat_B = starts_B + torch.arange(len(depths_B), device=starts_B.device) * depths_BT.shape[1]
        masks_B = (depths_BT - 1).clamp_min(0).flatten().cumsum(0)[flat_B] - (depths_B - 1).clamp_min(0)
        behind_J = torch.arange(len(self.survival.kept_J), device=starts_B.device)
        rows_BJ = len(rows_R) + masks_B[:, None] + behind_J - 1
        rows_BJ[:, 0] = _numbers(rows_R, depths_BT)[flat_B]
        asked_BJ = behind_J < depths_B[:, None]
        rows_N = rows_BJ[asked_BJ]
        kept_BJ = torch.zeros(rows_BJ.shape, device=starts_B.device)
        kept_BJ[asked_BJ] = kept_probs(self.objective, student.rows(rows_N), part_of(signal, rows_N), labels_R[rows_N])
        self.survival.note(survival_sums(kept_BJ, depths_B))

    def adapter(self) -> Adapter | None:
        """The adapters of a peft student; None for other students."""
        return Adapter(self.student) if hasattr(self.student, "peft_config") else None

    def exported(self) -> PreTrainedModel:
        """A float32 causal LM of the current weights: adapters merged into a copy, otherwise the student itself."""
        if not hasattr(self.student, "merge_and_unload"):
            return self.student  # type: ignore[return-value]
        adapted: Any = copy.deepcopy(self.student)
        return adapted.merge_and_unload()


def _numbers(rows_R: Tensor, like_BT: Tensor) -> Tensor:
    """Row number of each flattened position, 0 for positions without a row. (B x T,)"""
    return torch.zeros(like_BT.numel(), dtype=rows_R.dtype, device=rows_R.device).scatter_(
        0, rows_R, torch.arange(len(rows_R), device=rows_R.device)
    )
