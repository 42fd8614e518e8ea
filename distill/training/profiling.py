"""What the machine did: a profiler trace on request, and the share of the GPU's peak that training used (MFU)."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.files import write_bytes

_HALF = (torch.bfloat16, torch.float16, "bf16", "fp16")
TRACE, TABLE = "trace.json.gz", "operations.txt"
_TOP_ROWS = 40
# Dense bf16 tensor FLOP/s in units of 1e12; the first pattern found in the device's name holds. See `peak_flops`.
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
    r"\brtx 4090$": 165.2,  # to the end: the laptop's is another chip
    r"\brtx 3090$": 71.0,
    r"\bmi3(00|25)x\b": 1307.4,
}


@contextlib.contextmanager
def traced(folder: Path, steps: int, device: torch.device, main: bool) -> Iterator[Callable[[], None]]:
    """Traces some training steps with torch's profiler; gives the loop inside a function to call at the end of every step.

    The first step (allocations, compilation) is left out and one more lets the profiler itself get warm, then ``steps`` steps
    are recorded: FOLDER/profile/trace.json.gz for chrome://tracing or https://ui.perfetto.dev, and operations.txt with the
    operations that took the most time. Only the main process traces. With ``steps`` 0 nothing happens and nothing is imported.
    Training that ends, or fails, while the trace is running still gets what was recorded.
    """
    if not (steps and main):
        yield lambda: None
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda profiler: _write(profiler, folder / "profile", device),
    ) as profiler:
        yield profiler.step


def _write(profiler: Any, folder: Path, device: torch.device) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{TRACE}"  # torch decides by the suffix whether to compress
    profiler.export_chrome_trace(str(temporary))
    os.replace(temporary, folder / TRACE)
    by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=by, row_limit=_TOP_ROWS, max_name_column_width=80)
    write_bytes(folder / TABLE, f"{table}\n".encode())


def peak_flops(device_name: str, dtype: torch.dtype | str) -> float | None:
    """FLOP/s that a GPU can do at most in a dtype (or Accelerate's name of a mixed precision); None when it is not known.

    Dense bf16 (and float16, which is as fast on all of these) with float32 accumulation, without the sparsity that vendors'
    headlines double them by. NVIDIA data sheets: B200 and B300 boards, GB200 and GB300 superchips ("Blackwell architecture
    technical brief"), H100 and H200 ("H100 Tensor Core GPU datasheet", SXM unless the name says PCIe or NVL), H20, A100, A40,
    A30, A10, RTX A6000, L4, L40, L40S; "Ada GPU architecture" (RTX 4090, RTX 6000 Ada) and "GA102 whitepaper" (RTX 3090); AMD
    "Instinct MI300X" and "MI325X" data sheets. float32 is left out: whether tensor cores serve it is a setting.
    """
    if dtype not in _HALF:
        return None
    name = device_name.lower()
    return next((tflops * 1e12 for pattern, tflops in _PEAK_TFLOPS.items() if re.search(pattern, name)), None)


def mfu(
    tokens_per_second: float, flops_per_token: float, device: torch.device, dtype: torch.dtype | str, ranks: int = 1
) -> float | None:
    """Model FLOPs utilisation, 0 .. 1: FLOP/s that the models need over what all GPUs can do. None on a CPU or unknown GPU.

    ``tokens_per_second`` is over all ranks; ``flops_per_token`` belongs to the same tokens (arXiv 2204.02311, appendix B).
    """
    peak = peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    return None if peak is None else tokens_per_second * flops_per_token / (peak * ranks)


@dataclass(frozen=True)
class TrainingFlops:
    """FLOPs of training: `per_position` of what every token of prompt and response costs, `per_token` what a response token
    costs besides (the head), `per_mask` a mask token of a parallel draft: all of the student, and the teacher's head again.
    """

    per_position: float
    per_token: float
    per_mask: float = 0.0

    def of(self, positions: float, tokens: float, masks: float = 0.0) -> float:
        """FLOPs of so many positions with so many response tokens among them, and so many mask tokens beside."""
        return self.per_position * positions + self.per_token * tokens + self.per_mask * masks


def training_flops(student: torch.nn.Module, teacher: torch.nn.Module | None = None) -> TrainingFlops:
    """What training costs, by the weights: 2 per weight and multiplied token forward, 4 backward.

    A weight that trains costs 6 (forward, gradient of its input, gradient of itself), a frozen one of the student under
    adapters 4, one of an online teacher 2. Embedding tables are looked up, not multiplied: left out; the head is counted, a
    tied one too. What attention multiplies beyond its weights is left out, and so is what activation checkpointing repeats:
    the result is a lower bound, short by little while sequences are short against the width. Experts that a token is not sent
    to are counted: too high for mixtures of experts.
    """
    body, head = _weights(student, trained=True)
    taught_body, taught_head = (0.0, 0.0) if teacher is None else _weights(teacher, trained=False)
    return TrainingFlops(body + taught_body, head + taught_head, body + head + taught_head)


def _weights(model: torch.nn.Module, trained: bool) -> tuple[float, float]:
    """(FLOPs per token of the body, of the head); vectors are left out, their work is no matrix product."""
    output: Any = getattr(model, "get_output_embeddings", None)
    head_module = output() if output is not None else None
    head_ids = {id(p) for p in head_module.parameters()} if head_module is not None else set()
    tables = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters(recurse=False)}

    def cost(parameter: torch.nn.Parameter) -> float:
        if parameter.dim() < 2:
            return 0.0
        return parameter.numel() * (2.0 if not trained else 6.0 if parameter.requires_grad else 4.0)

    parameters = list(model.parameters())
    head = sum(cost(p) for p in parameters if id(p) in head_ids)
    body = sum(cost(p) for p in parameters if id(p) not in head_ids | tables)
    return body, head
