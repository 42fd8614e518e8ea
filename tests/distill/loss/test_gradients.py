"""The closed-form gradients against autograd through the definitions, and the laws of stored signals.

Legend: N tokens, V vocabulary, K stored entries, S samples.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from eager_loss import Definition, dense_by_definition, sampled_by_definition, topk_by_definition
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_signals import sampled_of, topk_of
from torch import Tensor

from data.signals.signal import TopKSignal
from distill.loss import definitions as losses
from distill.loss.definitions import Objective
from distill.loss.gradients import Rows, Scratch, compiled_rows, dense_rows, fresh, sampled_rows, topk_rows

ROWS, VOCAB = 6, 13
WITH_TARGET = [name for name in losses.NAMES if name != "ce"]
MIXES = {name: {name: 1.0} for name in losses.NAMES} | {
    "everything": {name: 0.3 + 0.2 * index for index, name in enumerate(losses.NAMES)},
    "hybrid and ce": {"lk_hybrid": 0.7, "ce": 0.1},
    "two shapes": {"reverse_kl": 0.5, "jsd": 2.0},
}
SAMPLED_MIXES = {name: MIXES[name] for name in ("forward_kl", "ce")} | {"both": {"forward_kl": 0.5, "ce": 2.0}}


def logits_of(seed: int, rows: int = ROWS, vocab: int = VOCAB, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)


def labels_of(rows: int = ROWS, vocab: int = VOCAB) -> Tensor:
    return torch.arange(rows) * 5 % vocab


def compare(
    define: Callable[[Tensor], Definition],
    rows_of: Callable[[Tensor], Rows],
    student_NV: Tensor,
    weights_N: Tensor | None,
) -> None:
    """Value, overlap, slack and gradient of the fast function against the definition by autograd."""
    student_NV = student_NV.clone().requires_grad_()
    expected = define(student_NV)
    loss_N = expected.loss_N if weights_N is None else expected.loss_N * weights_N
    (gradient_NV,) = torch.autograd.grad(loss_N.sum(), student_NV)
    untouched_NV = student_NV.detach().clone()
    rows = rows_of(untouched_NV)
    assert torch.equal(untouched_NV, student_NV), "the logits are read, not written"
    close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)  # float64; sums in another order
    close(rows.loss_C, loss_N.detach())
    close(rows.overlap_C, expected.overlap_N)
    close(rows.slack_C, expected.slack_N)
    close(rows.gradient_CV, gradient_NV)


WEIGHTS = torch.tensor([1.0, 0.0, 2.5, 0.3, 1.0, 4.0], dtype=torch.float64)


@pytest.mark.parametrize("weights_N", [None, WEIGHTS], ids=["plain", "weighted"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("mix", MIXES)
def test_dense_rows_are_the_definition(mix: str, temperature: float, weights_N: Tensor | None) -> None:
    objective = Objective(MIXES[mix], temperature, beta=0.3, eta=2.0)
    target_NV, labels_N = logits_of(0), labels_of()
    compare(
        lambda student: dense_by_definition(objective, target_NV, student, labels_N),
        lambda student: dense_rows(objective, target_NV, student, labels_N, weights_N, True),
        logits_of(1),
        weights_N,
    )


@pytest.mark.parametrize("weights_N", [None, WEIGHTS], ids=["plain", "weighted"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("k", [1, 4, VOCAB])
def test_topk_rows_are_the_definition(k: int, mix: str, temperature: float, weights_N: Tensor | None) -> None:
    objective, labels_N = Objective(MIXES[mix], temperature, beta=0.3, eta=2.0), labels_of()
    signal = topk_of(logits_of(0), k, temperature)
    # A store's probabilities are rounded and are never renormalised: here they add up to 1 % too much.
    signal = replace(signal, log_probs_RK=signal.log_probs_RK + 0.01)
    compare(
        lambda student: topk_by_definition(objective, signal, student, labels_N),
        lambda student: topk_rows(objective, signal, student, labels_N, weights_N, True),
        logits_of(1),
        weights_N,
    )


@pytest.mark.parametrize("weights_N", [None, WEIGHTS], ids=["plain", "weighted"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("mix", SAMPLED_MIXES)
def test_sampled_rows_are_the_definition(mix: str, temperature: float, weights_N: Tensor | None) -> None:
    objective, labels_N = Objective(SAMPLED_MIXES[mix], temperature), labels_of()
    signal = sampled_of(logits_of(0), 9, temperature=temperature)
    assert (signal.weights_RS == 0).any(), "fewer distinct ids than samples"
    compare(
        lambda student: sampled_by_definition(objective, signal, student, labels_N),
        lambda student: sampled_rows(objective, signal, student, labels_N, weights_N, True),
        logits_of(1),
        weights_N,
    )


def test_rows_without_a_target_are_cross_entropy() -> None:
    objective, labels_N = Objective({"ce": 0.7}, 1.3), labels_of()
    compare(
        lambda student: dense_by_definition(objective, None, student, labels_N),
        lambda student: sampled_rows(objective, None, student, labels_N, WEIGHTS, True),
        logits_of(1),
        WEIGHTS,
    )


def test_entropy_weighs_by_the_targets_choices() -> None:
    target_NV, labels_N = logits_of(0), labels_of()
    objective = Objective({"jsd": 1.0}, weighting="entropy")
    target = torch.distributions.Categorical(logits=target_NV)
    weights_N = 1 - torch.exp(-target.entropy())
    compare(
        lambda student: dense_by_definition(objective, target_NV, student, labels_N),
        lambda student: dense_rows(objective, target_NV, student, labels_N, None, True),
        logits_of(1),
        weights_N,
    )
    signal = topk_of(target_NV, 3)
    events_NE = torch.cat([signal.log_probs_RK, signal.log_tail_R.unsqueeze(-1)], -1)
    of_events_N = 1 - torch.exp(-torch.distributions.Categorical(logits=events_NE).entropy())
    compare(
        lambda student: topk_by_definition(objective, signal, student, labels_N),
        lambda student: topk_rows(objective, signal, student, labels_N, WEIGHTS, True),
        logits_of(1),
        of_events_N * WEIGHTS,
    )
    samples, kl = sampled_of(target_NV, 9), Objective({"forward_kl": 1.0}, weighting="entropy")
    compare(
        lambda student: sampled_by_definition(kl, samples, student, labels_N),
        lambda student: sampled_rows(kl, samples, student, labels_N, WEIGHTS, True),
        logits_of(1),
        weights_N * WEIGHTS,
    )


@pytest.mark.parametrize("name", WITH_TARGET)
def test_without_gradient_the_values_are_the_same(name: str) -> None:
    objective, target_NV, student_NV = Objective({name: 1.0}), logits_of(0), logits_of(1)
    for function, against in ((dense_rows, target_NV), (topk_rows, topk_of(target_NV, 3))):
        with_it, without = (
            function(objective, against, student_NV, labels_of(), None, wants) for wants in (True, False)
        )
        assert without.gradient_CV is None
        for mine, theirs in zip(without[:3], with_it[:3], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", WITH_TARGET)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_distributions_have_no_loss_and_no_gradient(name: str, dtype: torch.dtype) -> None:
    same_NV, objective = logits_of(0).to(dtype), Objective({name: 1.0})
    slack = 1e-12 if dtype == torch.float64 else 1e-6  # rounding of a sum of 13 probabilities
    for rows in (
        dense_rows(objective, same_NV, same_NV, labels_of(), None, True),
        topk_rows(objective, topk_of(same_NV, 4), same_NV, labels_of(), None, True),
    ):
        assert rows.gradient_CV is not None
        assert float(rows.loss_C.abs().max()) <= slack
        # tv has a corner there: which side of it a token is on is rounding, and the slope is one on either side.
        if name not in ("tv", "neg_log_alpha", "lk_hybrid"):
            assert float(rows.gradient_CV.abs().max()) <= slack
    if name in ("tv", "neg_log_alpha", "lk_hybrid"):
        exact = dense_rows(objective, same_NV, same_NV, labels_of(), None, True)
        assert exact.gradient_CV is not None
        assert float(exact.gradient_CV.abs().max()) <= slack


def test_total_variation_is_one_minus_the_overlap() -> None:
    target_NV, student_NV = logits_of(0), logits_of(1)
    rows = dense_rows(Objective({"tv": 1.0}), target_NV, student_NV, labels_of(), None, False)
    overlap_N = torch.minimum(target_NV.softmax(-1), student_NV.softmax(-1)).sum(-1)
    torch.testing.assert_close(rows.overlap_C, overlap_N, rtol=1e-12, atol=0)  # order of sums
    torch.testing.assert_close(1 - rows.loss_C, overlap_N, rtol=1e-12, atol=0)  # order of sums


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("mix", MIXES)
def test_a_signal_of_the_whole_vocabulary_is_dense(mix: str, temperature: float) -> None:
    target_NV, student_NV, labels_N = logits_of(0), logits_of(1), labels_of()
    objective = Objective(MIXES[mix], temperature, 0.4, 3.0)
    dense = dense_rows(objective, target_NV, student_NV, labels_N, WEIGHTS, True)
    stored = topk_rows(objective, topk_of(target_NV, VOCAB, temperature), student_NV, labels_N, WEIGHTS, True)
    for mine, theirs in zip(stored, dense, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)  # order of sums


rows_of_logits = st.lists(st.floats(-15, 15), min_size=VOCAB, max_size=VOCAB)


@settings(max_examples=200, deadline=None)
@given(rows_of_logits, rows_of_logits, st.integers(1, VOCAB), st.sampled_from(WITH_TARGET))
def test_a_stored_signal_never_says_more_than_the_dense_one(
    target: list[float], student: list[float], k: int, name: str
) -> None:
    target_NV, student_NV = (torch.tensor([one], dtype=torch.float64) for one in (target, student))
    # The hybrid's lambda depends on the overlap, which differs: the law is about divergences, so lambda is held.
    objective, labels_N = Objective({name: 1.0}, eta=0.0), torch.zeros(1, dtype=torch.int64)
    dense = dense_rows(objective, target_NV, student_NV, labels_N, None, False)
    stored = topk_rows(objective, topk_of(target_NV, k), student_NV, labels_N, None, False)
    rounding = 1e-10
    assert float(stored.loss_C) <= float(dense.loss_C) + rounding
    assert float(stored.overlap_C) <= float(dense.overlap_C) + rounding
    assert float(dense.overlap_C) <= float(stored.overlap_C + stored.slack_C) + rounding


def test_empty_entries_change_nothing() -> None:
    target_NV, student_NV, labels_N = logits_of(0), logits_of(1), labels_of()
    signal, objective = topk_of(target_NV, 3), Objective(MIXES["everything"])
    empty_NK = torch.full((ROWS, 2), -torch.inf, dtype=torch.float64)
    for ids_NK in (signal.ids_RK[:, :2], torch.full((ROWS, 2), -1), torch.full((ROWS, 2), 10**6)):
        for first in (True, False):
            order = slice(None) if first else slice(None, None, -1)
            padded = TopKSignal(
                torch.cat([ids_NK, signal.ids_RK][order], -1),
                torch.cat([empty_NK, signal.log_probs_RK][order], -1),
                signal.log_tail_R,
            )
            assert_same_rows(objective, padded, signal, student_NV, labels_N)


def assert_same_rows(
    objective: Objective, padded: TopKSignal, signal: TopKSignal, student_NV: Tensor, labels_N: Tensor
) -> None:
    for mine, theirs in zip(
        topk_rows(objective, padded, student_NV, labels_N, None, True),
        topk_rows(objective, signal, student_NV, labels_N, None, True),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)  # order of sums
    mine, theirs = (topk_by_definition(objective, one, student_NV, labels_N).loss_N for one in (padded, signal))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)  # order of sums


def test_a_row_that_stores_nothing_teaches_nothing_but_its_label() -> None:
    nothing = TopKSignal(
        torch.full((ROWS, 2), -1), torch.full((ROWS, 2), -torch.inf), torch.zeros(ROWS, dtype=torch.float32)
    )
    student_NV, labels_N = logits_of(1), labels_of()
    rows = topk_rows(Objective({"forward_kl": 1.0, "ce": 1.0}), nothing, student_NV, labels_N, None, True)
    expected_NV = student_NV.softmax(-1) - torch.nn.functional.one_hot(labels_N, VOCAB)
    torch.testing.assert_close(rows.gradient_CV, expected_NV, rtol=1e-10, atol=1e-12)  # order of sums
    torch.testing.assert_close(rows.loss_C, losses.ce(student_NV.log_softmax(-1), labels_N), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", WITH_TARGET)
def test_a_tail_too_small_for_one_minus_the_rest(name: str) -> None:
    """In float32 the student's stored mass rounds to 1; its tail is still e^-30 and e^-200 of it."""
    target_NV, labels_N = torch.tensor([[3.0, 2.0, 0.0, -1.0, 0.5]] * 2), torch.zeros(2, dtype=torch.int64)
    student_NV = torch.tensor([[40.0, 39.0, 8.0, 9.0, 7.0], [200.0, 199.0, -1.0, 0.0, -2.0]])
    signal, objective = topk_of(target_NV.double(), 2), Objective({name: 1.0})
    single = TopKSignal(signal.ids_RK, signal.log_probs_RK.float(), signal.log_tail_R.float())
    rows = topk_rows(objective, single, student_NV, labels_N, None, True)
    exact = topk_rows(objective, signal, student_NV.double(), labels_N, None, True)
    assert rows.gradient_CV is not None
    assert torch.isfinite(rows.loss_C).all()
    torch.testing.assert_close(rows.loss_C.double(), exact.loss_C, rtol=2e-6, atol=2e-6)  # float32
    torch.testing.assert_close(rows.gradient_CV.double(), exact.gradient_CV, rtol=1e-5, atol=1e-6)  # float32


