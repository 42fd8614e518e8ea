"""Objectives and their gradients with respect to the student's logits in closed form: what autograd would find, in few passes.

Legend: C tokens (rows), V vocabulary, K stored entries, S samples, N rows, E events; a trailing 1 is a column of one number a row.
The definitions are in `distill/loss/definitions.py`; there the same is written over log-probabilities and differentiated by autograd.

With student = softmax(logits / temperature) and g_v = dL / d student_v, every objective's gradient is

    dL / d logits_v = student_v (g_v - sum_u student_u g_u) / temperature,

the sum because probabilities add up to one. For each objective, with mix = beta target + (1 - beta) student:

    forward_kl      g = -target / student               so student - target
    reverse_kl      g = log(student / target)           (+ 1, which the sum takes away)
    jsd             g = (1 - beta) log(student / mix)   the terms that come from mix add up to a constant
    tv              g = -[student < target]
    neg_log_alpha   g = -[student < target] / alpha     student / alpha in log space: alpha may be under the smallest number
    lk_hybrid       lambda forward_kl + (1 - lambda) tv, lambda = exp(-eta alpha) held fixed
    ce              g = -[v is the label] / student     so student - onehot

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
from distill.loss.definitions import Terms

# Stands for the logarithm of zero, so that 0 x log 0 is 0: its product with a probability above 1e-8 counts as infinite.
LOWEST = -1e30
INFINITE = 1e20


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


Buffers = Callable[[str, Tensor], Tensor | None]


def fresh(name: str, like: Tensor) -> None:
    """In place of a `Scratch`: new memory every time."""
    return None


class _Distribution(NamedTuple):
    """The same twice; both tensors are used up by whoever they are handed to."""

    log_probs_NE: Tensor
    probs_NE: Tensor


class _Divergence(NamedTuple):
    loss_N1: Tensor
    alpha_N1: Tensor
    gradient_NE: Tensor | None


def dense_rows(
    terms: Terms,
    target_logits_CV: Tensor,
    student_logits_CV: Tensor,
    labels_C: Tensor,
    weights_C: Tensor | None,
    wants_gradient: bool,
    scratch: Buffers = fresh,
) -> Rows:
    """Objectives against all of the target's logits; the arguments are left as they are, the gradient may lie in the scratch."""
    pairs = ("target", target_logits_CV), ("student", student_logits_CV)
    served_C = None
    if terms.temperature != terms.serving_temperature:
        served = [_probs(name, logits, terms.serving_temperature, scratch) for name, logits in pairs]
        served_C = torch.minimum(served[0], served[1], out=scratch("product", target_logits_CV)).sum(-1)
    target, student = (_softmax(name, logits, terms.temperature, scratch) for name, logits in pairs)
    ce = terms.by_name.get("ce", 0.0)
    log_label_C1 = student.log_probs_NE.gather(-1, labels_C.unsqueeze(-1)) if ce else None
    token_weights_C1 = _token_weights(terms, weights_C, target)
    divergence = _divergences(terms, target, student, None, wants_gradient, ce, scratch)
    loss_C1, gradient_CV = divergence.loss_N1, divergence.gradient_NE
    if log_label_C1 is not None:
        loss_C1 = loss_C1 - ce * log_label_C1
        _add_at(gradient_CV, labels_C.unsqueeze(-1), -ce)
    overlap_C = divergence.alpha_N1.squeeze(-1) if served_C is None else served_C
    return _finished(terms, loss_C1, overlap_C, torch.zeros_like(overlap_C), gradient_CV, token_weights_C1)


