"""Optimizers: who is in which group, default learning rates, the spike guard."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from distill.config.sections import OptimConfig
from distill.models.student import add_lora
from distill.training.optim import DEFAULT_LR, Float32Muon, SpikeGuard, default_lr, make_optimizers, make_schedules


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


def test_the_learning_rate_warms_up_and_decays_to_a_tenth() -> None:
    optim = OptimConfig(lr=1e-2, warmup_ratio=0.2)
    optimizers, rates = make_optimizers(tiny_model(), optim), []
    (schedule,) = make_schedules(optimizers, optim, 20)
    for _ in range(21):
        rates.append(schedule.get_last_lr()[0])
        optimizers[0].step()
        schedule.step()
    assert rates[:5] == pytest.approx([0.0, 0.0025, 0.005, 0.0075, 0.01])
    assert rates[4:] == sorted(set(rates[4:]), reverse=True)
    assert (rates[12], rates[20]) == pytest.approx((1e-3 + 9e-3 * 0.5, 1e-3)), "a cosine between peak and floor"


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_an_optimizer_learns(name: str) -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(128, 64), torch.randn(256, 128)
    wanted = inputs @ torch.randn(128, 64)  # of variance 128
    optimizers = make_optimizers(layer, OptimConfig(name=name, lr=3e-2))
    with torch.compiler.set_stance("force_eager"):  # the same arithmetic, not compiled for half a minute
        for _ in range(150):
            loss = (layer(inputs) - wanted).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert float(loss.detach()) < 1e-3 * 128


def test_adamw_is_fused_and_updates_as_the_plain_one() -> None:
    torch.manual_seed(0)
    fused = nn.Linear(6, 5)
    plain = copy.deepcopy(fused)
    (one,) = make_optimizers(fused, OptimConfig(lr=1e-2, weight_decay=0.1))
    assert one.defaults["fused"]
    groups = [{"params": [plain.weight], "weight_decay": 0.1}, {"params": [plain.bias], "weight_decay": 0.0}]
    other = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), foreach=False, fused=False)
    for layer, optimizer in ((fused, one), (plain, other)):
        for step in range(5):
            layer(torch.full((2, 6), float(step + 1))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    # Fused arithmetic rounds in another order.
    torch.testing.assert_close(fused.weight, plain.weight, rtol=1e-5, atol=1e-6)


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
