"""Objectives per token: pure functions of two log-probability rows.

Legend: N tokens, V vocabulary. Every function takes log-probabilities (natural logarithm, float32 or better) and returns
one loss per token, in nats where it is a divergence. Nothing here averages: the trainer owns the one denominator.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def overlap(target_log_probs_NV: Tensor, student_log_probs_NV: Tensor) -> Tensor:
    """sum_v min(target, student) = 1 - TV: the probability that a draft token is accepted (arXiv 2211.17192). (N,)"""
    return torch.minimum(target_log_probs_NV, student_log_probs_NV).exp().sum(-1)


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


def mixed(
    target_log_probs_NV: Tensor | None,
    student_log_probs_NV: Tensor,
    labels_N: Tensor,
    weights: Mapping[str, float],
    *,
    beta: float,
    eta: float,
) -> Tensor:
    """Weighted sum of the named objectives, per token. (N,)

    Raises:
        KeyError: an unknown name. ValueError: a divergence without target log-probabilities.
    """
    total_N = torch.zeros_like(labels_N, dtype=student_log_probs_NV.dtype)
    for name, weight in weights.items():
        if name == "ce":
            loss_N = ce(student_log_probs_NV, labels_N)
        elif target_log_probs_NV is None:
            raise ValueError(f"objective {name} compares with a target, and there is none")
        elif name == "jsd":
            loss_N = jsd(target_log_probs_NV, student_log_probs_NV, beta)
        elif name == "lk_hybrid":
            loss_N = lk_hybrid(target_log_probs_NV, student_log_probs_NV, eta)
        else:
            loss_N = PLAIN[name](target_log_probs_NV, student_log_probs_NV)
        total_N = total_N + weight * loss_N
    return total_N


PLAIN = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "tv": tv, "neg_log_alpha": neg_log_alpha}
NAMES = (*PLAIN, "jsd", "lk_hybrid", "ce")


def _weighted_difference(log_weights_NV: Tensor, log_others_NV: Tensor) -> Tensor:
    """sum_v weight (log weight - log other), 0 where the weight is 0. (N,)"""
    weights_NV = log_weights_NV.exp()
    difference_NV = torch.where(weights_NV > 0, log_weights_NV - log_others_NV, torch.zeros_like(log_weights_NV))
    return (weights_NV * difference_NV).sum(-1)