@pytest.mark.parametrize("name", losses.NAMES)
def test_tokens_the_target_excludes(name: str) -> None:
    target_NV, student_NV, labels_N = logits_of(0).float(), logits_of(1).float(), torch.zeros(ROWS, dtype=torch.int64)
    target_NV[:, 4:9] = -torch.inf
    rows = dense_rows(Objective({name: 1.0}), target_NV, student_NV, labels_N, None, True)
    assert rows.gradient_CV is not None
    assert not rows.gradient_CV.isnan().any()
    assert not rows.loss_C.isnan().any()
    expected = dense_by_definition(Objective({name: 1.0}), target_NV, student_NV, labels_N)
    if name == "reverse_kl":
        assert rows.loss_C.isinf().all(), "the student gives weight where the target has none: infinite by definition"
        assert expected.loss_N.isinf().all()
    else:
        torch.testing.assert_close(rows.loss_C, expected.loss_N, rtol=1e-5, atol=1e-6)  # float32
        assert rows.gradient_CV.isfinite().all()


@pytest.mark.parametrize("function", ["dense", "topk", "sampled"])
@pytest.mark.parametrize("name", losses.NAMES)
def test_large_logits_give_no_nan(name: str, function: str) -> None:
    target_NV, student_NV = (1e4 * logits_of(seed).float() for seed in (0, 1))
    labels_N, objective = labels_of(), Objective({name: 1.0})
    if function == "dense":
        rows = dense_rows(objective, target_NV, student_NV, labels_N, None, True)
    elif function == "topk":
        signal = topk_of(target_NV, 3)
        rows = topk_rows(objective, signal, student_NV, labels_N, None, True)
    elif name in ("forward_kl", "ce"):
        rows = sampled_rows(objective, sampled_of(target_NV, 4), student_NV, labels_N, None, True)
    else:
        return
    for value in rows:
        assert value is not None
        assert value.isfinite().all()


