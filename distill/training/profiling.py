"""Model FLOPs utilisation (MFU)."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_HALF = (torch.bfloat16, torch.float16, "bf16", "fp16")
# Dense bf16 tensor FLOP/s in units of 1e12; the first pattern that matches the device's name is used. See `peak_flops`.
_PEAK_TFLOPS: dict[str, float] = {
    r"\bgb[23]00\b": 2500.0,
    r"\bb[23]00\b": 2250.0,
    r"\bh[12]00 nvl\b": 835.5,
    r"\bh[18]00 pcie\b": 756.0,
    r"\bg?h[128]00\b": 989.4,
    r"\bh20\b": 148.0,
    r"\ba[18]00\b": 312.0,
    r"\ba6000\b": 154.8,
    r"\ba40\b": 149.7,
    r"\ba30\b": 165.0,
    r"\ba10g?\b": 125.0,
    r"\bl40s\b": 362.05,
    r"\bl40\b": 181.05,
    r"\bl4\b": 121.0,
    r"\brtx 6000 ada\b": 364.25,
    r"\brtx 4090$": 165.2,  # anchored: the laptop GPU is another chip
    r"\brtx 3090$": 71.0,
    r"\bmi3(00|25)x\b": 1307.4,
}


def peak_flops(device_name: str, dtype: torch.dtype | str) -> float | None:
    """Peak FLOP/s of a GPU in a dtype (or Accelerate's name of a mixed precision); None if unknown.

    Dense bf16 (float16 is as fast on all of these) with float32 accumulation, without sparsity, which would double the numbers. NVIDIA data sheets: B200 and B300 boards, GB200 and GB300 superchips ("Blackwell architecture
    technical brief"), H100 and H200 ("H100 Tensor Core GPU datasheet", SXM unless the name says PCIe or NVL), H20, A100, A40,
    A30, A10, RTX A6000, L4, L40, L40S; "Ada GPU architecture" (RTX 4090, RTX 6000 Ada) and "GA102 whitepaper" (RTX 3090); AMD
    "Instinct MI300X" and "MI325X" data sheets. float32 is left out, because a setting decides whether it uses tensor cores.
    """
    if dtype not in _HALF:
        return None
    name = device_name.lower()
    return next((tflops * 1e12 for pattern, tflops in _PEAK_TFLOPS.items() if re.search(pattern, name)), None)


class _Products(TorchDispatchMode):
    """Sum the FLOPs of every operation in torch's table; its own counter fails on a loss that takes gradients chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (counted := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += counted(*args, **(kwargs or {}), out_val=result)
        return result


class FlopMeter:
    """Model FLOPs utilisation (arXiv 2204.02311, appendix B), from the operations that torch counts in the first step of a process.

    The count includes attention, the teacher, and what activation checkpointing recomputes. There is no MFU on a CPU, on a GPU
    with an unknown peak, and with train.compile, whose kernels cannot be counted.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | str, compiled: bool = False) -> None:
        on_gpu = device.type == "cuda" and not compiled
        self.peak = peak_flops(torch.cuda.get_device_name(device), dtype) if on_gpu else None
        self.per_position: float | None = None

    @contextlib.contextmanager
    def counted(self, positions: int) -> Iterator[None]:
        """Count FLOPs in the block, which is forward and backward of a step with ``positions`` tokens on this rank."""
        if self.peak is None or self.per_position is not None:
            yield
            return
        with _Products() as counted:
            yield
        self.per_position = counted.flops / max(positions, 1)

    def mfu(self, positions_per_second: float, ranks: int) -> float | None:
        """Achieved FLOP/s divided by the peak of all GPUs, 0 .. 1; ``positions_per_second`` is over all ranks."""
        if self.peak is None or self.per_position is None:
            return None
        return positions_per_second * self.per_position / (self.peak * ranks)
