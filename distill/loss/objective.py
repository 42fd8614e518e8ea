"""From hidden states to the loss, without [batch, time, vocabulary] logits in memory.

Legend: R response tokens (rows) of a micro-batch, C tokens of a chunk, D hidden width, V vocabulary.

The head's products run chunk by chunk. Each chunk's gradient is computed at once, by autograd through its rows
(`distill/loss/rows.py`). The
peak memory is O(C x V). A step costs four products with a head: target forward, student forward, and two for the student's backward;
three with a stored signal. Inside a chunk, rows are processed in blocks small enough to stay in the cache.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from data.signals.signal import DenseSignal, Signal, TopKSignal
from distill.loss import definitions as losses
from distill.loss.chunk_heads import Head, OutputHead, Student, frozen_head_of, head_of, slices
from distill.loss.definitions import Objective
from distill.loss.rows import Rows, part_of, rows_of

# Bytes of a chunk's logits. On a CPU the head's weights are read once per chunk, so a chunk has at least CPU_ROWS rows.
CPU_CHUNK, CPU_ROWS, GPU_CHUNK = 8 << 20, 512, 256 << 20
# Bytes of a block of dense rows. About five such tensors share a core's cache; on a GPU they only limit temporary memory. Rows with a
# stored signal need less, so their blocks have four times the rows.
CPU_BLOCK, GPU_BLOCK = 1 << 20, 64 << 20
# Rows of a micro-batch used to estimate the server's acceptance, and the limit of their logits.
MEASURED_ROWS, MEASURED_LOGITS = 128, 1 << 23


class Scored(NamedTuple):
    """The summed loss of R rows, which has the gradient, and the overlap of student and target at each row.

    The overlap at the loss's temperature is within [overlap, overlap + slack]; the slack is 0 except for a top-k
    signal. Both ignore tokens' weights.
    """

    loss: Tensor
    overlap_R: Tensor
    slack_R: Tensor


def chunked_loss(
    objective: Objective,
    student: Student,
    signal: Signal | None,
    labels_R: Tensor,
    weights_R: Tensor | None = None,
) -> Scored:
    """Summed loss of R tokens, chunk by chunk. Its backward returns the gradients computed in the forward, once.

    `weights_R` multiplies loss and gradient of each token. Without a signal the objective is ce alone.
    """
    parameters = student.head.parameters()
    # Gradients are off inside the function's forward, so check here whether the caller wants them.
    wants_gradient = torch.is_grad_enabled() and (student.hidden_RD.requires_grad or bool(parameters))
    sweep = _Sweep(objective, signal, labels_R, weights_R, wants_gradient)
    loss = _ChunkedLoss.apply(sweep, student.head, student.hidden_RD, *parameters)
    return Scored(loss, *sweep.found[1:])


@torch.no_grad()
def acceptance_sum(objective: Objective, student: Student, signal: Signal) -> Tensor | None:
    """Estimate how many of the R rows' tokens a server would accept from the student, from at most 128 evenly spread rows.

    A top-k signal counts as the whole distribution, because tokens excluded by truncation are in its tail. None without rows.
    """
    tokens = len(student.hidden_RD)
    if not tokens:
        return None
    most = max(1, min(MEASURED_ROWS, MEASURED_LOGITS // student.head.vocabulary))
    spread = slice(None, None, -(-tokens // most))
    target_NV, student_NV = _both_logits(objective, student.rows(spread), part_of(signal, spread))
    assert target_NV is not None
    # A row without stored entries is nan.
    accepted_N = losses.acceptance(target_NV, student_NV, objective.serving, objective.rule).nan_to_num(0.0)
    return accepted_N.double().mean() * tokens


@torch.no_grad()
def kept_probs(objective: Objective, student: Student, signal: Signal | None, labels_R: Tensor) -> Tensor:
    """Probability that the server keeps the target's own token if it is drafted at its row: `definitions.kept`. (R,)"""
    parts = [torch.zeros(0, device=labels_R.device)]
    for chosen in slices(len(labels_R), max(1, MEASURED_LOGITS // student.head.vocabulary)):
        both = _both_logits(objective, student.rows(chosen), part_of(signal, chosen))
        parts.append(losses.kept(*both, labels_R[chosen], objective.serving, objective.rule).float())
    return torch.cat(parts)


def _both_logits(objective: Objective, student: Student, signal: Signal | None) -> tuple[Tensor | None, Tensor]:
    """(target, student) logits of a few rows, without gradient; no target logits without a signal."""
    student_NV = head_of(student, False).logits(slice(None))
    if isinstance(signal, DenseSignal):
        return frozen_head_of(signal).logits(slice(None)), student_NV
    if not isinstance(signal, TopKSignal):
        return None, student_NV
    target_NV = torch.full_like(student_NV, -torch.inf, dtype=signal.log_probs_RK.dtype)
    target_NV.scatter_reduce_(-1, signal.ids_RK, signal.log_probs_RK * objective.temperature, "amax")
    return target_NV, student_NV


class _ChunkedLoss(torch.autograd.Function):
    """Compute the gradient in the forward; the backward only scales it. Correct because the step is linear in the loss.

    The head's parameters are inputs, so their gradients pass through the graph: hooks of DDP and FSDP see them, a
    tied embedding adds its own, and a second call before the optimizer's step accumulates.
    """

    @staticmethod
    def forward(ctx: Any, sweep: "_Sweep", head: OutputHead, hidden_RD: Tensor, *parameters: Tensor) -> Tensor:
        student = head_of(Student(hidden_RD, head), sweep.wants_gradient)
        loss_R = sweep.run(student).loss_C
        ctx.gradients = student.gradients(parameters) if sweep.wants_gradient else None
        return loss_R.double().sum().to(torch.promote_types(loss_R.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the chunked loss returns its gradients once; call it again for a second backward")
        # In place and without another reference, so that autograd takes the head's gradient without a copy.
        scale = grad_outputs[0]
        return (None, None, *(None if one is None else one.mul_(scale) for one in gradients))


@dataclass
class _Sweep:
    """One pass over all rows: logits, row mathematics and gradients, chunk by chunk."""

    objective: Objective
    signal: Signal | None
    labels_R: Tensor
    weights_R: Tensor | None
    wants_gradient: bool
    found: Rows = field(init=False)

    def run(self, head: Head) -> Rows:
        """Loss, overlap and slack of every row; the head collects the gradients."""
        objective, device = self.objective, self.labels_R.device
        cpu, row = device.type == "cpu", head.vocabulary * head.dtype.itemsize
        chunk = objective.chunk_tokens or (max(CPU_ROWS, CPU_CHUNK // row) if cpu else max(1, GPU_CHUNK // row))
        target = frozen_head_of(self.signal) if isinstance(self.signal, DenseSignal) else None
        most = GPU_BLOCK if not cpu else CPU_BLOCK if target is not None else 4 * CPU_BLOCK
        # On a CPU one share per thread, because a softmax is parallel over rows.
        block = min(chunk, max(1, most // (head.vocabulary * 4)) * (torch.get_num_threads() if cpu else 1))
        dtype = torch.promote_types(head.dtype, torch.float32)
        # Allocated first, because small tensors between the blocks' memory would fragment it.
        self.found = Rows(*(torch.zeros(self.labels_R.numel(), dtype=dtype, device=device) for _ in Rows._fields))
        for chosen in slices(self.labels_R.numel(), chunk):
            logits_CV = head.logits(chosen)
            against = part_of(self.signal, chosen) if target is None else target.logits(chosen)
            if target is not None and against.shape != logits_CV.shape:
                raise ValueError(f"target logits {tuple(against.shape)}, student logits {tuple(logits_CV.shape)}")
            labels_C, weights_C = self.labels_R[chosen], part_of(self.weights_R, chosen)
            into_CV = logits_CV if head.in_place or not self.wants_gradient else torch.empty_like(logits_CV)
            for part in slices(len(logits_CV), block):
                rows, gradient_CV = rows_of(
                    objective,
                    part_of(against, part),
                    logits_CV[part],
                    labels_C[part],
                    part_of(weights_C, part),
                    self.wants_gradient,
                )
                for whole_R, own in zip(self.found, rows, strict=True):
                    whole_R[chosen][part] = own
                if gradient_CV is not None:
                    into_CV[part] = head.before_cap(gradient_CV, logits_CV[part])
            if self.wants_gradient:
                head.take(chosen, into_CV)
            del logits_CV, into_CV, against
        return self.found