def topk_rows(
    terms: Terms,
    signal: TopKSignal,
    student_logits_CV: Tensor,
    labels_C: Tensor,
    weights_C: Tensor | None,
    wants_gradient: bool,
    scratch: Buffers = fresh,
) -> Rows:
    """Objectives over the K stored tokens and the rest: one exponential per logit, and a correction at the K ids."""
    scores_CV = _scores(student_logits_CV, terms.temperature, scratch("scores", student_logits_CV), own=True)
    ids_CK, valid_CK = losses.filled_ids(signal.ids_RK, signal.log_probs_RK)
    any_valid_C1 = valid_CK.any(-1, keepdim=True)
    stored_CK = scores_CV.gather(-1, ids_CK)
    label_C1 = scores_CV.gather(-1, labels_C.unsqueeze(-1))
    # A row that stores nothing keeps all its tokens in the rest.
    scores_CV.scatter_(-1, ids_CK, stored_CK.masked_fill(any_valid_C1, LOWEST))
    # The rest's own softmax: exact however little mass the rest has, where 1 - sum(stored) would round to 0.
    share_CV = torch.softmax(scores_CV, -1, out=scratch("student", scores_CV))
    log_rest_C1 = _log_normaliser(scores_CV, share_CV)
    events_CE = torch.cat([stored_CK.masked_fill(~valid_CK, -torch.inf), log_rest_C1], -1)
    normaliser_C1 = events_CE.logsumexp(-1, keepdim=True)
    student_CE = events_CE - normaliser_C1
    target_CE = torch.cat([signal.log_probs_RK, signal.log_tail_R.unsqueeze(-1)], -1).to(student_CE.dtype)
    target, student = (_Distribution(log_probs, log_probs.exp()) for log_probs in (target_CE, student_CE))
    token_weights_C1 = _token_weights(terms, weights_C, target)
    smaller_CE = torch.minimum(target.probs_NE, student.probs_NE)
    # A store's probabilities are rounded and do not add up to one.
    mass_C1 = target.probs_NE.sum(-1, keepdim=True)
    ce = terms.by_name.get("ce", 0.0)
    divergence = _divergences(terms, target, student, mass_C1, wants_gradient, ce, fresh)
    loss_C1, gradient_CE = divergence.loss_N1, divergence.gradient_NE
    gradient_CV = None
    if gradient_CE is not None:
        gradient_CV = share_CV.mul_(gradient_CE[:, -1:])
        # An entry that holds nothing writes what the valid one with its id writes: the order of writing does not matter.
        first_C1 = valid_CK.int().argmax(-1, keepdim=True)
        at_ids_CK = torch.where(valid_CK, gradient_CE[:, :-1], gradient_CE.gather(-1, first_C1))
        gradient_CV.scatter_(-1, ids_CK, torch.where(any_valid_C1, at_ids_CK, gradient_CV.gather(-1, ids_CK)))
    if ce:
        loss_C1 = loss_C1 - ce * (label_C1 - normaliser_C1)
        _add_at(gradient_CV, labels_C.unsqueeze(-1), -ce)
    return _finished(terms, loss_C1, smaller_CE[:, :-1].sum(-1), smaller_CE[:, -1], gradient_CV, token_weights_C1)


def sampled_rows(
    terms: Terms,
    signal: SampledSignal | None,
    student_logits_CV: Tensor,
    labels_C: Tensor,
    weights_C: Tensor | None,
    wants_gradient: bool,
    scratch: Buffers = fresh,
) -> Rows:
    """Forward KL by importance samples (value and gradient unbiased) and ce; without a signal, ce alone."""
    scores_CV = _scores(student_logits_CV, terms.temperature, scratch("scores", student_logits_CV))
    student_CV = torch.softmax(scores_CV, -1, out=scratch("student", scores_CV))
    normaliser_C1 = _log_normaliser(scores_CV, student_CV)
    ce, kl = terms.by_name.get("ce", 0.0), terms.by_name.get("forward_kl", 0.0)
    loss_C1 = ce * (normaliser_C1 - scores_CV.gather(-1, labels_C.unsqueeze(-1)))
    overlap_C, pull_C1, entropy_C1 = torch.zeros_like(loss_C1).squeeze(-1), torch.full_like(loss_C1, ce), None
    if signal is not None:
        used_CS = signal.weights_RS > 0
        ids_CS, weights_CS = signal.ids_RS.masked_fill(~used_CS, 0), signal.weights_RS.to(scores_CV.dtype)
        log_probs_CS = scores_CV.gather(-1, ids_CS) - normaliser_C1
        entropy_C1 = signal.entropy_R.to(scores_CV.dtype).unsqueeze(-1)
        divergence_C = losses.sampled_forward_kl(weights_CS, entropy_C1.squeeze(-1), log_probs_CS)
        loss_C1 = loss_C1 + kl * divergence_C.unsqueeze(-1)
        overlap_C = losses.sampled_overlap(weights_CS, signal.log_probs_RS.to(scores_CV.dtype), log_probs_CS)
        pull_C1 = pull_C1 + kl * weights_CS.sum(-1, keepdim=True)
    gradient_CV = None
    if wants_gradient:
        gradient_CV = student_CV.mul_(pull_C1)
        if signal is not None:
            gradient_CV.scatter_add_(-1, ids_CS, -kl * weights_CS)
        _add_at(gradient_CV, labels_C.unsqueeze(-1), -ce)
    token_weights_C1 = _product(weights_C, entropy_C1 if terms.entropy_weighted else None, scores_CV.dtype)
    return _finished(terms, loss_C1, overlap_C, torch.zeros_like(overlap_C), gradient_CV, token_weights_C1)


