"""Objectives and their gradients with respect to the student's logits, for each kind of signal; `divergences.py` has the formulas.

Legend: C tokens (rows), V vocabulary, K stored entries, S samples, N rows, E events; a trailing 1 is a column of one number a row.

A stored top-k is a distribution over K + 1 events, the last being "any other token". The same formulas give the gradient with
respect to the events' log-masses; a token inside the last event gets its share of that event's gradient.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.signals.signal import SampledSignal, TopKSignal
from distill.loss import definitions as losses
from distill.loss.definitions import Objective
from distill.loss.divergences import LOWEST, Buffers, Distribution, divergences, dot, log_normaliser


class Rows(NamedTuple):
    """Loss, overlap and what the overlap may lack, each (C,), and the loss's gradient with respect to the logits (C, V).

    Loss and gradient carry the tokens' weights; the overlap does not.
    """

    loss_C: Tensor
    overlap_C: Tensor
    slack_C: Tensor
    gradient_CV: Tensor | None


class Scratch:
    """Memory that calls share. On a CPU the page faults of fresh memory cost several times the arithmetic."""

    def __init__(self) -> None:
        """Nothing is held yet."""
        self._held: dict[str, Tensor] = {}

    def __call__(self, name: str, like: Tensor) -> Tensor:
        """The buffer of this name in the shape of `like`, float32 or better, with anything in it."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        held = self._held.get(name)
        if held is None or held.dtype != dtype or held.numel() < like.numel():
            held = self._held[name] = torch.empty(like.numel(), dtype=dtype, device=like.device)
        return held[: like.numel()].view(like.shape)


def fresh(name: str, like: Tensor) -> None:
    """In place of a `Scratch`: new memory every time."""
    return None


def dense_rows(
    objective: Objective,
    target_logits_CV: Tensor,
    student_logits_CV: Tensor,
    labels_C: Tensor,
    weights_C: Tensor | None,
    wants_gradient: bool,
    scratch: Buffers = fresh,
) -> Rows:
    """Objectives against all of the target's logits; the arguments are left as they are, the gradient may lie in the scratch."""
    pairs = ("target", target_logits_CV), ("student", student_logits_CV)
    target, student = (_softmax(name, logits, objective.temperature, scratch) for name, logits in pairs)
    log_label_C1 = student.log_probs_NE.gather(-1, labels_C.unsqueeze(-1))
    token_weights_C1 = _token_weights(objective, weights_C, target)
    loss_C1, alpha_C1, gradient_CV = divergences(
        objective, target, student, torch.ones_like(log_label_C1), wants_gradient, scratch, _ce(objective, weights_C)
    )
    overlap_C = alpha_C1.squeeze(-1)
    rows = Rows(loss_C1, overlap_C, torch.zeros_like(overlap_C), gradient_CV)
    return _finished(objective, rows, labels_C, log_label_C1, token_weights_C1, _ce(objective, weights_C))


def topk_rows(
    objective: Objective,
    signal: TopKSignal,
    student_logits_CV: Tensor,
    labels_C: Tensor,
    weights_C: Tensor | None,
    wants_gradient: bool,
    scratch: Buffers = fresh,
) -> Rows:
    """Objectives over the K stored tokens and the rest: one exponential per logit, and a correction at the K ids."""
    scores_CV = _scores(student_logits_CV, objective.temperature, scratch("scores", student_logits_CV), own=True)
    ids_CK, valid_CK = losses.filled_ids(signal.ids_RK, signal.log_probs_RK)
    any_valid_C1 = valid_CK.any(-1, keepdim=True)
    stored_CK = scores_CV.gather(-1, ids_CK)
    label_C1 = scores_CV.gather(-1, labels_C.unsqueeze(-1))
    # A row that stores nothing keeps all its tokens in the rest.
    scores_CV.scatter_(-1, ids_CK, stored_CK.masked_fill(any_valid_C1, LOWEST))
    # The rest's own softmax: exact however little mass the rest has, where 1 - sum(stored) would round to 0.
    share_CV = torch.softmax(scores_CV, -1, out=scratch("student", scores_CV))
    log_rest_C1 = log_normaliser(scores_CV, share_CV)
    events_CE = torch.cat([stored_CK.masked_fill(~valid_CK, -torch.inf), log_rest_C1], -1)
    normaliser_C1 = events_CE.logsumexp(-1, keepdim=True)
    student_CE = events_CE - normaliser_C1
    target_CE = torch.cat([signal.log_probs_RK, signal.log_tail_R.unsqueeze(-1)], -1).to(student_CE.dtype)
    target, student = (Distribution(log_probs, log_probs.exp()) for log_probs in (target_CE, student_CE))
    token_weights_C1 = _token_weights(objective, weights_C, target)
    smaller_CE = torch.minimum(target.probs_NE, student.probs_NE)
    # A store's probabilities are rounded and do not add up to one.
    mass_C1 = target.probs_NE.sum(-1, keepdim=True)
    loss_C1, _, gradient_CE = divergences(
        objective, target, student, mass_C1, wants_gradient, fresh, _ce(objective, weights_C)
    )
    gradient_CV = None
    if gradient_CE is not None:
        gradient_CV = share_CV.mul_(gradient_CE[:, -1:])
        # An entry that holds nothing writes what the valid one with its id writes: the order of writing does not matter.
        first_C1 = valid_CK.int().argmax(-1, keepdim=True)
        at_ids_CK = torch.where(valid_CK, gradient_CE[:, :-1], gradient_CE.gather(-1, first_C1))
        gradient_CV.scatter_(-1, ids_CK, torch.where(any_valid_C1, at_ids_CK, gradient_CV.gather(-1, ids_CK)))
    rows = Rows(loss_C1, smaller_CE[:, :-1].sum(-1), smaller_CE[:, -1], gradient_CV)
    return _finished(objective, rows, labels_C, label_C1 - normaliser_C1, token_weights_C1, _ce(objective, weights_C))


