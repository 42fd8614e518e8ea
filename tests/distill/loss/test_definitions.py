"""The objectives against ten-line formulas and against the laws they obey.

Legend: N tokens, V vocabulary.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, kl_divergence

from distill.loss import definitions as losses

VOCAB = 7
ALL_WITH_TARGET = [name for name in losses.NAMES if name != "ce"]


def log_probs(seed: int, rows: int = 5, spread: float = 2.0, vocab: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits_NV = spread * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    return logits_NV.log_softmax(-1)


def excluding(log_probs_NV: torch.Tensor, kept: int) -> torch.Tensor:
    """The same distribution with every token from `kept` on at probability zero, as top-k leaves it."""
    masked_NV = log_probs_NV.clone()
    masked_NV[:, kept:] = -torch.inf
    return masked_NV.log_softmax(-1)


def one(
    name: str, target_NV: torch.Tensor, student_NV: torch.Tensor, labels_N: torch.Tensor | None = None
) -> torch.Tensor:
    labels_N = torch.zeros(len(student_NV), dtype=torch.int64) if labels_N is None else labels_N
    return losses.mixed(losses.Objective({name: 1.0}, beta=0.5, eta=3.0), target_NV, student_NV, labels_N)


def by_definition(name: str, target_NV: torch.Tensor, student_NV: torch.Tensor) -> torch.Tensor:
    """Each objective written out over plain probabilities."""
    target, student = target_NV.exp(), student_NV.exp()
    alpha_N = sum(torch.minimum(target[:, v], student[:, v]) for v in range(target.shape[1]))
    forward = kl_divergence(Categorical(probs=target), Categorical(probs=student))
    if name == "forward_kl":
        return forward
    if name == "reverse_kl":
        return kl_divergence(Categorical(probs=student), Categorical(probs=target))
    if name == "jsd":
        middle = Categorical(probs=(target + student) / 2)
        return (
            kl_divergence(Categorical(probs=target), middle) + kl_divergence(Categorical(probs=student), middle)
        ) / 2
    if name == "tv":
        return (target - student).abs().sum(-1) / 2
    if name == "neg_log_alpha":
        return -alpha_N.log()
    weight_N = (-3.0 * alpha_N).exp()
    return weight_N * forward + (1 - weight_N) * (1 - alpha_N)


@pytest.mark.parametrize("name", ALL_WITH_TARGET)
def test_value_is_the_definition(name: str) -> None:
    target_NV, student_NV = log_probs(0), log_probs(1)
    # float64 on both sides; the formulas sum in another order.
    torch.testing.assert_close(
        one(name, target_NV, student_NV), by_definition(name, target_NV, student_NV), rtol=1e-12, atol=1e-14
    )


def test_ce_is_minus_the_log_probability_of_the_label() -> None:
    student_NV, labels_N = log_probs(0), torch.tensor([0, 6, 3, 3, 1])
    expected_N = torch.stack([-student_NV[row, label] for row, label in enumerate(labels_N.tolist())])
    torch.testing.assert_close(losses.ce(student_NV, labels_N), expected_N, rtol=0, atol=0)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_weighs_the_target_by_beta(beta: float) -> None:
    target_NV, student_NV = log_probs(2), log_probs(3)
    target, student = target_NV.exp(), student_NV.exp()
    mix = beta * target + (1 - beta) * student
    expected_N = beta * (target * (target / mix).log()).sum(-1) + (1 - beta) * (student * (student / mix).log()).sum(-1)
    torch.testing.assert_close(
        losses.jsd(target_NV, student_NV, beta), expected_N, rtol=1e-12, atol=1e-14
    )  # order of sums


distribution = st.lists(st.floats(-12, 12), min_size=VOCAB, max_size=VOCAB)


@settings(max_examples=150, deadline=None)
@given(distribution, distribution, st.integers(1, VOCAB))
def test_laws_of_divergences(target_logits: list[float], student_logits: list[float], kept: int) -> None:
    target_NV = excluding(torch.tensor([target_logits], dtype=torch.float64).log_softmax(-1), kept)
    student_NV = torch.tensor([student_logits], dtype=torch.float64).log_softmax(-1)
    slack = 1e-12  # rounding of sums of at most seven float64 terms
    alpha = float(losses.overlap(target_NV, student_NV))
    forward, total_variation = float(losses.forward_kl(target_NV, student_NV)), float(losses.tv(target_NV, student_NV))
    assert -slack <= alpha <= 1 + slack
    assert total_variation == pytest.approx(1 - alpha, abs=slack)
    assert forward >= -slack
    assert forward >= 2 * total_variation**2 - slack, "Pinsker"
    if kept == VOCAB:
        assert float(losses.reverse_kl(target_NV, student_NV)) >= -slack
    balanced = float(losses.jsd(target_NV, student_NV, 0.5))
    assert -slack <= balanced <= math.log(2) + slack
    assert balanced == pytest.approx(float(losses.jsd(student_NV, target_NV, 0.5)), abs=slack)
    assert float(losses.neg_log_alpha(target_NV, student_NV)) >= 1 - alpha - slack
    hybrid = float(losses.lk_hybrid(target_NV, student_NV, 3.0))
    assert min(forward, total_variation) - slack <= hybrid <= max(forward, total_variation) + slack


@settings(max_examples=50, deadline=None)
@given(distribution, st.integers(1, VOCAB))
def test_equal_distributions_cost_nothing(logits: list[float], kept: int) -> None:
    same_NV = excluding(torch.tensor([logits], dtype=torch.float64).log_softmax(-1), kept)
    for name in ALL_WITH_TARGET:
        assert float(one(name, same_NV, same_NV)) == pytest.approx(0.0, abs=1e-12), name  # rounding of the sum to one


def test_hybrid_ends_are_kl_and_tv() -> None:
    target_NV, student_NV = log_probs(4), log_probs(5)
    torch.testing.assert_close(losses.lk_hybrid(target_NV, student_NV, 0.0), losses.forward_kl(target_NV, student_NV))
    torch.testing.assert_close(losses.lk_hybrid(target_NV, student_NV, 1e6), losses.tv(target_NV, student_NV))


# reverse KL of a student that gives weight where the target has none is infinite by definition.
@pytest.mark.parametrize("name", [name for name in losses.NAMES if name != "reverse_kl"])
def test_tokens_the_target_excludes_leave_loss_and_gradient_finite(name: str) -> None:
    target_NV = excluding(log_probs(6), 3)
    logits_NV = log_probs(7).requires_grad_()
    loss = one(name, target_NV, logits_NV.log_softmax(-1)).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert logits_NV.grad is not None
    assert torch.isfinite(logits_NV.grad).all()
    assert logits_NV.grad.abs().max() > 0


def test_excluded_tokens_enter_forward_kl_with_weight_zero() -> None:
    target_NV, student_NV = excluding(log_probs(6), 3), log_probs(7)
    kept_NV = target_NV[:, :3]
    expected_N = (kept_NV.exp() * (kept_NV - student_NV[:, :3])).sum(-1)
    torch.testing.assert_close(
        losses.forward_kl(target_NV, student_NV), expected_N, rtol=1e-12, atol=0
    )  # order of the sum


@pytest.mark.parametrize("name", losses.NAMES)
def test_gradient_by_finite_differences(name: str) -> None:
    target_NV, labels_N = log_probs(8, rows=3), torch.tensor([0, 2, 5])
    logits_NV = log_probs(9, rows=3).requires_grad_()
    # The hybrid's weight is a constant to autograd but not to finite differences: eta 0 makes it one for both.
    eta = 0.0 if name == "lk_hybrid" else 3.0

    def loss_of(values_NV: torch.Tensor) -> torch.Tensor:
        return losses.mixed(
            losses.Objective({name: 1.0}, beta=0.3, eta=eta), target_NV, values_NV.log_softmax(-1), labels_N
        )

    assert torch.autograd.gradcheck(loss_of, (logits_NV,))


def test_weight_of_the_hybrid_carries_no_gradient() -> None:
    target_NV, logits_NV = log_probs(10), log_probs(11).requires_grad_()
    student_NV = logits_NV.log_softmax(-1)
    (gradient_NV,) = torch.autograd.grad(
        losses.lk_hybrid(target_NV, student_NV, 3.0).sum(), logits_NV, retain_graph=True
    )
    weight_N = (-3.0 * losses.overlap(target_NV, student_NV)).exp().detach()
    fixed_N = weight_N * losses.forward_kl(target_NV, student_NV) + (1 - weight_N) * losses.tv(target_NV, student_NV)
    (expected_NV,) = torch.autograd.grad(fixed_N.sum(), logits_NV)
    torch.testing.assert_close(gradient_NV, expected_NV, rtol=1e-12, atol=1e-15)  # same terms, another order


def test_tiny_overlap_still_has_a_gradient_under_neg_log_alpha() -> None:
    # Overlap about 2 exp(-200): below the smallest float32, so the naive log of a sum would be -inf.
    target_NV = torch.tensor([[200.0, 0.0]]).log_softmax(-1)
    logits_NV = torch.tensor([[0.0, 200.0]], requires_grad=True)
    loss_N = losses.neg_log_alpha(target_NV, logits_NV.log_softmax(-1))
    loss_N.sum().backward()
    assert loss_N.item() == pytest.approx(200 - math.log(2), abs=1e-3)
    assert logits_NV.grad is not None
    assert logits_NV.grad.abs().max() > 0.4


def test_mix_is_the_weighted_sum() -> None:
    target_NV, student_NV, labels_N = log_probs(12), log_probs(13), torch.tensor([1, 2, 3, 4, 5])
    weights = {"forward_kl": 0.7, "ce": 0.2, "jsd": 1.5}
    mixed_N = losses.mixed(losses.Objective(weights, beta=0.5, eta=3.0), target_NV, student_NV, labels_N)
    expected_N = sum(weight * one(name, target_NV, student_NV, labels_N) for name, weight in weights.items())
    torch.testing.assert_close(mixed_N, expected_N, rtol=1e-12, atol=0)  # order of three terms


def test_divergence_without_a_target_is_refused_and_ce_is_not() -> None:
    student_NV, labels_N = log_probs(14), torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ValueError, match="tv"):
        losses.mixed(losses.Objective({"tv": 1.0}, beta=0.5, eta=3.0), None, student_NV, labels_N)
    assert losses.mixed(losses.Objective({"ce": 1.0}, beta=0.5, eta=3.0), None, student_NV, labels_N).shape == (5,)


def test_every_configured_objective_exists() -> None:
    from typing import get_args

    from distill.config.sections import LossName

    assert set(get_args(LossName)) == {*losses.NAMES, losses.ACCEPTED_LENGTH}
