"""Products of few tokens with a matrix, with what comes before and after, in one kernel.

Shapes: M tokens, N outputs, K inputs.
"""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

FEW_TOKENS = 64  # More tokens of a call are multiplied by torch, whose products are bound by arithmetic then.
FEWEST_TOKENS = 2  # So few are multiplied row by row if the matrix is small.
SMALL, MOST_BYTES = 2**23, 8192  # numbers of a matrix; bytes of its rows, two at a time, that fit in registers
TILE = 64  # rows of a matrix that a program multiplies: the least that the matrix units of a Hopper take
GATE_WIDTH = 1024
SHARED_BYTES = 99 * 1024  # of a multiprocessor: the least of devices since 8.0
PROGRAMS = 264  # a device's multiprocessors, twice
OVERLAPPING = (9, 0)  # compute capability: kernels that start before the one before has ended


class Tile(NamedTuple):
    """How a product is divided: outputs and inputs of a program's step, programs that share the inputs, loads ahead, warps. `rows`: by
    `product_of_rows`, whose programs read whole rows.
    """

    outputs: int
    inputs: int
    split: int = 1
    stages: int = 1
    warps: int = 4
    rows: bool = False


def tile_of(tokens: int, outputs: int, inputs: int, gated: bool, may_split: bool, itemsize: int, shared: int) -> Tile:
    """A division that fits in `shared` bytes: those that were fastest on an H200 for the matrices of Qwen3 8B and 0.6B."""
    if tokens <= FEWEST_TOKENS and outputs * inputs <= SMALL and inputs * itemsize * (2 if gated else 1) <= MOST_BYTES:
        return Tile(8, power_of_two(inputs), rows=True)
    tiles = -(-outputs // TILE)
    split = max(1, min(8, 2 * TILE // tiles)) if may_split else 1
    step = 64 if gated and inputs < 2048 else 128 if gated or split > 2 or outputs > 8192 else 256
    width = (2 * TILE if gated else TILE) + max(16, power_of_two(tokens))
    while 2 * (loaded := width * step * itemsize) > shared and step > 16:
        step //= 2
    return Tile(TILE, step, split, max(2, min(5 if may_split else 3, shared // loaded)))


def power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()


class Matrix(NamedTuple):
    """A weight (N, K) and its bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class Workspace:
    """Partial sums of programs that share one, and counters of those that are done. Calls on one stream take turns."""

    def __init__(self, device: torch.device) -> None:
        self.partial = torch.empty(0, dtype=torch.float32, device=device)
        self.counters = torch.zeros(0, dtype=torch.int32, device=device)
        self._outgrown: list[torch.Tensor] = []  # Recordings hold their addresses.

    def sized(self, numbers: int, counters: int) -> None:
        """Make room. (Not while a call is captured: every call runs once before.)"""
        if self.partial.numel() < numbers:
            self._outgrown.append(self.partial)
            self.partial = self.partial.new_empty(numbers)
        if self.counters.numel() < counters:
            self._outgrown.append(self.counters)
            self.counters = self.counters.new_zeros(counters)


class Products:
    """Products in one dtype; `eps`: of the norm; `work`: for programs that share a sum."""

    def __init__(self, device: torch.device, dtype: torch.dtype, eps: float, work: Workspace) -> None:
        from speculative.engine.fused import kernels  # needs Triton

        self._kernels, self.eps = kernels, eps
        self._shared = SHARED_BYTES
        if device.type == "cuda":
            properties: Any = torch.cuda.get_device_properties(device)
            self._shared = getattr(properties, "shared_memory_per_block_optin", SHARED_BYTES)
        self.work = work
        self.precision = "ieee" if dtype == torch.float32 else "tf32"
        self.overlap = device.type == "cuda" and torch.cuda.get_device_capability(device) >= OVERLAPPING

    @property
    def launch(self) -> dict[str, Any]:
        """Options of a kernel that overlaps with the one before."""
        return {"launch_pdl": True} if self.overlap else {}

    def __call__(
        self,
        x_MK: torch.Tensor,
        matrix: Matrix,
        norm: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
        gated: bool = False,
        tile: Tile | None = None,
    ) -> torch.Tensor:
        """(M, N): norm, matrix, bias, silu(first half) * second half where `gated`, sum with `add`."""
        tokens, inputs = x_MK.shape
        weight, bias = matrix
        outputs = weight.shape[0] // (2 if gated else 1)
        if tokens > FEW_TOKENS and tile is None:
            return self._of_many(x_MK, weight, bias, norm, add, gated)
        splits = norm is None and not gated
        tile = tile or tile_of(tokens, outputs, inputs, gated, splits, x_MK.element_size(), self._shared)
        y_MN = x_MK.new_empty((tokens, outputs))
        forms = {"NORM": norm is not None, "BIAS": bias is not None, "ADD": add is not None, "GATED": gated}
        tensors, sizes = (x_MK, weight, y_MN, norm, bias, add), (tokens, outputs, inputs, self.eps)
        if tile.rows:
            steps = -(-inputs // tile.inputs)
            self._kernels.product_of_rows[(-(-outputs // tile.outputs),)](
                *tensors,
                *sizes,
                **forms,
                BM=power_of_two(tokens),
                BN=tile.outputs,
                BK=tile.inputs,
                STEPS=steps,
                OVERLAP=self.overlap,
                num_warps=tile.warps,
                **self.launch,
            )
            return y_MN
        grid = (-(-outputs // tile.outputs), tile.split)
        if tile.split > 1:
            self.work.sized(tile.split * tokens * outputs, grid[0])
        self._kernels.product[grid](
            *tensors,
            self.work.partial,
            self.work.counters,
            *sizes,
            **forms,
            SPLIT=tile.split,
            BM=max(16, power_of_two(tokens)),
            BN=tile.outputs,
            BK=tile.inputs,
            EVEN=inputs % (tile.inputs * tile.split) == 0,
            PRECISION=self.precision,
            STAGES=tile.stages,
            OVERLAP=self.overlap,
            num_warps=tile.warps,
            **self.launch,
        )
        return y_MN

    def _of_many(
        self,
        x_MK: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: torch.Tensor | None,
        add: torch.Tensor | None,
        gated: bool,
    ) -> torch.Tensor:
        """By torch's products, which are bound by arithmetic here."""
        tokens, inputs = x_MK.shape
        if norm is not None:
            y_MK = torch.empty_like(x_MK)
            width = power_of_two(inputs)
            self._kernels.normed[(tokens,)](x_MK, norm, y_MK, inputs, self.eps, WIDTH=width, num_warps=8)
            x_MK = y_MK
        if add is not None and bias is None:
            return torch.addmm(add, x_MK, weight.T)
        y_MN = linear(x_MK, weight, bias)
        if gated:
            inner_MN = y_MN.new_empty((tokens, len(weight) // 2))
            grid = (tokens, -(-inner_MN.shape[1] // GATE_WIDTH))
            self._kernels.gate[grid](y_MN, inner_MN, inner_MN.shape[1], WIDTH=GATE_WIDTH)
            return inner_MN
        return y_MN if add is None else y_MN + add
