"""Signals as a store would hold them, made from logits."""

import torch
from eager_loss import log_probs
from torch import Tensor

from data.signals.signal import TopKSignal


def topk_of(logits_NV: Tensor, k: int, temperature: float = 1.0) -> TopKSignal:
    """Float64, so that a comparison is not about the store's rounding."""
    log_probs_NV = log_probs(logits_NV, temperature)
    best = log_probs_NV.topk(k)
    rest_NV = log_probs_NV.scatter(-1, best.indices, -torch.inf)
    return TopKSignal(best.indices, best.values, rest_NV.logsumexp(-1))


def random_topk(tokens: int, k: int, vocab: int, seed: int = 0, spread: float = 5.0) -> TopKSignal:
    """Top-k of random distributions, the tail summed by itself."""
    logits_RV = torch.randn(tokens, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    log_probs_RV = logits_RV.log_softmax(-1)
    log_probs_RK, ids_RK = log_probs_RV.topk(k)
    return TopKSignal(ids_RK, log_probs_RK, log_probs_RV.scatter(-1, ids_RK, -torch.inf).logsumexp(-1))
