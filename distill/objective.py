"""From hidden states to the loss without ever holding [batch, time, vocabulary] logits.

Legend: R response tokens (rows) of a micro-batch, C tokens of a chunk, D hidden width, V vocabulary.

The head and the loss run chunk by chunk, and each chunk's gradient with respect to hidden states and head weights is taken
at once, in the forward pass. So the peak is O(C x V), and a training step costs four head products (target forward, student
forward, two for the student's backward); recomputing both forwards in the backward would cost six.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from distill import losses

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Objective:
    """What is minimised: weights of the named losses and their constants."""

    weights: Mapping[str, float]
    temperature: float = 1.0
    beta: float = 0.5
    eta: float = 3.0
    chunk_tokens: int = 1024
    serving_temperature: float = 1.0

    def per_token(
        self, target_logits_CV: Tensor | None, student_logits_CV: Tensor, labels_C: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(loss per token, overlap per token), each (C,), in float32 or better.

        The loss sees both distributions softened by `temperature`; there is no temperature-squared factor, so the gradient
        shrinks as the temperature grows. The overlap (sum_v min) is taken at `serving_temperature` and carries no gradient; it is 0
        without a target.
        """
        student_log_probs_CV = _log_probs(student_logits_CV, self.temperature)
        target_log_probs_CV = None if target_logits_CV is None else _log_probs(target_logits_CV, self.temperature)
        loss_C = losses.mixed(
            target_log_probs_CV, student_log_probs_CV, labels_C, self.weights, beta=self.beta, eta=self.eta
        )
        if target_logits_CV is None or target_log_probs_CV is None:
            return loss_C, torch.zeros_like(loss_C)
        with torch.no_grad():
            if self.temperature != self.serving_temperature:
                target_log_probs_CV, student_log_probs_CV = (
                    _log_probs(target_logits_CV, self.serving_temperature),
                    _log_probs(student_logits_CV, self.serving_temperature),
                )
            overlap_C = losses.overlap(target_log_probs_CV, student_log_probs_CV)
        return loss_C, overlap_C


def _log_probs(logits: Tensor, temperature: float) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits / temperature, dim=-1)


@dataclass
class Sums:
    """Sums over the response tokens of a micro-batch; `loss` carries the gradient."""

    loss: Tensor
    overlap: Tensor
    tokens: int


@dataclass
class _Gradients:
    """What the chunk loop collects for the backward pass."""

    hidden_RD: Tensor
    parameters: list[Tensor] = field(default_factory=list)


def chunked_loss(
    objective: Objective,
    student_hidden_RD: Tensor,
    student_head: Head,
    head_parameters: list[nn.Parameter],
    target_hidden_RD: Tensor | None,
    target_head: Head | None,
    labels_R: Tensor,
) -> Sums:
    """Summed loss of R response tokens, chunk by chunk; its backward uses the gradients taken on the way.

    Args:
        student_hidden_RD: hidden states that predict `labels_R`, with gradient.
        student_head: hidden (C, D) -> logits (C, V).
        head_parameters: trainable parameters that `student_head` uses.
        target_hidden_RD, target_head: the target's; None when no objective needs them.
    """
    overlaps: list[Tensor] = []
    # Inside the function's forward gradients are off, so whether the caller wants them is asked here.
    loss = _ChunkedLoss.apply(
        objective, torch.is_grad_enabled(), student_head, target_head, target_hidden_RD, labels_R, overlaps, student_hidden_RD,
        *head_parameters,
    )  # fmt: skip
    return Sums(loss=loss, overlap=torch.stack(overlaps).sum(), tokens=labels_R.numel())


def eager_loss(
    objective: Objective,
    student_hidden_RD: Tensor,
    student_head: Head,
    target_hidden_RD: Tensor | None,
    target_head: Head | None,
    labels_R: Tensor,
) -> Sums:
    """The slow twin of `chunked_loss`: all logits at once, gradients by autograd."""
    target_logits_RV = None
    if target_head is not None and target_hidden_RD is not None:
        with torch.no_grad():
            target_logits_RV = target_head(target_hidden_RD)
    loss_R, overlap_R = objective.per_token(target_logits_RV, student_head(student_hidden_RD), labels_R)
    return Sums(loss=loss_R.sum(), overlap=overlap_R.sum(), tokens=labels_R.numel())


class _ChunkedLoss(torch.autograd.Function):
    """Gradient in the forward; the backward only scales it. Correct because the loss enters the step linearly."""

    @staticmethod
    def forward(
        ctx: Any,
        objective: Objective,
        wants_gradient: bool,
        student_head: Head,
        target_head: Head | None,
        target_hidden_RD: Tensor | None,
        labels_R: Tensor,
        overlaps: list[Tensor],
        student_hidden_RD: Tensor,
        *head_parameters: Tensor,
    ) -> Tensor:
        needs_gradient = wants_gradient and any(ctx.needs_input_grad)
        trainable = [p for p in head_parameters if p.requires_grad] if needs_gradient else []
        gradients = _Gradients(torch.zeros_like(student_hidden_RD), [torch.zeros_like(p) for p in trainable])
        total = torch.zeros((), dtype=torch.float64, device=student_hidden_RD.device)
        overlaps.append(torch.zeros((), dtype=torch.float64, device=student_hidden_RD.device))
        for start in range(0, labels_R.numel(), objective.chunk_tokens):
            rows = slice(start, start + objective.chunk_tokens)
            target_logits_CV = None
            if target_head is not None and target_hidden_RD is not None:
                target_logits_CV = target_head(target_hidden_RD[rows])
            with torch.set_grad_enabled(needs_gradient):
                hidden_CD = student_hidden_RD[rows].detach().requires_grad_(needs_gradient)
                loss_C, overlap_C = objective.per_token(target_logits_CV, student_head(hidden_CD), labels_R[rows])
                loss = loss_C.sum()
            if needs_gradient:
                hidden_gradient_CD, *parameter_gradients = torch.autograd.grad(loss, [hidden_CD, *trainable])
                gradients.hidden_RD[rows] = hidden_gradient_CD
                for collected, gradient in zip(gradients.parameters, parameter_gradients, strict=True):
                    collected += gradient
            total += loss.detach()
            overlaps.append(overlap_C.detach().double().sum())
        ctx.save_for_backward(gradients.hidden_RD, *gradients.parameters)
        ctx.trainable = [p.requires_grad for p in head_parameters]
        return total.float()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        scale = grad_outputs[0]
        hidden_RD, *parameters = ctx.saved_tensors
        remaining = iter(parameters)
        scaled = [next(remaining) * scale if trains else None for trains in ctx.trainable]
        return (None, None, None, None, None, None, None, hidden_RD * scale.to(hidden_RD.dtype), *scaled)
