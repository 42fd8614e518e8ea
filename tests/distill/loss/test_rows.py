"""Every objective's value and gradient against its textbook formula by autograd, the laws they obey, and those of stored signals.

Legend: N tokens, V vocabulary, K stored entries, S samples.
"""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from eager_loss import PLAIN, Definition, dense_by_definition, topk_by_definition
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_signals import topk_of
from torch import Tensor

from data.signals.signal import TopKSignal
from distill.loss.definitions import Objective
from distill.loss.rows import Against, Rows, rows_of

ROWS, VOCAB = 6, 13
NAMES = [*PLAIN, "ce"]
MIXES = {name: {name: 1.0} for name in NAMES} | {
    "everything": {name: 0.3 + 0.2 * index for index, name in enumerate(NAMES)},
    "hybrid and ce": {"lk_hybrid": 0.7, "ce": 0.1},
}
WEIGHTS = torch.tensor([1.0, 0.0, 2.5, 0.3, 1.0, 4.0], dtype=torch.float64)


def logits_of(seed: int, rows: int = ROWS, vocab: int = VOCAB, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)


def labels_of(rows: int = ROWS, vocab: int = VOCAB) -> Tensor:
    return torch.arange(rows) * 5 % vocab


def gradient_of(objective: Objective, against: Against, student_NV: Tensor, **options: Any) -> tuple[Rows, Tensor]:
    labels_N = labels_of(len(student_NV), student_NV.shape[-1])
    rows, gradient_NV = rows_of(objective, against, student_NV, labels_N, options.get("weights_N"), True)
    assert gradient_NV is not None
    return rows, gradient_NV


def values_of(objective: Objective, against: Against, student_NV: Tensor) -> Rows:
    rows, gradient_NV = rows_of(objective, against, student_NV, labels_of(len(student_NV)), None, False)
    assert gradient_NV is None
    return rows


def definition_of(objective: Objective, against: Against, student_NV: Tensor) -> Definition:
    define: Any = topk_by_definition if isinstance(against, TopKSignal) else dense_by_definition
    return define(objective, against, student_NV, labels_of(len(student_NV)))


def assert_defined(objective: Objective, against: Against, weights_N: Tensor | None = None) -> None:
    """Value, overlap, slack and gradient against the formulas by autograd."""
    student_NV = logits_of(1).requires_grad_()
    expected = definition_of(objective, against, student_NV)
    loss_N = expected.loss_N * (1.0 if weights_N is None else weights_N)
    (gradient_NV,) = torch.autograd.grad(loss_N.sum(), student_NV)
    untouched_NV = student_NV.detach().clone()
    rows, found_NV = gradient_of(objective, against, untouched_NV, weights_N=weights_N)
    assert torch.equal(untouched_NV, student_NV), "the logits are read, not written"
    close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)  # float64; sums in another order
    close(rows.loss_C, loss_N.detach())
    close(rows.overlap_C, expected.overlap_N)
    close(rows.slack_C, expected.slack_N)
    close(found_NV, gradient_NV)