def sampled_rows(
    objective: Objective,
    signal: SampledSignal | None,
    student_logits_CV: Tensor,
    labels_C: Tensor,
    weights_C: Tensor | None,
    wants_gradient: bool,
    scratch: Buffers = fresh,
) -> Rows:
    """Forward KL by importance samples (value and gradient unbiased) and ce; without a signal, ce alone."""
    scores_CV = _scores(student_logits_CV, objective.temperature, scratch("scores", student_logits_CV))
    student_CV = torch.softmax(scores_CV, -1, out=scratch("student", scores_CV))
    normaliser_C1 = log_normaliser(scores_CV, student_CV)
    log_label_C1 = scores_CV.gather(-1, labels_C.unsqueeze(-1)) - normaliser_C1
    kl, loss_C1, entropy_C1 = objective.weight("forward_kl"), torch.zeros_like(normaliser_C1), None
    overlap_C, pull_C1 = torch.zeros_like(loss_C1).squeeze(-1), torch.full_like(loss_C1, objective.weight("ce"))
    if signal is not None:
        used_CS = signal.weights_RS > 0
        ids_CS, weights_CS = signal.ids_RS.masked_fill(~used_CS, 0), signal.weights_RS.to(scores_CV.dtype)
        log_probs_CS = scores_CV.gather(-1, ids_CS) - normaliser_C1
        entropy_C1 = signal.entropy_R.to(scores_CV.dtype).unsqueeze(-1)
        loss_C1 = kl * losses.sampled_forward_kl(weights_CS, entropy_C1.squeeze(-1), log_probs_CS).unsqueeze(-1)
        overlap_C = losses.sampled_overlap(weights_CS, signal.log_probs_RS.to(scores_CV.dtype), log_probs_CS)
        pull_C1 = pull_C1 + kl * weights_CS.sum(-1, keepdim=True)
    gradient_CV = None
    if wants_gradient:
        gradient_CV = student_CV.mul_(pull_C1)
        if signal is not None:
            gradient_CV.scatter_add_(-1, ids_CS, -kl * weights_CS)
    rows = Rows(loss_C1, overlap_C, torch.zeros_like(overlap_C), gradient_CV)
    token_weights_C1 = _product(weights_C, entropy_C1 if objective.weighting == "entropy" else None, scores_CV.dtype)
    return _finished(objective, rows, labels_C, log_label_C1, token_weights_C1, objective.weight("ce"))


def part_of(rows: Any, chosen: slice | Tensor) -> Any:
    """Some rows of a tensor or a signal; None of None."""
    if rows is None or isinstance(rows, Tensor):
        return None if rows is None else rows[chosen]
    return rows.rows(chosen)


def rows_of(
    objective: Objective,
    against: Tensor | TopKSignal | SampledSignal | None,
    student_logits_CV: Tensor,
    labels_C: Tensor,
    weights_C: Tensor | None,
    wants_gradient: bool,
    scratch: Buffers = fresh,
    compiled_size: int | None = None,
) -> Rows:
    """Whichever of the functions above `against` (target logits, a stored signal, nothing) asks for; compiled for so many rows."""
    function: Callable[..., Rows] = sampled_rows
    if isinstance(against, Tensor | TopKSignal):
        function = dense_rows if isinstance(against, Tensor) else topk_rows
    arguments = (objective, against, student_logits_CV, labels_C, weights_C, wants_gradient)
    return (
        function(*arguments, scratch) if compiled_size is None else compiled_rows(function, compiled_size, *arguments)
    )


