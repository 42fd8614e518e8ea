"""Signals as a store would hold them, made from logits."""

import torch
from eager_loss import entropy, log_probs
from torch import Tensor

from data.signals.signal import SampledSignal, TopKSignal


def topk_of(logits_NV: Tensor, k: int, temperature: float = 1.0) -> TopKSignal:
    """Float64, so that a comparison is not about the store's rounding."""
    log_probs_NV = log_probs(logits_NV, temperature)
    best = log_probs_NV.topk(k)
    rest_NV = log_probs_NV.scatter(-1, best.indices, -torch.inf)
    return TopKSignal(best.indices, best.values, rest_NV.logsumexp(-1))


def sampled_of(logits_NV: Tensor, samples: int, seed: int = 0, temperature: float = 1.0) -> SampledSignal:
    """Draws from the target itself; the weight of an id is its share of the draws."""
    log_probs_NV = log_probs(logits_NV, temperature)
    generator = torch.Generator().manual_seed(seed)
    draws_NS = torch.multinomial(log_probs_NV.exp(), samples, replacement=True, generator=generator)
    shares_NV = torch.zeros_like(log_probs_NV).scatter_add_(
        -1, draws_NS, torch.full_like(draws_NS, 1 / samples, dtype=log_probs_NV.dtype)
    )
    best = shares_NV.topk(min(samples, shares_NV.shape[-1]))
    return SampledSignal(best.indices, best.values, log_probs_NV.gather(-1, best.indices), entropy(log_probs_NV))


def random_topk(tokens: int, k: int, vocab: int, seed: int = 0, spread: float = 5.0) -> TopKSignal:
    """Top-k of random distributions, the tail summed by itself."""
    logits_RV = torch.randn(tokens, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    log_probs_RV = logits_RV.log_softmax(-1)
    log_probs_RK, ids_RK = log_probs_RV.topk(k)
    return TopKSignal(ids_RK, log_probs_RK, log_probs_RV.scatter(-1, ids_RK, -torch.inf).logsumexp(-1))
