"""The slow twin of the chunked loss: all logits at once, every objective by its textbook formula, gradients by autograd alone.

Legend: N tokens, E events, V vocabulary, K stored entries, R response tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from data.signals.signal import Signal, TopKSignal
from distill.loss.chunk_heads import Student
from distill.loss.definitions import (
    Objective,
    filled_ids,
)
from distill.loss.objective import Scored


def kl(first_NE: Tensor, second_NE: Tensor) -> Tensor:
    """KL(first || second) of log-probabilities; 0 log 0 = 0. (N,)"""
    difference_NE = torch.where(first_NE > -torch.inf, first_NE - second_NE, 0.0)
    return (first_NE.exp() * difference_NE).sum(-1)


def overlap(target_NE: Tensor, student_NE: Tensor) -> Tensor:
    """sum_e min(target, student) of log-probabilities. (N,)"""
    return torch.minimum(target_NE, student_NE).exp().sum(-1)


def jsd(target_NE: Tensor, student_NE: Tensor, beta: float) -> Tensor:
    mix_NE = (beta * target_NE.exp() + (1.0 - beta) * student_NE.exp()).log()
    return beta * kl(target_NE, mix_NE) + (1.0 - beta) * kl(student_NE, mix_NE)


def lk_hybrid(target_NE: Tensor, student_NE: Tensor, eta: float) -> Tensor:
    alpha_N = overlap(target_NE, student_NE)
    weight_N = torch.exp(-eta * alpha_N.detach())
    return weight_N * kl(target_NE, student_NE) + (1.0 - weight_N) * (1.0 - alpha_N)


# Name -> the formula over the target's and the student's log-probabilities; ce, which has labels for a target, is below.
PLAIN: dict[str, Callable[[Tensor, Tensor, Objective], Tensor]] = {
    "forward_kl": lambda target, student, _: kl(target, student),
    "reverse_kl": lambda target, student, _: kl(student, target),
    "jsd": lambda target, student, objective: jsd(target, student, objective.beta),
    "tv": lambda target, student, _: 1.0 - overlap(target, student),
    "neg_log_alpha": lambda target, student, _: -torch.minimum(target, student).logsumexp(-1),
    "lk_hybrid": lambda target, student, objective: lk_hybrid(target, student, objective.eta),
}


def ce(student_NV: Tensor, labels_N: Tensor) -> Tensor:
    return -student_NV.gather(-1, labels_N.unsqueeze(-1)).squeeze(-1)


def compared(objective: Objective, target_NE: Tensor, student_NE: Tensor) -> Tensor:
    """The weighted sum of all but ce. (N,)"""
    terms = [
        weight * PLAIN[name](target_NE, student_NE, objective)
        for name, weight in objective.weights.items()
        if name != "ce"
    ]
    return sum(terms, start=torch.zeros_like(student_NE[:, 0]))


class Definition(NamedTuple):
    """Per token, without tokens' weights: loss, overlap, and what the overlap may lack. Each (N,)."""

    loss_N: Tensor
    overlap_N: Tensor
    slack_N: Tensor


def log_probs(logits_NV: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) in float32 or better."""
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return torch.log_softmax(logits_NV / temperature, dim=-1)


def eager_loss(
    objective: Objective,
    student: Student,
    signal: Signal | None,
    labels_R: Tensor,
    weights_R: Tensor | None = None,
) -> Scored:
    """`chunked_loss`, plainly."""
    logits_RV = student.head(student.hidden_RD)
    loss_R, overlap_R, slack_R = _by_definition(objective, signal, logits_RV, labels_R)
    if weights_R is not None:
        loss_R = loss_R * weights_R.to(loss_R.dtype)
    return Scored(loss_R.sum(), overlap_R, slack_R)


def _by_definition(objective: Objective, signal: Signal | None, logits_RV: Tensor, labels_R: Tensor) -> Definition:
    if isinstance(signal, TopKSignal):
        return topk_by_definition(objective, signal, logits_RV, labels_R)
    with torch.no_grad():
        target_logits_RV = None if signal is None else signal.head(signal.hidden_RD)
    return dense_by_definition(objective, target_logits_RV, logits_RV, labels_R)


def dense_by_definition(
    objective: Objective, target_logits_NV: Tensor | None, student_logits_NV: Tensor, labels_N: Tensor
) -> Definition:
    """Against all of the target's logits, or without a target (ce only)."""
    student_NV = log_probs(student_logits_NV, objective.temperature)
    loss_N = objective.weights.get("ce", 0.0) * ce(student_NV, labels_N)
    none_N = torch.zeros_like(loss_N)
    if target_logits_NV is None:
        return Definition(loss_N, none_N, none_N)
    target_NV = log_probs(target_logits_NV, objective.temperature)
    loss_N = loss_N + compared(objective, target_NV, student_NV)
    return Definition(loss_N, overlap(target_NV, student_NV).detach(), none_N)


def topk_by_definition(
    objective: Objective, signal: TopKSignal, student_logits_NV: Tensor, labels_N: Tensor
) -> Definition:
    """Over the K stored tokens and the rest; the true overlap lies within [overlap, overlap + slack]."""
    student_NV = log_probs(student_logits_NV, objective.temperature)
    target_NE = torch.cat([signal.log_probs_RK, signal.log_tail_R.unsqueeze(-1)], -1).to(student_NV.dtype)
    events_NE = stored_events(signal.ids_RK, signal.log_probs_RK, student_NV)
    # The label is a token, not an event.
    loss_N = objective.weights.get("ce", 0.0) * ce(student_NV, labels_N) + compared(objective, target_NE, events_NE)
    smaller_NE = torch.minimum(target_NE, events_NE).detach().exp()
    return Definition(loss_N, smaller_NE[:, :-1].sum(-1), smaller_NE[:, -1])


def stored_events(ids_NK: Tensor, stored_log_probs_NK: Tensor, student_log_probs_NV: Tensor) -> Tensor:
    """The student's log-probabilities of the K stored tokens and of "any other token". (N, K + 1)

    An empty entry (stored log-probability -inf) is an event without mass. The rest is a sum over the other tokens, in log space: 1
    minus the stored mass would round to 0. Every f-divergence between such events is at most the one between tokens (data
    processing inequality).
    """
    ids_NK, full_NK = filled_ids(ids_NK, stored_log_probs_NK)
    stored_NV = torch.zeros_like(student_log_probs_NV, dtype=torch.bool)
    stored_NV = stored_NV.scatter(-1, ids_NK, full_NK.any(-1, keepdim=True).expand_as(ids_NK))
    rest_N1 = student_log_probs_NV.masked_fill(stored_NV, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([student_log_probs_NV.gather(-1, ids_NK).masked_fill(~full_NK, -torch.inf), rest_N1], -1)
