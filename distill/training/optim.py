"""Optimizers of a run: parameter groups, default learning rates, schedule and the spike guard."""

import statistics
from collections import deque
from typing import Any

import torch
from torch import nn

from distill.config.sections import OptimConfig
from speculative.errors import UserError

# (parameters up to, peak learning rate of AdamW if all weights train, with adapters). The first two rows are from our own
# sweeps on the embedded and other small targets (docs/training.md); the others follow common practice for models of that size.
DEFAULT_LR = (
    (5_000_000, 2e-3, 2e-3),
    (50_000_000, 1e-3, 1e-3),
    (500_000_000, 3e-4, 5e-4),
    (2_000_000_000, 1e-4, 2e-4),
    (float("inf"), 5e-5, 1e-4),
)
BETAS, FINAL_LR = (0.9, 0.95), 0.1  # decay rates of AdamW's moments; last learning rate divided by the peak
# A gradient norm so many times the recent median is a spike.
SPIKE_FACTOR = 10.0
# Number of earlier gradient norms in the median, and the least number before a norm is compared with it.
SPIKE_WINDOW, SPIKE_LEAST = 64, 16


def default_lr(module: nn.Module) -> float:
    """Peak learning rate by the draft's size, or by the size of its base when adapters train."""
    total = sum(p.numel() for p in module.parameters())
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    row = next(row for row in DEFAULT_LR if total <= row[0])
    return row[1] if trainable == total else row[2]


def make_optimizers(module: nn.Module, optim: OptimConfig) -> list[torch.optim.Optimizer]:
    """Make the optimizers of all trainable parameters, with one learning rate.

    Weight decay: `weight_decay` on matrices, none on vectors.
    `adamw`: one AdamW, fused if torch supports it on the device. `adamw8bit`: AdamW with 8-bit moments (torchao).
    `muon`: Muon (orthogonalised momentum, arXiv 2502.16982) for the matrices of the layers, with updates scaled to AdamW's size
    so that the same learning rate works; AdamW for embeddings, head and vectors.

    Raises UserError: adamw8bit without torchao.
    """
    lr = optim.lr if optim.lr is not None else default_lr(module)
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    in_tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    in_tables |= {id(parameter) for name, parameter in named if "lm_head" in name or "embed" in name}
    matrices = [p for _, p in named if p.dim() >= 2 and id(p) not in in_tables]
    tables, vectors = [p for _, p in named if p.dim() >= 2 and id(p) in in_tables], [p for _, p in named if p.dim() < 2]
    # Muon takes matrices only; stacked experts and convolutions use AdamW.
    orthogonal = [p for p in matrices if p.dim() == 2] if optim.name == "muon" else []
    chosen = {id(p) for p in orthogonal}
    groups = [
        {"params": [p for p in matrices if id(p) not in chosen], "weight_decay": optim.weight_decay},
        {"params": tables, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers: list[torch.optim.Optimizer] = []
    if groups:
        optimizers.append(_adamw(groups, lr, optim))
    if orthogonal:
        optimizers.append(
            Float32Muon(orthogonal, lr=lr, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers


class Float32Muon(torch.optim.Muon):
    """torch's Muon with `adjust_lr_fn="match_rms_adamw"`; on a CPU its Newton-Schulz iteration is in float32 instead of bfloat16.

    CPUs without bfloat16 instructions emulate them, which takes several times as long. The state is the same.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> float | None:  # type: ignore[override]
        """One update; see `torch.optim.Muon.step`."""
        assert closure is None
        if self.param_groups[0]["params"][0].device.type != "cpu":
            return super().step()
        for group in self.param_groups:
            lr, momentum = float(group["lr"]), group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                buffer = state["momentum_buffer"]
                buffer.lerp_(weight.grad, 1 - momentum)
                update = weight.grad.lerp(buffer, momentum) if group["nesterov"] else buffer
                update = _orthogonal(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(update, alpha=-lr * 0.2 * max(weight.shape) ** 0.5)
        return None


def _orthogonal(matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """Nearly the orthogonal factor of a matrix, by a quintic Newton-Schulz iteration."""
    a, b, c = coefficients
    wide = matrix.float() if matrix.shape[0] <= matrix.shape[1] else matrix.float().T
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide if matrix.shape[0] <= matrix.shape[1] else wide.T).to(matrix.dtype)


def _adamw(groups: list[dict[str, Any]], lr: float, optim: OptimConfig) -> torch.optim.Optimizer:
    if optim.name == "adamw8bit":
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise UserError("optim.name: adamw8bit needs torchao; run `pip install torchao`, or use adamw") from error
        return AdamW8bit(groups, lr=lr, betas=BETAS)
    devices = {p.device.type for group in groups for p in group["params"]}
    fused = devices <= {"cuda", "cpu"} and all(p.is_floating_point() for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=fused)


def make_schedules(optimizers: list[torch.optim.Optimizer], optim: OptimConfig, steps: int) -> list[Any]:
    """Linear warm-up, then cosine decay to a tenth of the peak."""
    from transformers import get_cosine_with_min_lr_schedule_with_warmup  # Imported late: it brings peft.

    return [
        get_cosine_with_min_lr_schedule_with_warmup(
            optimizer,
            num_warmup_steps=round(optim.warmup_ratio * steps),
            num_training_steps=steps,
            min_lr_rate=FINAL_LR,
        )
        for optimizer in optimizers
    ]


class SpikeGuard:
    """Detect gradient norms far above the recent median. The recent norms are part of a checkpoint."""

    def __init__(self) -> None:
        """A norm above `SPIKE_FACTOR` times the median of the last 64 is a spike."""
        self.norms: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self.skipped_in_a_row = 0

    def is_spike(self, norm: float) -> bool:
        """Whether the norm is a spike. Other norms are added to the history."""
        spike = len(self.norms) >= SPIKE_LEAST and norm > SPIKE_FACTOR * self.median()
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if spike else 0
        if not spike:
            self.norms.append(norm)
        return spike

    def median(self) -> float:
        """Median of the recorded norms; 0 if there are none."""
        return statistics.median(self.norms) if self.norms else 0.0

    def forget(self) -> None:
        """Clear the history when another objective starts, because its norms can have another scale."""
        self.norms.clear()
        self.skipped_in_a_row = 0

    def state_dict(self) -> dict[str, list[float] | int]:
        return {"norms": list(self.norms), "skipped_in_a_row": self.skipped_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norms = deque(state["norms"], maxlen=SPIKE_WINDOW)
        self.skipped_in_a_row = state["skipped_in_a_row"]
