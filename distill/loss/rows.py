"""The loss of each row for each kind of signal, from logits to distributions to the objectives. Differentiable by autograd.

Legend: C tokens (rows), V vocabulary, K stored entries, N rows, E events; a trailing 1 is a column with one number per row.

A stored top-k is a distribution over K + 1 events, the last being "any other token". Only the two steps
over the whole vocabulary have a hand-written backward, which all objectives share.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.signals.signal import TopKSignal
from distill.loss import definitions as losses
from distill.loss.definitions import LOWEST, Distribution, Objective, Pair

Against = Tensor | TopKSignal | None  # target logits, a stored signal, or nothing
INFINITE = 1e20  # a loss above this counts as infinite, see `LOWEST`


class Rows(NamedTuple):
    """Loss, overlap, and how much the overlap can be too low, each (C,). The loss includes the tokens' weights; the overlap does not."""

    loss_C: Tensor
    overlap_C: Tensor
    slack_C: Tensor


class _Softmax(torch.autograd.Function):
    """Scores (N, V) and labels (N, 1) -> log-probabilities, probabilities, and the label's log-probability (N, 1)."""

    @staticmethod
    def forward(ctx: Any, scores_NV: Tensor, labels_N1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        probs_NV = torch.softmax(scores_NV, -1)
        # The log-sum-exp follows from the softmax at its peak, which needs two reads instead of another exponential.
        log_probs_NV = (scores_NV - scores_NV.amax(-1, keepdim=True)).add_(probs_NV.amax(-1, keepdim=True).log())
        log_probs_NV.clamp_(min=LOWEST)
        ctx.save_for_backward(probs_NV, labels_N1)
        return log_probs_NV, probs_NV, log_probs_NV.gather(-1, labels_N1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        by_log_NV, by_prob_NV, by_label_N1 = gradients
        probs_NV, labels_N1 = (saved.detach() for saved in ctx.saved_tensors)
        flow_NV = by_log_NV
        if by_prob_NV is not None:
            flow_NV = by_prob_NV * probs_NV if by_log_NV is None else torch.addcmul(by_log_NV, by_prob_NV, probs_NV)
        # d log student_u / d score_v = [u = v] - student_v.
        sum_N1 = torch.zeros_like(probs_NV[:, :1]) if flow_NV is None else flow_NV.sum(-1, keepdim=True)
        if by_label_N1 is not None:
            sum_N1 = sum_N1 + by_label_N1
        # In place, because there is one backward only and new memory costs more than the arithmetic.
        gradient_NV = probs_NV.mul_(-sum_N1)
        if flow_NV is not None:
            gradient_NV.add_(flow_NV)
        if by_label_N1 is not None:
            gradient_NV.scatter_add_(-1, labels_N1, by_label_N1)
        return gradient_NV, None


class _Events(torch.autograd.Function):
    """Scores (N, V), ids (N, K), mask of filled entries, labels (N, 1) -> log-masses (N, K + 1), the label's score (N, 1).

    An empty entry has the id of a filled one in its row, and no mass. In a row without filled entries all tokens are in the rest.
    """

    @staticmethod
    def forward(
        ctx: Any, scores_NV: Tensor, ids_NK: Tensor, full_NK: Tensor, labels_N1: Tensor
    ) -> tuple[Tensor, Tensor]:
        stored_NK = scores_NV.gather(-1, ids_NK)
        others_NV = scores_NV.scatter(-1, ids_NK, stored_NK.masked_fill(full_NK.any(-1, keepdim=True), LOWEST))
        # A softmax over the rest is exact even for little mass, where 1 - sum(stored) would round to 0.
        share_NV = torch.softmax(others_NV, -1)
        rest_N1 = others_NV.amax(-1, keepdim=True) - share_NV.amax(-1, keepdim=True).log()
        ctx.save_for_backward(share_NV, ids_NK, full_NK, labels_N1)
        return torch.cat([stored_NK.masked_fill(~full_NK, -torch.inf), rest_N1], -1), scores_NV.gather(-1, labels_N1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        by_mass_NE, by_label_N1 = gradients
        share_NV, ids_NK, full_NK, labels_N1 = ctx.saved_tensors
        gradient_NV = share_NV.mul_(by_mass_NE[:, -1:])  # stored tokens have no share in the rest
        gradient_NV.scatter_add_(-1, ids_NK, by_mass_NE[:, :-1].masked_fill(~full_NK, 0.0))
        return gradient_NV.scatter_add_(-1, labels_N1, by_label_N1), None, None, None


def row_losses(
    objective: Objective, against: Against, student_logits_CV: Tensor, labels_C: Tensor, weights_C: Tensor | None
) -> Rows:
    """The objectives' value at each row. Only `loss_C` passes gradients to the student's logits.

    `weights_C` multiplies the loss.
    """
    scores_CV, labels_C1 = _scores(student_logits_CV, objective.temperature), labels_C.unsqueeze(-1)
    if isinstance(against, Tensor):
        pair, slack_C = _dense_pair(_scores(against, objective.temperature), scores_CV, labels_C1)
        overlap_C, loss_C = pair.overlap_N, losses.mixed(objective, pair)
    elif isinstance(against, TopKSignal):
        pair, slack_C = _stored_pair(against, scores_CV, labels_C1)
        overlap_C, loss_C = pair.overlap_N - slack_C, losses.mixed(objective, pair)
    else:
        assert objective.weights.keys() == {"ce"}  # every other objective needs a signal
        nothing_C0 = labels_C1[:, :0]
        _, log_label_C = _events(scores_CV, nothing_C0, nothing_C0.bool(), labels_C1)
        loss_C, overlap_C = -objective.weights["ce"] * log_label_C, torch.zeros_like(log_label_C)
        slack_C = overlap_C
    if weights_C is not None:
        loss_C = loss_C * weights_C.to(loss_C.dtype)
    return Rows(loss_C, overlap_C, slack_C)


def _dense_pair(target_CV: Tensor, student_CV: Tensor, labels_C1: Tensor) -> tuple[Pair, Tensor]:
    """(pair, slack of its overlap, which is 0)."""
    target = Distribution(*_Softmax.apply(target_CV, labels_C1)[:2])
    *both, log_label_C1 = _Softmax.apply(student_CV, labels_C1)
    student = Distribution(*both)
    overlap_C = losses.overlap(target.probs_NE, student.probs_NE)
    return Pair(target, student, overlap_C, log_label_C1.squeeze(-1)), torch.zeros_like(overlap_C)


def _stored_pair(signal: TopKSignal, student_CV: Tensor, labels_C1: Tensor) -> tuple[Pair, Tensor]:
    """(pair, the overlap of its last event): an upper bound of the common mass of all other tokens."""
    ids_CK, full_CK = losses.filled_ids(signal.ids_RK, signal.log_probs_RK)
    student, log_label_C = _events(student_CV, ids_CK, full_CK, labels_C1)
    target_CE = torch.cat([signal.log_probs_RK, signal.log_tail_R.unsqueeze(-1)], -1).to(student_CV.dtype)
    target = Distribution(target_CE.clamp(min=LOWEST), target_CE.exp())
    # Stored probabilities are rounded and do not sum to one.
    overlap_C = losses.overlap(target.probs_NE, student.probs_NE, target.probs_NE.sum(-1))
    slack_C = torch.minimum(target.probs_NE[:, -1], student.probs_NE[:, -1])
    return Pair(target, student, overlap_C, log_label_C), slack_C


def _events(scores_CV: Tensor, ids_CK: Tensor, full_CK: Tensor, labels_C1: Tensor) -> tuple[Distribution, Tensor]:
    """(the student's distribution over K tokens and the rest, log-probability of the label (C,))."""
    masses_CE, label_C1 = _Events.apply(scores_CV, ids_CK, full_CK, labels_C1)
    normaliser_C1 = masses_CE.logsumexp(-1, keepdim=True)
    log_probs_CE = (masses_CE - normaliser_C1).clamp(min=LOWEST)
    return Distribution(log_probs_CE, log_probs_CE.exp()), (label_C1 - normaliser_C1).squeeze(-1)


def _scores(logits_CV: Tensor, temperature: float) -> Tensor:
    """Logits / temperature in float32 or better."""
    scores_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return scores_CV if temperature == 1.0 else scores_CV / temperature


def rows_of(
    objective: Objective,
    against: Against,
    student_logits_CV: Tensor,
    labels_C: Tensor,
    weights_C: Tensor | None,
    wants_gradient: bool,
) -> tuple[Rows, Tensor | None]:
    """Detached `row_losses`, and if wanted the gradient of their sum with respect to the student's logits (C, V)."""
    arguments = (objective, against, student_logits_CV, labels_C, weights_C)
    return (_compiled() if objective.compile else _differentiated)(arguments, wants_gradient)


def _differentiated(
    arguments: tuple[Any, ...], wants_gradient: bool, function: Callable[..., Rows] = row_losses
) -> tuple[Rows, Tensor | None]:
    objective, against, student_logits_CV, *others = arguments
    with torch.set_grad_enabled(wants_gradient):
        logits_CV = student_logits_CV.detach().requires_grad_(wants_gradient)
        rows = function(objective, against, logits_CV, *others)
        gradient_CV = torch.autograd.grad(rows.loss_C.sum(), logits_CV)[0] if wants_gradient else None
    loss_C, overlap_C, slack_C = (value.detach() for value in rows)
    return Rows(loss_C.masked_fill(loss_C > INFINITE, torch.inf), overlap_C, slack_C), gradient_CV


@functools.cache
def _compiled() -> Callable[..., tuple[Rows, Tensor | None]]:
    """`_differentiated` with `row_losses` compiled at the first call. Without a usable compiler it warns once and runs uncompiled."""
    function, usable = torch.compile(row_losses), True

    def call(arguments: tuple[Any, ...], wants_gradient: bool) -> tuple[Rows, Tensor | None]:
        nonlocal usable
        if usable:
            try:
                return _differentiated(arguments, wants_gradient, function)
            except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.CppCompileError) as error:
                usable = False
                reason = str(error).strip().splitlines()[0][:200]
                warnings.warn(f"torch.compile cannot compile the loss, which runs uncompiled: {reason}", stacklevel=2)
        return _differentiated(arguments, wants_gradient)

    return call


def part_of(rows: Any, chosen: slice | Tensor) -> Any:
    """A subset of the rows of a tensor or a signal; None for None."""
    if rows is None:
        return None
    return rows[chosen] if isinstance(rows, Tensor) else rows.rows(chosen)
