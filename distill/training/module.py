"""The module that trains: a student and its objective, wrapped so that every gradient passes Accelerate's hooks."""

import copy
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from data.signals.signal import DenseSignal, Signal
from distill.loss.definitions import Objective
from distill.loss.objective import acceptance_sum, chunked_loss
from distill.models.heads import SplitModel
from speculative.decoder.stage_clock import StageClock


class DraftModule(nn.Module):
    """What Accelerate wraps: its forward makes the loss, so that every parameter's gradient passes the wrapper's hooks."""

    def __init__(self, student: nn.Module, objective: Objective) -> None:
        """``student`` is a causal LM, or a peft model around one."""
        super().__init__()
        self.student = student
        self.objective = objective
        self.clock: StageClock | None = None
        # A peft model wraps a causal LM whose layers carry the adapters in place.
        adapted: Any = student
        inner: Any = adapted.get_base_model() if hasattr(student, "get_base_model") else student
        # In a tuple: a plain attribute, not a second registration of the same module.
        self._split = (SplitModel(inner),)

    @property
    def inner(self) -> PreTrainedModel:
        """The causal LM that trains, inside its adapters if it has any."""
        return self._split[0].model

    def forward(
        self,
        input_ids_BT: Tensor,
        rows_R: Tensor,
        labels_R: Tensor,
        signal: Signal | None = None,
        weights_R: Tensor | None = None,
        position_ids_BT: Tensor | None = None,
        reference: DenseSignal | None = None,
        answers_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(summed loss, summed acceptance, what it may be off by) over the R tokens of a micro-batch, the last two over its answers.

        The acceptance is the server's; with a sampled signal the overlap at the loss's temperature stands for it.
        """
        split = self._split[0]
        hidden_BTD = split.hidden(input_ids_BT, position_ids_BT)
        hidden_RD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[rows_R]
        if self.clock is not None:
            self.clock.mark("student")
        sums = chunked_loss(
            self.objective, hidden_RD, split.head, signal, labels_R, weights_R, reference=reference, answers_R=answers_R
        )
        accepted = None
        if signal is not None and not self.objective.overlap_is_acceptance:
            chosen = slice(None) if answers_R is None else answers_R
            accepted = acceptance_sum(self.objective, hidden_RD[chosen], split.head, signal.rows(chosen))
        if self.clock is not None:
            self.clock.mark("loss")
        return sums.loss, sums.overlap if accepted is None else accepted, sums.overlap_slack

    def exported(self) -> PreTrainedModel:
        """A float32 causal LM of the current weights: adapters merged into a copy, otherwise the student itself."""
        if not hasattr(self.student, "merge_and_unload"):
            return self.student  # type: ignore[return-value]
        adapted: Any = copy.deepcopy(self.student)
        return adapted.merge_and_unload()
