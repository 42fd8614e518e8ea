"""Where a part runs, and what every part does there: wait, try, keep the fastest."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
OURS = ("bench", "data", "distill", "gpu", "speculative")  # packages whose absence is a fault, not a skip


@dataclass(frozen=True)
class Place:
    """A device; `tiny`: small sizes; `until`: after this moment (`time.monotonic`) nothing long is started; `folder`: for files."""

    device: torch.device
    tiny: bool
    until: float
    folder: Path = ROOT / "runs" / "gpu"

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        """Seconds."""
        return max(0.0, self.until - time.monotonic())

    def wait(self) -> None:
        """For the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Give back memory that nothing refers to, and start the peak at zero."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Of one run."""
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def bandwidth(self) -> float:
        """Bytes per second that a large copy reads and writes, the best of some."""
        source = torch.empty((16 if self.tiny else 4096) * 1024**2, dtype=torch.uint8, device=self.device)
        sink = torch.empty_like(source)
        return 2 * source.numel() / min(self.seconds(lambda: sink.copy_(source)) for _ in range(5))

    def matmul_flops(self) -> float:
        """FLOP/s that a large bfloat16 product reaches, the best of some."""
        size = 256 if self.tiny else 8192
        left, right = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * size**3 / min(self.seconds(lambda: left @ right) for _ in range(8))


def tried(cell: dict[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The cell with its results, its error, or the package that it lacks. A device that stays broken raises."""
    try:
        return cell | work()
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in OURS:
            return cell | {"skipped": f"{error.name} is not installed"}
        if "CUDA error" in str(error):
            raise
        return cell | {"error": first_line(error)}


def first_line(error: BaseException) -> str:
    """What is wrong, in a line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def best_of(repeats: int, run: Callable[[], T], rate: Callable[[T], float]) -> T:
    """The fastest of some runs, after one that is not counted."""
    run()
    return max((run() for _ in range(repeats)), key=rate)


def end_tree(root: psutil.Process) -> None:
    """Kill a process and all that it started, in whatever process groups (kill -9), and wait for the end of the latter."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = root.children(recursive=True)
        for process in (*children, root):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(children, timeout=5)
