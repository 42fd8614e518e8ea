"""Optimizers: who is in which group, default learning rates, the spike guard."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from distill.config.sections import OptimConfig
from distill.models.student import add_lora
from distill.training.optim import DEFAULT_LR, Float32Muon, SpikeGuard, default_lr, make_optimizers


def groups_of(optimizers: list[torch.optim.Optimizer]) -> dict[int, float]:
    """Parameter -> weight decay over all optimizers; each parameter may be there once."""
    found: dict[int, float] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert id(parameter) not in found
                found[id(parameter)] = group["weight_decay"]
    return found


@pytest.mark.parametrize("name", ["adamw", "muon", "adamw8bit"])
@pytest.mark.parametrize("tied", [True, False])
def test_matrices_decay_and_vectors_do_not(name: str, tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    optim = OptimConfig(name=name, lr=1e-3, weight_decay=0.1)
    optimizers = make_optimizers(model, optim)
    if name == "muon":
        assert {id(p) for p in optimizers[1].param_groups[0]["params"]} == {
            id(p) for p in model.model.layers.parameters() if p.dim() == 2
        }
    decay = groups_of(optimizers)
    assert len(decay) == len(list(model.parameters()))
    assert decay[id(model.lm_head.weight)] == 0.1
    assert decay[id(model.model.embed_tokens.weight)] == 0.1
    assert decay[id(model.model.layers[0].mlp.up_proj.weight)] == 0.1
    assert decay[id(model.model.norm.weight)] == 0.0


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_muon_in_float32_is_torchs_muon(shape: tuple[int, int]) -> None:
    """The slow twin works in bfloat16, whose rounding moves an orthogonal factor by a few percent of its entries' size."""
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), torch.randn(4, *shape)
    settings = {"lr": 0.05, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    ours, twin = (kind([one], **settings) for kind, one in zip((Float32Muon, torch.optim.Muon), weights, strict=True))
    for gradient in gradients:
        for weight, optimizer in zip(weights, (ours, twin), strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    moved = float((weights[1] - start).abs().mean())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0.1 * moved)
    assert float((weights[0] - weights[1]).abs().mean()) < 0.02 * moved
    torch.testing.assert_close(ours.state_dict()["state"], twin.state_dict()["state"])
    assert isinstance(make_optimizers(tiny_model(), OptimConfig(name="muon"))[1], Float32Muon), "on a CPU"


def test_default_learning_rate_falls_with_size_and_adapters_take_their_own() -> None:
    rates = [row[1] for row in DEFAULT_LR]
    assert rates == sorted(rates, reverse=True)
    assert [row[0] for row in DEFAULT_LR] == sorted(row[0] for row in DEFAULT_LR)
    with torch.device("meta"):
        middle = nn.Linear(10_000, 10_000)  # 100 M
    assert default_lr(middle) == 3e-4
    middle.bias.requires_grad_(False)
    assert default_lr(middle) == 5e-4
    small = tiny_model()
    assert default_lr(small) == DEFAULT_LR[0][1]
    (optimizer,) = make_optimizers(small, OptimConfig())
    assert optimizer.param_groups[0]["lr"] == DEFAULT_LR[0][1]
    assert default_lr(add_lora(tiny_model(), 2, 4, "all-linear")) == DEFAULT_LR[0][2]


def test_missing_torchao_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from speculative.errors import UserError

    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match="pip install torchao"):
        make_optimizers(tiny_model(), OptimConfig(name="adamw8bit"))


class TestSpikeGuard:
    def test_a_spike_is_many_times_the_median_and_is_not_remembered(self) -> None:
        assert not any(SpikeGuard().is_spike(10.0**index) for index in range(16)), "nothing to compare with"
        guard = SpikeGuard()
        assert not any(guard.is_spike(1.0 + 0.1 * (index % 3)) for index in range(30))
        assert guard.is_spike(50.0)
        assert guard.is_spike(50.0)
        assert guard.skipped_in_a_row == 2
        assert not guard.is_spike(2.0)
        assert guard.skipped_in_a_row == 0
        assert max(guard.norms) == 2.0

    def test_memory_survives_a_checkpoint(self) -> None:
        first, second = SpikeGuard(), SpikeGuard()
        for _ in range(20):
            first.is_spike(1.0)
        second.load_state_dict(first.state_dict())
        assert second.is_spike(11.0)
        assert first.is_spike(11.0)
