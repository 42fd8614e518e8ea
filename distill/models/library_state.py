"""Private state of libraries that this package uses, each with the version that was read and the change that would end it."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.checkpointing import load_custom_state
from accelerate.hooks import add_hook_to_module
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, cpu, diff
from transformers import masking_utils, modeling_gguf_pytorch_utils
from transformers.utils.logging import set_tqdm_hook

from speculative.progress import each

PROCESSOR = Path("/proc/cpuinfo")  # Linux's


def _packed_rows(position_ids: Tensor) -> Tensor:
    """Return (B, T): for each position the index of its sequence within the row."""
    before_B1 = position_ids[:, :1] - 1
    return (diff(position_ids, prepend=before_B1) != 1).cumsum(-1)


@contextmanager
def packing_known(packed: bool) -> Iterator[None]:
    """Tell transformers whether rows hold several sequences; it would otherwise wait for the device in every forward pass.

    transformers 5.23 finds that out itself since its pull request 39194, until its masks take an argument for it.
    """
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _packed_rows if packed else lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def loops_as_phases() -> None:
    """Show what transformers counts while it loads or saves weights as phases.

    transformers 5.23 has a hook for its own bars, and draws another kind for GGUF files, until that loop has its own kind too.
    """
    set_tqdm_hook(lambda make, args, options: _looped(*args, **options) if args else make(**options))
    modeling_gguf_pytorch_utils.tqdm = _looped


def _looped(items: Iterable[Any], *, desc: str = "", **_: Any) -> Iterator[Any]:
    return each(items, desc.rstrip(".").lower() or "weights")


def keep_gguf_readers() -> None:
    """Read a GGUF file once; until transformers shares a reader: 5.23 lists the vocabulary for the config, the weights and their names."""
    with suppress(ImportError):  # transformers says what is missing.
        import gguf

        if isinstance(make := gguf.GGUFReader, type):
            read = lru_cache(maxsize=2)(lambda path, changed: make(path))
            vars(gguf)["GGUFReader"] = lambda path: read(os.fspath(path), os.stat(path).st_mtime_ns)


def turn_on_fsdp(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Turn on FSDP2 on CPU ranks too, where it runs; accelerate 1.15 ignores its settings there, until its state reads them on a CPU."""
    accelerator.state.fsdp_plugin = plugin
    # Set both: a later AcceleratorState() copies the process's type over its own.
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP


def load_registered(accelerator: Accelerator, folder: Path) -> None:
    """Load schedules and other registered objects alone; accelerate 1.15 loads them only together with weights of its own arrangement."""
    for index, registered in enumerate(accelerator._custom_objects):
        load_custom_state(registered, str(folder), index)


def spread_alike(model: Any, other: Any) -> None:
    """Spread a model over devices as another one whose modules it shares; accelerate 1.15 has no way to ask for the hook that it gave."""
    if hasattr(other, "_hf_hook"):
        add_hook_to_module(model, other._hf_hook)
        model.hf_device_map = other.hf_device_map


def cpu_has_bf16() -> bool:
    """Whether bfloat16 products are faster than float32 ones; `torch.cpu.get_capabilities`, public in torch 2.13, ends half of it.

    AVX-512's instructions halve the time on AMD's processors (Zen 4: 400 against 180 GFLOP/s); Intel's without AMX lose (174 against 300).
    """
    amd = PROCESSOR.is_file() and "AuthenticAMD" in PROCESSOR.read_text()
    return cpu._is_amx_tile_supported() or (amd and cpu._is_avx512_bf16_supported())
