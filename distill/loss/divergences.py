"""What each objective adds to the loss and, in closed form, to its gradient: what autograd would find, in few passes.

Legend: N rows, E events (tokens; of a stored top-k its entries and "any other token"); a trailing 1 is a column of one number a row.
The definitions are in `distill/loss/definitions.py`; there the same is written over log-probabilities and differentiated by autograd.

With student = softmax(logits) and g_v = dL / d student_v, every objective's gradient is

    dL / d logits_v = student_v (g_v - sum_u student_u g_u),

the sum because probabilities add up to one. For each objective, with mix = beta target + (1 - beta) student:

    forward_kl      g = -target / student               so student - target
    reverse_kl      g = log(student / target)           (+ 1, which the sum takes away)
    jsd             g = (1 - beta) log(student / mix)   the terms that come from mix add up to a constant
    tv              g = -[student < target]
    neg_log_alpha   g = -[student < target] / alpha     student / alpha in log space: alpha may be under the smallest number
    lk_hybrid       lambda forward_kl + (1 - lambda) tv, lambda = exp(-eta alpha) held fixed
    ce              g = -[v is the label] / student     so student - onehot

A new objective is a definition there and an entry of `PARTS` here, or of `MIXTURES` where it only weighs others row by row.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from distill.loss.definitions import ACCEPTED_LENGTH, Objective

# Stands for the logarithm of zero, so that 0 x log 0 is 0: its product with a probability above 1e-8 counts as infinite.
LOWEST = -1e30
INFINITE = 1e20


Buffers = Callable[[str, Tensor], Tensor | None]


class Distribution(NamedTuple):
    """The same twice, (N, E); both tensors are used up by whoever they are handed to."""

    log_probs_NE: Tensor
    probs_NE: Tensor


class _Pair(NamedTuple):
    """Two distributions over the same events, and what comparing them takes."""

    target: Distribution
    student: Distribution
    # What the target's probabilities add up to: one, but for the rounding of a store.
    mass_N1: Tensor
    alpha_N1: Tensor
    beta: float
    wants_gradient: bool
    scratch: Buffers

    def buffer(self, name: str) -> Tensor:
        """Memory for a number per event; "product" is for what is summed at once, any other name is its part's alone."""
        held_NE = self.scratch(name, self.target.probs_NE)
        return torch.empty_like(self.target.probs_NE) if held_NE is None else held_NE


class _Part(NamedTuple):
    """What an objective of weight 1 adds: its loss (N, 1), and to the gradient student (inner + pull) - flow.

    `inner` is g of the formulas above; `flow` is -student g where that needs no quotient. `pull`, one number a row, is the sum of
    flow - student inner: it makes the gradient of a row add up to zero.
    """

    loss_N1: Tensor
    pull_N1: Tensor
    inner_NE: Tensor | None = None
    flow_NE: Tensor | None = None


def _forward_kl(pair: _Pair) -> _Part:
    target_NE = pair.target.probs_NE
    log_ratio_NE = torch.sub(pair.target.log_probs_NE, pair.student.log_probs_NE, out=pair.buffer("product"))
    loss_N1 = log_ratio_NE.mul_(target_NE).sum(-1, keepdim=True)
    return _Part(loss_N1, pair.mass_N1, flow_NE=target_NE)


def _reverse_kl(pair: _Pair) -> _Part:
    log_ratio_NE = torch.sub(pair.student.log_probs_NE, pair.target.log_probs_NE, out=pair.buffer("ratio"))
    loss_N1 = dot(pair.student.probs_NE, log_ratio_NE, pair.buffer("product"))
    return _Part(loss_N1, -loss_N1, inner_NE=log_ratio_NE)


def _jsd(pair: _Pair) -> _Part:
    (log_target_NE, target_NE), (log_student_NE, student_NE) = pair.target, pair.student
    log_mix_NE = torch.lerp(student_NE, target_NE, pair.beta, out=pair.buffer("mix"))
    log_mix_NE.log_().clamp_(min=LOWEST)
    inner_NE = torch.sub(log_student_NE, log_mix_NE, out=pair.buffer("towards")).mul_(1.0 - pair.beta)
    student_part_N1 = dot(student_NE, inner_NE, pair.buffer("product"))
    target_part_N1 = dot(target_NE, torch.sub(log_target_NE, log_mix_NE, out=log_mix_NE), pair.buffer("product"))
    return _Part(pair.beta * target_part_N1 + student_part_N1, -student_part_N1, inner_NE=inner_NE)


def _neg_log_alpha(pair: _Pair) -> _Part:
    log_target_NE, log_student_NE = pair.target.log_probs_NE, pair.student.log_probs_NE
    smaller_NE = torch.minimum(log_target_NE, log_student_NE, out=pair.buffer("smaller"))
    shares_NE = torch.softmax(smaller_NE, -1, out=pair.buffer("shares"))
    loss_N1 = -log_normaliser(smaller_NE, shares_NE)
    shares_NE.mul_(torch.gt(log_target_NE, log_student_NE, out=smaller_NE))
    return _Part(loss_N1, shares_NE.sum(-1, keepdim=True), flow_NE=shares_NE)


