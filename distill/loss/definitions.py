"""Objectives as values over two distributions. Autograd computes the gradients in `rows.py`.

Legend: N tokens (rows), E events (the vocabulary's tokens, or a store's K entries and "any other token"), V
vocabulary, K stored entries. Losses are one number per token; divergences are in nats. Nothing is averaged here: the trainer divides once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings, logits_to_probs, most_likely
from speculative.rules.verify import accept_probability, draft_settings_for

UNTOUCHED = SamplingSettings()  # the model's own distribution
# Used as log 0, so that 0 x log 0 = 0. Its product with a probability above 1e-8 counts as infinite.
LOWEST = -1e30


@dataclass(frozen=True)
class Objective:
    """What is minimised: weights of the named losses, their constants, and how rows are processed.

    The loss sees both distributions softened by `temperature`; there is no temperature-squared factor, so the gradient shrinks as
    the temperature grows. `serving` and `rule`: how a server samples and accepts; used for `acceptance` only, not for the loss.
    `chunk_tokens`: rows whose logits exist at once (None: chosen for the device).
    """

    weights: Mapping[str, float]
    temperature: float = 1.0
    beta: float = 0.5
    eta: float = 3.0
    chunk_tokens: int | None = None
    serving: SamplingSettings = UNTOUCHED
    rule: Rule = field(default=Rule.named("sample"))
    compile: bool = False

    @property
    def overlap_is_acceptance(self) -> bool:
        """Whether the overlap of the distributions in the loss equals the server's acceptance rate."""
        return self.rule.draws and self.serving == SamplingSettings(self.temperature)


def acceptance(target_logits_NV: Tensor, student_logits_NV: Tensor, serving: SamplingSettings, rule: Rule) -> Tensor:
    """Probability that a server accepts the student's token: the overlap of both distributions under settings and rule. (N,)"""
    target_NV = logits_to_probs(target_logits_NV, GREEDY if rule.greedy else serving)
    student_NV = logits_to_probs(student_logits_NV, draft_settings_for(rule, serving) if rule.draws else GREEDY)
    return torch.minimum(target_NV, student_NV).sum(-1)


def kept(
    target_logits_NV: Tensor | None, student_logits_NV: Tensor, labels_N: Tensor, serving: SamplingSettings, rule: Rule
) -> Tensor:
    """Probability, given the target's own tokens, that each was drafted and kept (maximal coupling, arXiv 2211.17192). (N,)

    min(1, student / target). If drafts take their argmax, or without target logits: 1 if the argmax is the token, else 0.
    A token with unknown target probability (0) counts as rejected.
    """
    if target_logits_NV is None or not rule.draws:
        return (most_likely(student_logits_NV) == labels_N).to(student_logits_NV.dtype)
    student_N, target_N = (
        logits_to_probs(logits_NV, settings).gather(-1, labels_N.unsqueeze(-1)).squeeze(-1)
        for logits_NV, settings in (
            (student_logits_NV, draft_settings_for(rule, serving)),
            (target_logits_NV, serving),
        )
    )
    return accept_probability(student_N, target_N).where(target_N > 0, 0.0)


class Distribution(NamedTuple):
    """A distribution as natural logarithms (at least `LOWEST`) and as probabilities, both (N, E)."""

    log_probs_NE: Tensor
    probs_NE: Tensor


class Pair(NamedTuple):
    """The inputs of an objective, row by row. The target has no gradient; both student tensors have one."""

    target: Distribution
    student: Distribution
    # sum_e min(target, student) = 1 - TV: the probability that a draft token is accepted (arXiv 2211.17192).
    overlap_N: Tensor
    log_label_N: Tensor  # the student's log-probability of the token that follows


OBJECTIVES: dict[str, Callable[[Pair, "Objective"], Tensor]] = {}  # by the names used in configs


def registered(function: Callable[[Pair, Objective], Tensor]) -> Callable[[Pair, Objective], Tensor]:
    """Register an objective under its function's name, which configs use."""
    OBJECTIVES[function.__name__] = function
    return function


