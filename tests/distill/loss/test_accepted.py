"""The expected accepted length: its gradient against all texts there are, and against autograd."""

import itertools
from typing import Any

import pytest
import torch
from tiny_training import run_config
from torch import Tensor, nn

from data.signals.signal import DenseSignal, TopKSignal
from distill.loss.accepted import accepted_lengths, credits, rows_follow
from distill.loss.chunk_heads import OutputHead, Student
from distill.loss.definitions import Objective
from distill.loss.objective import chunked_loss
from distill.training.teacher import topk_signal
from speculative.errors import UserError

VOCAB, LENGTH = 3, 4


def head_of(seed: int) -> nn.Linear:
    """Logits of the next token by the token before it; the last column is of a text's start. A table, in float64."""
    torch.manual_seed(seed)
    layer = nn.Linear(VOCAB + 1, VOCAB, bias=False, dtype=torch.float64)
    nn.init.normal_(layer.weight, std=1.5)
    return layer


def loss_of(objective: Objective, draft: nn.Linear, signal: Any, hidden_RD: Tensor, labels_R: Tensor) -> Tensor:
    rows_R = torch.arange(len(labels_R))
    return chunked_loss(objective, Student(hidden_RD, OutputHead(draft)), signal, labels_R, rows_R=rows_R).loss


def text_rows(text: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    before = torch.tensor([VOCAB, *text[:-1]])
    return torch.eye(VOCAB + 1, dtype=torch.float64)[before], torch.tensor(text)


def expected_length(target: nn.Linear, draft: nn.Linear, gamma: int) -> Tensor:
    """Summed over the starts of a text of the target: the drafted tokens that a block keeps, by the acceptance rule."""
    p, q = target.weight.detach().softmax(0).T, draft.weight.softmax(0).T
    accepted = q * (p / q).clamp(max=1.0)  # drawn from the draft, and kept
    before = torch.eye(VOCAB + 1, dtype=torch.float64)[VOCAB]
    total = torch.zeros((), dtype=torch.float64)
    for start in range(LENGTH):
        length = torch.zeros(VOCAB + 1, dtype=torch.float64)
        for _ in range(min(gamma, LENGTH - start)):
            length = accepted @ (1.0 + length[:VOCAB])
        total = total + before @ length
        before = torch.cat([before @ p, torch.zeros(1, dtype=torch.float64)])
    return total


@pytest.mark.parametrize("gamma", [1, 2, 3, 6])
def test_value_and_gradient_are_those_of_all_texts(gamma: int) -> None:
    target, draft = head_of(0), head_of(1)
    objective = Objective({"accepted_length": 1.0}, gamma=gamma)
    exact = expected_length(target, draft, gamma)
    (wanted,) = torch.autograd.grad(exact, draft.weight)
    value, found = 0.0, torch.zeros_like(wanted)
    probs = target.weight.detach().softmax(0)
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        hidden_RD, labels_R = text_rows(text)
        weight = float((probs @ hidden_RD.T).gather(0, labels_R.unsqueeze(0)).prod())
        loss = loss_of(objective, draft, DenseSignal(hidden_RD, target), hidden_RD, labels_R)
        found += weight * torch.autograd.grad(loss, draft.weight)[0]
        value += weight * float(loss.detach())
    assert value == pytest.approx(LENGTH - float(exact.detach()) / gamma, abs=1e-12)
    torch.testing.assert_close(found, -wanted / gamma, rtol=0, atol=1e-12)


def test_credit_is_the_derivative_along_a_text() -> None:
    torch.manual_seed(0)
    accept_R = torch.rand(11, dtype=torch.float64).requires_grad_()
    follows_R = rows_follow(torch.tensor([2, 3, 4, 5, 9, 10, 11, 20, 21, 22, 23]))
    assert follows_R.tolist() == [False, True, True, True, False, True, True, False, True, True, True]
    lengths_R = accepted_lengths(accept_R, follows_R, 3)
    a = accept_R.detach()
    assert float(lengths_R[0].detach()) == pytest.approx(float(a[0] + a[0] * a[1] + a[0] * a[1] * a[2]))
    assert float(lengths_R[3].detach()) == pytest.approx(float(a[3])), "the text ends"
    (wanted,) = torch.autograd.grad(lengths_R.sum(), accept_R)
    alpha_R = torch.full_like(a, 0.5)
    dense_R, gain_R = credits(a, alpha_R, follows_R, 3)
    torch.testing.assert_close(gain_R, wanted, rtol=0, atol=1e-12)
    # Row 2 is asked by blocks that start there, one before and two before; 1.75, 1.5 and 1 are 1 + .5 + .25 and so on.
    assert float(dense_R[2]) == pytest.approx(float(1.75 + 1.5 * a[1] + a[1] * a[0]))


def test_one_token_a_block_is_total_variation() -> None:
    target, draft, rows = head_of(0), head_of(1), text_rows((0, 2, 1, 1))
    gradients = [
        torch.autograd.grad(loss_of(objective, draft, DenseSignal(rows[0], target), *rows), draft.weight)[0]
        for objective in (Objective({"accepted_length": 1.0}, gamma=1), Objective({"tv": 1.0}))
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_a_stored_top_k_of_everything_is_the_target_itself() -> None:
    target, draft, rows = head_of(0), head_of(1), text_rows((0, 2, 1, 1))
    objective = Objective({"accepted_length": 1.0}, gamma=3)
    signals = DenseSignal(rows[0], target), topk_signal(target, rows[0], VOCAB)
    losses = [loss_of(objective, draft, signal, *rows) for signal in signals]
    gradients = [torch.autograd.grad(loss, draft.weight)[0] for loss in losses]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)  # a stored signal is float32
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    less = topk_signal(target, rows[0], 1)
    assert isinstance(less, TopKSignal)
    assert not (less.ids_RK == rows[1].unsqueeze(-1)).all(), "a token whose probability is not known"
    assert torch.isfinite(torch.autograd.grad(loss_of(objective, draft, less, *rows), draft.weight)[0]).all()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"loss": {"name": None, "mix": {"accepted_length": 1.0, "tv": 1.0}}}, "remove it here"),
        ({"loss": {"name": "tv", "warmup": {"name": "accepted_length"}}}, "untrained draft"),
        ({"loss": {"name": "accepted_length", "prompt_weight": 0.1}}, "prompt_weight: 0"),
        ({"loss": {"name": "accepted_length"}, "data": {"mix": {"student": 1.0}}}, "the target's own text"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Any, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run_config(tmp_path, **sections)
    assert run_config(tmp_path, loss={"name": "accepted_length", "warmup": {"name": "forward_kl"}})