@pytest.mark.parametrize("weights_N", [None, WEIGHTS], ids=["plain", "weighted"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("mix", MIXES)
def test_rows_are_the_formula(mix: str, temperature: float, weights_N: Tensor | None) -> None:
    objective, target_NV = Objective(MIXES[mix], temperature, beta=0.3, eta=2.0), logits_of(0)
    assert_defined(objective, target_NV, weights_N)
    for k in (1, 4, VOCAB):
        signal = topk_of(target_NV, k, temperature)
        # A store's probabilities are rounded and are never renormalised: here they add up to 1 % too much.
        assert_defined(objective, replace(signal, log_probs_RK=signal.log_probs_RK + 0.01), weights_N)
    if mix == "ce":
        assert_defined(objective, None, weights_N)


def test_the_formulas_are_the_textbooks() -> None:
    target_NV, student_NV = logits_of(0).log_softmax(-1), logits_of(1).log_softmax(-1)
    target, student = (torch.distributions.Categorical(logits=logits) for logits in (target_NV, student_NV))
    kl = torch.distributions.kl_divergence
    tv_N = (target.probs - student.probs).abs().sum(-1) / 2
    mix = torch.distributions.Categorical(probs=0.3 * target.probs + 0.7 * student.probs)
    weight_N = torch.exp(-2.0 * (1 - tv_N))
    wanted = {
        "forward_kl": kl(target, student),
        "reverse_kl": kl(student, target),
        "tv": tv_N,
        "neg_log_alpha": -(1 - tv_N).log(),
        "jsd": 0.3 * kl(target, mix) + 0.7 * kl(student, mix),
        "lk_hybrid": weight_N * kl(target, student) + (1 - weight_N) * tv_N,
    }
    assert wanted.keys() == PLAIN.keys()
    for name, expected_N in wanted.items():
        found_N = PLAIN[name](target_NV, student_NV, Objective({}, beta=0.3, eta=2.0))
        torch.testing.assert_close(found_N, expected_N, rtol=1e-12, atol=1e-14)  # order of sums


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_distributions_have_no_loss_and_no_gradient(name: str, dtype: torch.dtype) -> None:
    same_NV, objective = logits_of(0).to(dtype), Objective({name: 1.0})
    slack = 1e-12 if dtype == torch.float64 else 1e-6  # rounding of a sum of 13 probabilities
    for against in (same_NV, topk_of(same_NV, 4)):
        rows, gradient_NV = gradient_of(objective, against, same_NV)
        assert float(rows.loss_C.abs().max()) <= slack
        # tv has a corner there: which side of it a token is on is rounding, and the slope is one on either side.
        if against is same_NV or name in ("forward_kl", "reverse_kl", "jsd"):
            assert float(gradient_NV.abs().max()) <= slack


rows_of_logits = st.lists(st.floats(-15, 15), min_size=VOCAB, max_size=VOCAB)


@settings(max_examples=200, deadline=None)
@given(rows_of_logits, rows_of_logits, st.integers(1, VOCAB), st.booleans())
def test_laws(target: list[float], student: list[float], k: int, cut: bool) -> None:
    """Of divergences, where the target may exclude tokens as a top-k leaves it; and a stored signal never says more than the dense one."""
    target_NV, student_NV = (torch.tensor([one], dtype=torch.float64) for one in (target, student))
    if cut:
        target_NV[:, k:] = -torch.inf
    found, slack = {}, 1e-11  # rounding of sums of at most 13 float64 terms of size 30
    for name in PLAIN:
        # The hybrid's lambda depends on the overlap, which differs: the law is about divergences, so lambda is held.
        objective = Objective({name: 1.0}, eta=0.0)
        dense, stored = (values_of(objective, one, student_NV) for one in (target_NV, topk_of(target_NV, k)))
        found[name] = float(dense.loss_C)
        assert found[name] >= -slack
        assert float(stored.loss_C) <= found[name] * (1 + 1e-12) + slack
        assert float(stored.overlap_C) <= float(dense.overlap_C) + slack
        assert float(dense.overlap_C) <= float(stored.overlap_C + stored.slack_C) + slack
    alpha = float(dense.overlap_C)
    assert -slack <= alpha <= 1 + slack
    assert found["tv"] == pytest.approx(1 - alpha, abs=slack)
    assert found["lk_hybrid"] == found["forward_kl"] >= 2 * found["tv"] ** 2 - slack, "Pinsker"
    assert found["neg_log_alpha"] >= 1 - alpha - slack
    mirrored = values_of(Objective({"jsd": 1.0}), student_NV, target_NV)
    assert found["jsd"] == pytest.approx(float(mirrored.loss_C), abs=slack)
    assert found["jsd"] <= math.log(2) + slack
    late = values_of(Objective({"lk_hybrid": 1.0}, eta=1e9), target_NV, student_NV)
    assert float(late.loss_C) == pytest.approx(found["tv"] if alpha > 1e-6 else float(late.loss_C), abs=slack)


def test_empty_entries_change_nothing() -> None:
    signal, objective, student_NV = topk_of(logits_of(0), 3), Objective(MIXES["everything"]), logits_of(1)
    empty_NK = torch.full((ROWS, 2), -torch.inf, dtype=torch.float64)
    expected, gradient_NV = gradient_of(objective, signal, student_NV)
    for ids_NK in (signal.ids_RK[:, :2], torch.full((ROWS, 2), -1), torch.full((ROWS, 2), 10**6)):
        for order in (slice(None), [4, 3, 2, 1, 0]):
            padded = TopKSignal(
                torch.cat([ids_NK, signal.ids_RK], -1)[:, order],
                torch.cat([empty_NK, signal.log_probs_RK], -1)[:, order],
                signal.log_tail_R,
            )
            rows, found_NV = gradient_of(objective, padded, student_NV)
            by_formula = definition_of(objective, padded, student_NV)
            pairs = [*zip(rows, expected, strict=True), (found_NV, gradient_NV), (by_formula.loss_N, expected.loss_C)]
            for mine, theirs in pairs:
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)  # order of sums


def test_a_row_that_stores_nothing_teaches_nothing_but_its_label() -> None:
    nothing = TopKSignal(
        torch.full((ROWS, 2), -1), torch.full((ROWS, 2), -torch.inf), torch.zeros(ROWS, dtype=torch.float32)
    )
    student_NV = logits_of(1)
    rows, gradient_NV = gradient_of(Objective({"forward_kl": 1.0, "ce": 1.0}), nothing, student_NV)
    expected, by_label_NV = gradient_of(Objective({"ce": 1.0}), None, student_NV)
    torch.testing.assert_close(gradient_NV, by_label_NV, rtol=1e-12, atol=1e-12)  # order of sums
    torch.testing.assert_close(rows.loss_C, expected.loss_C, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PLAIN)
def test_a_tail_too_small_for_one_minus_the_rest(name: str) -> None:
    """In float32 the student's stored mass rounds to 1; its tail is still e^-30 and e^-200 of it."""
    target_NV = torch.tensor([[3.0, 2.0, 0.0, -1.0, 0.5]] * 2)
    student_NV = torch.tensor([[40.0, 39.0, 8.0, 9.0, 7.0], [200.0, 199.0, -1.0, 0.0, -2.0]])
    signal, objective = topk_of(target_NV.double(), 2), Objective({name: 1.0})
    single = TopKSignal(signal.ids_RK, signal.log_probs_RK.float(), signal.log_tail_R.float())
    rows, gradient_NV = gradient_of(objective, single, student_NV)
    exact, expected_NV = gradient_of(objective, signal, student_NV.double())
    assert torch.isfinite(rows.loss_C).all()
    torch.testing.assert_close(rows.loss_C.double(), exact.loss_C, rtol=2e-6, atol=2e-6)  # float32
    torch.testing.assert_close(gradient_NV.double(), expected_NV, rtol=1e-5, atol=1e-6)  # float32


@pytest.mark.parametrize("name", NAMES)
def test_tokens_the_target_excludes(name: str) -> None:
    target_NV, student_NV, objective = logits_of(0).float(), logits_of(1).float(), Objective({name: 1.0})
    target_NV[:, 4:9] = -torch.inf
    rows, gradient_NV = gradient_of(objective, target_NV, student_NV)
    assert not gradient_NV.isnan().any()
    expected = definition_of(objective, target_NV, student_NV)
    if name == "reverse_kl":
        assert rows.loss_C.isinf().all(), "the student gives weight where the target has none: infinite by definition"
        assert expected.loss_N.isinf().all()
    else:
        torch.testing.assert_close(rows.loss_C, expected.loss_N, rtol=1e-5, atol=1e-6)  # float32
        assert gradient_NV.isfinite().all()
        assert gradient_NV.abs().max() > 0


@pytest.mark.parametrize("name", NAMES)
def test_large_logits_give_no_nan(name: str) -> None:
    target_NV, student_NV = (1e4 * logits_of(seed).float() for seed in (0, 1))
    for against in (target_NV, topk_of(target_NV, 3)):
        rows, gradient_NV = gradient_of(Objective({name: 1.0}), against, student_NV)
        assert all(value.isfinite().all() for value in (*rows, gradient_NV))


def test_tiny_overlap_still_has_a_gradient_under_neg_log_alpha() -> None:
    # Overlap about 2 exp(-200): below the smallest float32, so the naive log of a sum would be -inf.
    target_NV, student_NV = torch.tensor([[200.0, 0.0]]), torch.tensor([[0.0, 200.0]])
    rows, gradient_NV = gradient_of(Objective({"neg_log_alpha": 1.0}), target_NV, student_NV)
    assert float(rows.loss_C) == pytest.approx(200 - math.log(2), abs=1e-3)
    assert float(gradient_NV.abs().max()) > 0.4