def test_tiny_overlap_still_has_a_gradient_under_neg_log_alpha() -> None:
    # Overlap about 2 exp(-200): below the smallest float32, so the naive log of a sum would be -inf.
    target_NV, student_NV = torch.tensor([[200.0, 0.0]]), torch.tensor([[0.0, 200.0]])
    rows = dense_rows(
        Objective({"neg_log_alpha": 1.0}), target_NV, student_NV, torch.zeros(1, dtype=torch.int64), None, True
    )
    assert rows.gradient_CV is not None
    assert float(rows.loss_C) == pytest.approx(200 - math.log(2), abs=1e-3)
    assert float(rows.gradient_CV.abs().max()) > 0.4


@pytest.mark.parametrize("scratch", [fresh, Scratch()], ids=["fresh", "scratch"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_read_in_float32(dtype: torch.dtype, temperature: float, scratch: Any) -> None:
    target_NV, student_NV, labels_N = logits_of(0).to(dtype), logits_of(1).to(dtype), labels_of()
    objective = Objective(MIXES["everything"], temperature)
    for half, full in zip(
        dense_rows(objective, target_NV, student_NV, labels_N, None, True, scratch),
        dense_rows(objective, target_NV.float(), student_NV.float(), labels_N, None, True),
        strict=True,
    ):
        assert torch.equal(half, full)


def test_samples_are_unbiased_in_value_gradient_and_overlap() -> None:
    target_N1, student_N1 = logits_of(0, rows=1), logits_of(1, rows=1)
    draws, objective = 4000, Objective({"forward_kl": 1.0})
    labels_N = torch.zeros(draws, dtype=torch.int64)
    signal = sampled_of(target_N1.expand(draws, VOCAB), 5, seed=3)
    sampled = sampled_rows(objective, signal, student_N1.expand(draws, VOCAB), labels_N, None, True)
    dense = dense_rows(objective, target_N1, student_N1, labels_N[:1], None, True)
    for name in ("loss_C", "overlap_C", "gradient_CV"):
        values, expected = getattr(sampled, name), getattr(dense, name)[0]
        error = values.std(0) / math.sqrt(draws)
        score = ((values.mean(0) - expected) / error).abs().max()
        assert float(score) < 4, (
            f"{name}: {float(score):.1f} standard errors off; 13 of them exceed 4 once in 1,200 seeds"
        )
        assert float(error.max()) < 0.02, "draws enough to notice a bias"


def test_a_compiled_function_gives_what_it_gives() -> None:
    objective, target_NV, student_NV, labels_N = Objective(MIXES["everything"]), logits_of(0), logits_of(1), labels_of()
    for function, against in ((dense_rows, target_NV), (topk_rows, topk_of(target_NV, 3))):
        for mine, theirs in zip(
            compiled_rows(function, ROWS + 2, objective, against, student_NV, labels_N, WEIGHTS, True),
            function(objective, against, student_NV, labels_N, WEIGHTS, True),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)  # float64; fused sums


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_jsd_is_the_one_of_trl(beta: float, temperature: float) -> None:
    from trl.experimental.gkd import GKDTrainer

    target_NV, student_NV = logits_of(0), logits_of(1)
    theirs = GKDTrainer.generalized_jsd_loss(
        student_NV.unsqueeze(0), target_NV.unsqueeze(0), beta=beta, temperature=temperature, reduction="sum"
    )
    rows = dense_rows(Objective({"jsd": 1.0}, temperature, beta), target_NV, student_NV, labels_of(), None, False)
    torch.testing.assert_close(rows.loss_C.sum(), theirs, rtol=1e-10, atol=0)  # float64