def overlap(target_probs_NE: Tensor, student_probs_NE: Tensor, mass_N: Tensor | float = 1.0) -> Tensor:
    """sum_e min(target, student), (N,): computed as `mass_N` (the target's total) minus what the student lacks,
    because the gradient of a minimum is slower.
    """
    return mass_N - torch.relu(target_probs_NE - student_probs_NE).sum(-1)


@registered
def forward_kl(pair: Pair, objective: Objective) -> Tensor:
    """KL(target || student) = sum_e target (log target - log student). (N,)"""
    return -_dot(pair.target.probs_NE, pair.student.log_probs_NE - pair.target.log_probs_NE)


@registered
def reverse_kl(pair: Pair, objective: Objective) -> Tensor:
    """KL(student || target) (MiniLLM, arXiv 2306.08543). (N,)"""
    return _student_mean(pair, pair.target.log_probs_NE)


@registered
def jsd(pair: Pair, objective: Objective) -> Tensor:
    """Beta KL(target || mix) + (1 - beta) KL(student || mix), mix = beta target + (1 - beta) student (GKD, arXiv 2306.13649). (N,)

    The mix is held fixed: its gradient is the same for every token, and a softmax ignores such a constant.
    """
    beta = objective.beta
    with torch.no_grad():
        log_mix_NE = torch.lerp(pair.student.probs_NE, pair.target.probs_NE, beta).log_().clamp_(min=LOWEST)
        target_part_N = _dot(pair.target.probs_NE, pair.target.log_probs_NE - log_mix_NE)
    return beta * target_part_N + (1.0 - beta) * _student_mean(pair, log_mix_NE)


@registered
def tv(pair: Pair, objective: Objective) -> Tensor:
    """Total variation, 1 - overlap. Its gradient has a factor student(v), so it vanishes on an untrained draft. (N,)"""
    return 1.0 - pair.overlap_N


@registered
def neg_log_alpha(pair: Pair, objective: Objective) -> Tensor:
    """-log sum_e min(target, student) (LK losses, arXiv 2602.23881), in log space: a tiny overlap still has a gradient. (N,)"""
    return -torch.minimum(pair.target.log_probs_NE, pair.student.log_probs_NE).logsumexp(-1)


@registered
def lk_hybrid(pair: Pair, objective: Objective) -> Tensor:
    """Lambda KL(target || student) + (1 - lambda) TV, lambda = exp(-eta stop_grad(alpha)) (arXiv 2602.23881). (N,)"""
    weight_N = torch.exp(-objective.eta * pair.overlap_N.detach())
    return weight_N * forward_kl(pair, objective) + (1.0 - weight_N) * tv(pair, objective)


@registered
def ce(pair: Pair, objective: Objective) -> Tensor:
    """-log student(label). (N,)"""
    return -pair.log_label_N


def mixed(objective: Objective, pair: Pair) -> Tensor:
    """Weighted sum of the named objectives. (N,)"""
    terms = [weight * OBJECTIVES[name](pair, objective) for name, weight in objective.weights.items() if weight]
    return sum(terms, start=torch.zeros_like(pair.overlap_N))


def _dot(first_NE: Tensor, second_NE: Tensor) -> Tensor:
    return (first_NE * second_NE).sum(-1)


def _student_mean(pair: Pair, log_others_NE: Tensor) -> Tensor:
    """sum_e student (log student - log other), with the other held fixed. (N,)

    The student in the logarithm is held fixed too, because sum_e student grad log student is the gradient of 1, which is 0.
    """
    return _dot(pair.student.probs_NE, (pair.student.log_probs_NE - log_others_NE).detach())


def filled_ids(ids_NK: Tensor, log_probs_NK: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, mask of filled entries), both (N, K). An empty entry gets the id of the first filled one in its row, or 0."""
    full_NK = log_probs_NK > -torch.inf
    first_N1 = ids_NK.gather(-1, full_NK.int().argmax(-1, keepdim=True))
    spare_N1 = first_N1.masked_fill(~full_NK.any(-1, keepdim=True), 0)
    return torch.where(full_NK, ids_NK, spare_N1), full_NK