def _tv(pair: _Pair) -> _Part:
    loss_N1, student_NE = 1.0 - pair.alpha_N1, pair.student.probs_NE
    if not pair.wants_gradient:
        return _Part(loss_N1, torch.zeros_like(loss_N1))
    excess_NE = torch.gt(pair.target.probs_NE, student_NE, out=pair.student.log_probs_NE).mul_(student_NE)
    return _Part(loss_N1, excess_NE.sum(-1, keepdim=True), flow_NE=excess_NE)


def _lk_hybrid(objective: Objective, weight: float, alpha_N1: Tensor) -> dict[str, Tensor]:
    forward_kl_N1 = weight * torch.exp(-objective.eta * alpha_N1)
    return {"forward_kl": forward_kl_N1, "tv": weight - forward_kl_N1}


# Name -> what the objective adds. In this order; tv is last, for it writes where the student's log-probabilities were: the memory
# of one more buffer would cost more than its arithmetic.
PARTS: dict[str, Callable[[_Pair], _Part]] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
    "neg_log_alpha": _neg_log_alpha,
    "tv": _tv,
}
# Name -> the weights (N, 1), held fixed, of the parts that the objective is made of.
MIXTURES: dict[str, Callable[[Objective, float, Tensor], dict[str, Tensor]]] = {
    "lk_hybrid": _lk_hybrid,
    ACCEPTED_LENGTH: lambda _, __, alpha_N1: {"tv": torch.ones_like(alpha_N1)},  # its rows' weights are given
}


def divergences(
    objective: Objective,
    target: Distribution,
    student: Distribution,
    mass_N1: Tensor,
    wants_gradient: bool,
    scratch: Buffers,
    ce_N1: Tensor | float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(loss, alpha, gradient) of everything but ce's label; the gradient has ce's `student` term, of weight `ce_N1`. Uses up what
    it is given.
    """
    for one in (target, student):
        one.log_probs_NE.clamp_(min=LOWEST)
    smaller_NE = torch.minimum(target.probs_NE, student.probs_NE, out=scratch("product", target.probs_NE))
    alpha_N1 = smaller_NE.sum(-1, keepdim=True)
    pair = _Pair(target, student, mass_N1, alpha_N1, objective.beta, wants_gradient, scratch)
    weights = _part_weights(objective, alpha_N1)
    parts = [(part(pair), weights[name]) for name, part in PARTS.items() if name in weights]
    loss_N1 = sum((weight * part.loss_N1 for part, weight in parts), start=torch.zeros_like(alpha_N1))
    loss_N1 = loss_N1.masked_fill(loss_N1 > INFINITE, torch.inf)
    if not wants_gradient:
        return loss_N1, alpha_N1, None
    factor_NE = sum((weight * part.pull_N1 for part, weight in parts), start=torch.zeros_like(alpha_N1) + ce_N1)
    for part, weight in parts:
        if part.inner_NE is not None:
            factor_NE = _sum(factor_NE, part.inner_NE, weight, out=part.inner_NE)
    gradient_NE = student.probs_NE.mul_(factor_NE)
    for part, weight in parts:
        if part.flow_NE is not None:
            _sum(gradient_NE, part.flow_NE, weight, out=gradient_NE, sign=-1.0)
    return loss_N1, alpha_N1, gradient_NE


def _part_weights(objective: Objective, alpha_N1: Tensor) -> dict[str, Tensor | float]:
    """Name of a part -> its weight, for all rows or for each (N, 1); mixtures are dissolved."""
    found: dict[str, Tensor | float] = {}
    for name, weight in objective.weights.items():
        if weight and name != "ce":
            made_of = MIXTURES[name](objective, weight, alpha_N1) if name in MIXTURES else {name: weight}
            found |= {part: found[part] + share if part in found else share for part, share in made_of.items()}
    return found


def log_normaliser(scores_NV: Tensor, softmax_NV: Tensor) -> Tensor:
    """log sum exp scores, (N, 1), from the softmax at its peak: two reads instead of another exponential."""
    return scores_NV.amax(-1, keepdim=True) - softmax_NV.amax(-1, keepdim=True).log()


def dot(first_NE: Tensor, second_NE: Tensor, product_NE: Tensor | None = None) -> Tensor:
    """Sum of the products of a row, (N, 1); the products are left in `product_NE`."""
    return torch.mul(first_NE, second_NE, out=product_NE).sum(-1, keepdim=True)


def _sum(total: Tensor, term: Tensor, weight: Tensor | float, out: Tensor, sign: float = 1.0) -> Tensor:
    """Total + sign weight term, in one pass."""
    if isinstance(weight, Tensor):
        return torch.addcmul(total, term, weight, value=sign, out=out)
    return torch.add(total, term, alpha=sign * weight, out=out)