def part_of(rows: Any, chosen: slice | Tensor) -> Any:
    """Some rows of a tensor or a signal; None of None."""
    if rows is None or isinstance(rows, Tensor):
        return None if rows is None else rows[chosen]
    return rows.rows(chosen)


def rows_of(
    terms: Terms,
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
    arguments = (terms, against, student_logits_CV, labels_C, weights_C, wants_gradient)
    return (
        function(*arguments, scratch) if compiled_size is None else compiled_rows(function, compiled_size, *arguments)
    )


def compiled_rows(
    function: Callable[..., Rows], size: int, terms: Terms, against: Any, logits_CV: Tensor, labels_C: Tensor,
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

    rows = _compiled(function)(
        terms, padded(against), padded(logits_CV), padded(labels_C), padded(weights_C), wants_gradient
    )
    return Rows(*(None if one is None else one[:count] for one in rows))  # type: ignore[arg-type]


@functools.cache
def _compiled(function: Callable[..., Rows]) -> Callable[..., Rows]:
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


def _divergences(
    terms: Terms,
    target: _Distribution,
    student: _Distribution,
    mass_N1: Tensor | None,
    wants_gradient: bool,
    ce: float,
    scratch: Buffers,
) -> _Divergence:
    """Everything but ce's label; the gradient has ce's `student` term. Uses up what it is given.

    The gradient is collected as student x (inner + pull) - target x push - excess x gap - ..., where `inner` is (N, E) and only
    there for objectives that need it, `pull`, `push` and `gap` are one number a row.
    """
    weight = {name: terms.by_name.get(name, 0.0) for name in losses.NAMES}
    log_target_NE, log_student_NE = (one.log_probs_NE.clamp_(min=LOWEST) for one in (target, student))
    target_NE, student_NE = target.probs_NE, student.probs_NE
    product_NE = scratch("product", target_NE)
    alpha_N1 = torch.minimum(target_NE, student_NE, out=product_NE).sum(-1, keepdim=True)
    hybrid_N1 = torch.exp(-terms.eta * alpha_N1) if weight["lk_hybrid"] else torch.zeros_like(alpha_N1)
    push_N1 = weight["forward_kl"] + weight["lk_hybrid"] * hybrid_N1
    gap_N1 = weight["tv"] + weight["lk_hybrid"] * (1.0 - hybrid_N1)
    loss_N1 = gap_N1 * (1.0 - alpha_N1)
    pull_N1 = (push_N1 if mass_N1 is None else push_N1 * mass_N1) + ce
    inner_NE: Tensor | None = None
    if weight["forward_kl"] or weight["lk_hybrid"] or weight["reverse_kl"]:
        log_ratio_NE = torch.sub(log_target_NE, log_student_NE, out=scratch("ratio", target_NE))
        loss_N1 = loss_N1 + push_N1 * _dot(target_NE, log_ratio_NE, product_NE)
        if weight["reverse_kl"]:
            inner_NE = log_ratio_NE.mul_(-weight["reverse_kl"])
            reverse_N1 = _dot(student_NE, inner_NE, product_NE)
            loss_N1, pull_N1 = loss_N1 + reverse_N1, pull_N1 - reverse_N1
    if weight["jsd"]:
        ours, theirs = weight["jsd"] * (1.0 - terms.beta), weight["jsd"] * terms.beta
        log_mix_NE = torch.lerp(student_NE, target_NE, terms.beta, out=scratch("mix", target_NE))
        log_mix_NE.log_().clamp_(min=LOWEST)
        towards_NE = torch.sub(log_student_NE, log_mix_NE, out=scratch("towards", target_NE)).mul_(ours)
        student_part_N1 = _dot(student_NE, towards_NE, product_NE)
        target_part_N1 = theirs * _dot(target_NE, torch.sub(log_target_NE, log_mix_NE, out=log_mix_NE), product_NE)
        loss_N1, pull_N1 = loss_N1 + target_part_N1 + student_part_N1, pull_N1 - student_part_N1
        inner_NE = towards_NE if inner_NE is None else inner_NE.add_(towards_NE)
    shares_NE: Tensor | None = None
    if weight["neg_log_alpha"]:
        smaller_NE = torch.minimum(log_target_NE, log_student_NE, out=scratch("smaller", target_NE))
        shares_NE = torch.softmax(smaller_NE, -1, out=scratch("shares", target_NE))
        loss_N1 = loss_N1 - weight["neg_log_alpha"] * _log_normaliser(smaller_NE, shares_NE)
        shares_NE.mul_(torch.gt(log_target_NE, log_student_NE, out=smaller_NE)).mul_(weight["neg_log_alpha"])
        pull_N1 = pull_N1 + shares_NE.sum(-1, keepdim=True)
    loss_N1 = loss_N1.masked_fill(loss_N1 > INFINITE, torch.inf)
    if not wants_gradient:
        return _Divergence(loss_N1, alpha_N1, None)
    excess_NE: Tensor | None = None
    if weight["tv"] or weight["lk_hybrid"]:
        excess_NE = torch.gt(target_NE, student_NE, out=log_student_NE).mul_(student_NE)
        pull_N1 = pull_N1 + gap_N1 * excess_NE.sum(-1, keepdim=True)
    gradient_NE = student_NE.mul_(pull_N1) if inner_NE is None else inner_NE.add_(pull_N1).mul_(student_NE)
    if weight["forward_kl"] or weight["lk_hybrid"]:
        gradient_NE.addcmul_(target_NE, push_N1, value=-1.0)
    if excess_NE is not None:
        gradient_NE.addcmul_(excess_NE, gap_N1, value=-1.0)
    if shares_NE is not None:
        gradient_NE.sub_(shares_NE)
    return _Divergence(loss_N1, alpha_N1, gradient_NE)


def _finished(
    terms: Terms,
    loss_C1: Tensor,
    overlap_C: Tensor,
    slack_C: Tensor,
    gradient_CV: Tensor | None,
    weights_C1: Tensor | None,
) -> Rows:
    """Tokens' weights on loss and gradient; the gradient from scaled logits to logits."""
    if weights_C1 is not None:
        loss_C1 = loss_C1 * weights_C1
    if gradient_CV is not None:
        if weights_C1 is not None:
            gradient_CV.mul_(weights_C1 / terms.temperature)
        elif terms.temperature != 1.0:
            gradient_CV.mul_(1.0 / terms.temperature)
    return Rows(loss_C1.squeeze(-1), overlap_C, slack_C, gradient_CV)


def _token_weights(terms: Terms, weights_C: Tensor | None, target: _Distribution) -> Tensor | None:
    entropy_N1 = None
    if terms.entropy_weighted:
        entropy_N1 = -_dot(target.probs_NE, target.log_probs_NE.clamp_(min=LOWEST))
    return _product(weights_C, entropy_N1, target.probs_NE.dtype)


def _product(weights_C: Tensor | None, entropy_C1: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The caller's weights times the entropy's, (C, 1), or None where all are 1."""
    weights_C1 = None if weights_C is None else weights_C.to(dtype).unsqueeze(-1)
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


def _probs(name: str, logits_CV: Tensor, temperature: float, scratch: Buffers) -> Tensor:
    scores_CV = _scores(logits_CV, temperature, scratch("scores", logits_CV))
    return torch.softmax(scores_CV, -1, out=scratch(name, logits_CV))


def _softmax(name: str, logits_CV: Tensor, temperature: float, scratch: Buffers) -> _Distribution:
    scores_CV = _scores(logits_CV, temperature, scratch("scores", logits_CV))
    # Two kernels: torch's softmax is faster than the exponential of a log_softmax.
    return _Distribution(
        torch.log_softmax(scores_CV, -1, out=scratch(f"log {name}", logits_CV)),  # type: ignore[call-overload]
        torch.softmax(scores_CV, -1, out=scratch(name, logits_CV)),
    )


def _log_normaliser(scores_NV: Tensor, softmax_NV: Tensor) -> Tensor:
    """log sum exp scores, (N, 1), from the softmax at its peak: two reads instead of another exponential."""
    return scores_NV.amax(-1, keepdim=True) - softmax_NV.amax(-1, keepdim=True).log()


def _dot(first_NE: Tensor, second_NE: Tensor, product_NE: Tensor | None = None) -> Tensor:
    return torch.mul(first_NE, second_NE, out=product_NE).sum(-1, keepdim=True)


def _add_at(gradient_CV: Tensor | None, ids_C1: Tensor, value: float) -> None:
    if gradient_CV is not None and value:
        gradient_CV.scatter_add_(-1, ids_C1, torch.full_like(ids_C1, value, dtype=gradient_CV.dtype))