def compiled_rows(
    function: Callable[..., Rows], size: int, objective: Objective, against: Any, logits_CV: Tensor, labels_C: Tensor,
    weights_C: Tensor | None, wants_gradient: bool,
) -> Rows:  # fmt: skip
    """One of the functions above, compiled, on `size` rows: the last are padded, so that there is one shape to compile for.

    Without a compiler it runs as it is, after one warning.
    """
    count = len(labels_C)

    def padded(value: Any) -> Any:
        if value is None or count == size:
            return value
        if isinstance(value, Tensor):
            return torch.cat([value, value.new_zeros(size - count, *value.shape[1:])])
        return type(value)(*(padded(getattr(value, one.name)) for one in fields(value)))

    rows = compiled(function)(
        objective, padded(against), padded(logits_CV), padded(labels_C), padded(weights_C), wants_gradient
    )
    return Rows(*(None if one is None else one[:count] for one in rows))  # type: ignore[arg-type]


@functools.cache
def compiled(function: Callable[..., Rows]) -> Callable[..., Rows]:
    """The function compiled at its first call; itself, after one warning, where there is no compiler."""
    compiled, usable = torch.compile(function, dynamic=False), True

    def call(*arguments: Any) -> Rows:
        nonlocal usable
        if usable:
            try:
                return compiled(*arguments)
            except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.CppCompileError) as error:
                usable = False
                reason = str(error).strip().splitlines()[0][:200]
                warnings.warn(f"torch.compile cannot compile the loss, it runs eagerly: {reason}", stacklevel=2)
        return function(*arguments)

    return call


def _finished(
    objective: Objective,
    rows: Rows,
    labels_C: Tensor,
    log_label_C1: Tensor,
    weights_C1: Tensor | None,
    ce_C1: Tensor | float,
) -> Rows:
    """The rows with ce's label and the tokens' weights; the gradient from scaled logits to logits. The loss comes as (C, 1)."""
    loss_C1, overlap_C, slack_C, gradient_CV = rows
    if isinstance(ce_C1, Tensor) or ce_C1:
        loss_C1 = loss_C1 - ce_C1 * log_label_C1
        if gradient_CV is not None:
            gradient_CV.scatter_add_(
                -1, labels_C.unsqueeze(-1), (torch.zeros_like(log_label_C1) - ce_C1).to(gradient_CV.dtype)
            )
    if weights_C1 is not None:
        loss_C1 = loss_C1 * weights_C1
    if gradient_CV is not None:
        if weights_C1 is not None:
            gradient_CV.mul_(weights_C1 / objective.temperature)
        elif objective.temperature != 1.0:
            gradient_CV.mul_(1.0 / objective.temperature)
    return Rows(loss_C1.squeeze(-1), overlap_C, slack_C, gradient_CV)


def _ce(objective: Objective, weights_C: Tensor | None) -> Tensor | float:
    """The weight of ce, (C, 1) where the rows' weights have a second column: it is their first that multiplies it."""
    return objective.weight("ce") if weights_C is None or weights_C.dim() == 1 else weights_C[:, 1:]


def _token_weights(objective: Objective, weights_C: Tensor | None, target: Distribution) -> Tensor | None:
    entropy_N1 = None
    if objective.weighting == "entropy":
        entropy_N1 = -dot(target.probs_NE, target.log_probs_NE.clamp_(min=LOWEST))
    return _product(weights_C, entropy_N1, target.probs_NE.dtype)


def _product(weights_C: Tensor | None, entropy_C1: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The caller's weights times the entropy's, (C, 1), or None where all are 1."""
    weights_C1 = None if weights_C is None else weights_C.to(dtype).reshape(len(weights_C), -1)[:, :1]
    if entropy_C1 is None:
        return weights_C1
    by_entropy_C1 = losses.entropy_weight(entropy_C1)
    return by_entropy_C1 if weights_C1 is None else weights_C1 * by_entropy_C1


def _scores(logits_CV: Tensor, temperature: float, buffer_CV: Tensor | None, own: bool = False) -> Tensor:
    """Logits / temperature in float32 or better; with `own`, never the argument itself."""
    if logits_CV.dtype in (torch.float32, torch.float64):
        return logits_CV if temperature == 1.0 and not own else torch.div(logits_CV, temperature, out=buffer_CV)
    scores_CV = logits_CV.float() if buffer_CV is None else buffer_CV.copy_(logits_CV)
    return scores_CV if temperature == 1.0 else scores_CV.div_(temperature)


def _softmax(name: str, logits_CV: Tensor, temperature: float, scratch: Buffers) -> Distribution:
    scores_CV = _scores(logits_CV, temperature, scratch("scores", logits_CV))
    # Two kernels: torch's softmax is faster than the exponential of a log_softmax.
    return Distribution(
        torch.log_softmax(scores_CV, -1, out=scratch(f"log {name}", logits_CV)),  # type: ignore[call-overload]
        torch.softmax(scores_CV, -1, out=scratch(name, logits_CV)),
    )
