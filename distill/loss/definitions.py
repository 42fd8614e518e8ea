"""Objectives per token: pure functions of two log-probability rows. The definitions; `divergences.py` and `gradients.py` beside it are their fast twin.

Legend: N tokens, V vocabulary, K stored entries, S samples. Every function takes log-probabilities (natural logarithm, float32 or better) and returns
one loss per token, in nats where it is a divergence. Nothing here averages: the trainer owns the one denominator.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from speculative.rules.rule import Rule, draft_draws
from speculative.rules.sampling import GREEDY, SamplingSettings, logits_to_probs, most_likely
from speculative.rules.verify import accept_probability

ACCEPTED_LENGTH = "accepted_length"  # of blocks, not of rows by themselves: distill/loss/accepted.py
UNTOUCHED = SamplingSettings()  # the model's own distribution


@dataclass(frozen=True)
class Objective:
    """What is minimised: weights of the named losses, their constants, and how the rows are taken.

    The loss sees both distributions softened by `temperature`; there is no temperature-squared factor, so the gradient shrinks as
    the temperature grows. `serving` and `rule`: how a server samples and accepts; nothing learns from them, see `acceptance`.
    `gamma`: drafted tokens of a block, for `accepted_length`. `chunk_tokens` rows have logits at once (None: as many as suit the device).
    """

    weights: Mapping[str, float]
    temperature: float = 1.0
    beta: float = 0.5
    eta: float = 3.0
    chunk_tokens: int | None = None
    serving: SamplingSettings = UNTOUCHED
    rule: Rule = "sample"
    weighting: Literal["none", "entropy", "selected"] = "none"
    keep: float = 0.4
    compile: bool = False
    gamma: int = 5

    def weight(self, name: str) -> float:
        """The weight of a named loss, 0 where it is not minimised."""
        return self.weights.get(name, 0.0)

    @property
    def overlap_is_acceptance(self) -> bool:
        """Whether a server accepts exactly as often as the distributions in the loss overlap."""
        return self.rule in ("sample", "block") and self.serving == SamplingSettings(self.temperature)


def overlap(target_log_probs_NV: Tensor, student_log_probs_NV: Tensor) -> Tensor:
    """sum_v min(target, student) = 1 - TV: the probability that a draft token is accepted (arXiv 2211.17192). (N,)"""
    return torch.minimum(target_log_probs_NV, student_log_probs_NV).exp().sum(-1)


def acceptance(target_logits_NV: Tensor, student_logits_NV: Tensor, serving: SamplingSettings, rule: Rule) -> Tensor:
    """Probability that a server accepts the student's token: the overlap of what settings and rule make of both. (N,)"""
    target_NV = logits_to_probs(target_logits_NV, GREEDY if rule == "greedy" else serving)
    student_NV = logits_to_probs(student_logits_NV, GREEDY if rule in ("greedy", "greedy-draft") else serving)
    return torch.minimum(target_NV, student_NV).sum(-1)


def kept(
    target_logits_NV: Tensor | None, student_logits_NV: Tensor, labels_N: Tensor, serving: SamplingSettings, rule: Rule
) -> Tensor:
    """Probability, given the target's own tokens, that each was drafted and kept (maximal coupling, arXiv 2211.17192). (N,)

    min(1, student / target); where drafts take their argmax, and without target logits, whether that is the token. A token whose target
    probability is not known (0) counts as refused.
    """
    if target_logits_NV is None or not draft_draws(rule):
        return (most_likely(student_logits_NV) == labels_N).to(student_logits_NV.dtype)
    student_N, target_N = (
        logits_to_probs(logits_NV, serving).gather(-1, labels_N.unsqueeze(-1)).squeeze(-1)
        for logits_NV in (student_logits_NV, target_logits_NV)
    )
    return accept_probability(student_N, target_N).where(target_N > 0, 0.0)


def forward_kl(target_log_probs_NV: Tensor, student_log_probs_NV: Tensor) -> Tensor:
    """KL(target || student) = sum_v target (log target - log student), in nats. (N,)"""
    # A token that the target excludes has log-probability -inf and weight 0; 0 * inf is nan, so the product is masked.
    return _weighted_difference(target_log_probs_NV, student_log_probs_NV)


def reverse_kl(target_log_probs_NV: Tensor, student_log_probs_NV: Tensor) -> Tensor:
    """KL(student || target), in nats (MiniLLM, arXiv 2306.08543). (N,)"""
    return _weighted_difference(student_log_probs_NV, target_log_probs_NV)


def jsd(target_log_probs_NV: Tensor, student_log_probs_NV: Tensor, beta: float) -> Tensor:
    """Beta KL(target || mix) + (1 - beta) KL(student || mix), mix = beta target + (1 - beta) student (GKD, arXiv 2306.13649). (N,)"""
    weights = torch.tensor([beta, 1.0 - beta], dtype=target_log_probs_NV.dtype, device=target_log_probs_NV.device).log()
    mix_log_probs_NV = torch.logaddexp(target_log_probs_NV + weights[0], student_log_probs_NV + weights[1])
    return beta * _weighted_difference(target_log_probs_NV, mix_log_probs_NV) + (1.0 - beta) * _weighted_difference(
        student_log_probs_NV, mix_log_probs_NV
    )


def tv(target_log_probs_NV: Tensor, student_log_probs_NV: Tensor) -> Tensor:
    """Total variation, 1 - overlap. Its gradient carries a factor student(v): it dies on a cold start. (N,)"""
    return 1.0 - overlap(target_log_probs_NV, student_log_probs_NV)


def neg_log_alpha(target_log_probs_NV: Tensor, student_log_probs_NV: Tensor) -> Tensor:
    """-log sum_v min(target, student), in nats (LK losses, arXiv 2602.23881). (N,)

    Taken in log space, so that an overlap too small for float32 still has a gradient.
    """
    return -torch.minimum(target_log_probs_NV, student_log_probs_NV).logsumexp(-1)


def lk_hybrid(target_log_probs_NV: Tensor, student_log_probs_NV: Tensor, eta: float) -> Tensor:
    """Lambda KL(target || student) + (1 - lambda) TV, lambda = exp(-eta stop_grad(alpha)) (arXiv 2602.23881). (N,)"""
    alpha_N = overlap(target_log_probs_NV, student_log_probs_NV)
    weight_N = torch.exp(-eta * alpha_N.detach())
    return weight_N * forward_kl(target_log_probs_NV, student_log_probs_NV) + (1.0 - weight_N) * (1.0 - alpha_N)


def ce(student_log_probs_NV: Tensor, labels_N: Tensor) -> Tensor:
    """-log student(label), in nats. (N,)"""
    return -student_log_probs_NV.gather(-1, labels_N.unsqueeze(-1)).squeeze(-1)


# Name -> definition, of the target's and the student's log-probabilities; ce, the seventh, has labels for a target.
DIVERGENCES: dict[str, Callable[[Tensor, Tensor, Objective], Tensor]] = {
    "forward_kl": lambda target_NV, student_NV, _: forward_kl(target_NV, student_NV),
    "reverse_kl": lambda target_NV, student_NV, _: reverse_kl(target_NV, student_NV),
    "tv": lambda target_NV, student_NV, _: tv(target_NV, student_NV),
    "neg_log_alpha": lambda target_NV, student_NV, _: neg_log_alpha(target_NV, student_NV),
    "jsd": lambda target_NV, student_NV, objective: jsd(target_NV, student_NV, objective.beta),
    "lk_hybrid": lambda target_NV, student_NV, objective: lk_hybrid(target_NV, student_NV, objective.eta),
}
NAMES = (*DIVERGENCES, "ce")


def mixed(
    objective: Objective, target_log_probs_NV: Tensor | None, student_log_probs_NV: Tensor, labels_N: Tensor
) -> Tensor:
    """Weighted sum of the named objectives, per token. (N,)

    Raises:
        KeyError: an unknown name. ValueError: a divergence without target log-probabilities.
    """
    total_N = torch.zeros_like(labels_N, dtype=student_log_probs_NV.dtype)
    for name, weight in objective.weights.items():
        if name == "ce":
            loss_N = ce(student_log_probs_NV, labels_N)
        elif target_log_probs_NV is None:
            raise ValueError(f"objective {name} compares with a target, and there is none")
        else:
            loss_N = DIVERGENCES[name](target_log_probs_NV, student_log_probs_NV, objective)
        total_N = total_N + weight * loss_N
    return total_N


def filled_ids(ids_NK: Tensor, log_probs_NK: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, which entries hold something), both (N, K). An empty entry is given the id of its row's first full one, or 0."""
    full_NK = log_probs_NK > -torch.inf
    first_N1 = ids_NK.gather(-1, full_NK.int().argmax(-1, keepdim=True))
    spare_N1 = first_N1.masked_fill(~full_NK.any(-1, keepdim=True), 0)
    return torch.where(full_NK, ids_NK, spare_N1), full_NK


def sampled_forward_kl(weights_NS: Tensor, entropy_N: Tensor, student_log_probs_NS: Tensor) -> Tensor:
    """-entropy - sum_s weight log student: unbiased for KL(target || student) when E weight = target (arXiv 2503.16870). (N,)"""
    cross_NS = torch.where(weights_NS > 0, weights_NS * student_log_probs_NS, torch.zeros_like(weights_NS))
    return -entropy_N - cross_NS.sum(-1)


def sampled_overlap(weights_NS: Tensor, target_log_probs_NS: Tensor, student_log_probs_NS: Tensor) -> Tensor:
    """sum_s weight min(1, student / target), an unbiased estimate of the overlap. (N,)"""
    accepted_NS = (student_log_probs_NS - target_log_probs_NS).clamp(max=0.0).exp()
    return torch.where(weights_NS > 0, weights_NS * accepted_NS, torch.zeros_like(weights_NS)).sum(-1)


def entropy_weight(entropy: Tensor) -> Tensor:
    """1 - exp(-entropy), between 0 (the target is sure) and 1 (it has many choices)."""
    return -torch.expm1(-entropy)


def selected_rows(student_losses_N: Tensor, reference_losses_N: Tensor, keep: float) -> Tensor:
    """Rows of the ceil(keep x N) largest student - reference losses, rising (AdaSPEC, arXiv 2510.19779). (n,)

    Rows of equal difference are taken from the front.
    """
    count = math.ceil(keep * student_losses_N.numel())
    order_N = (student_losses_N - reference_losses_N).argsort(descending=True, stable=True)
    return order_N[:count].sort().values


def _weighted_difference(log_weights_NV: Tensor, log_others_NV: Tensor) -> Tensor:
    """sum_v weight (log weight - log other), 0 where the weight is 0. (N,)"""
    weights_NV = log_weights_NV.exp()
    difference_NV = torch.where(weights_NV > 0, log_weights_NV - log_others_NV, torch.zeros_like(log_weights_NV))
    return (weights_NV * difference_NV).sum(-1)
