"""Private state of libraries that a training step needs, each with the version that was read and the change that would end it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator, PartialState
from accelerate.checkpointing import load_custom_state
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, diff
from transformers import masking_utils


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


def turn_on_fsdp(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Turn on FSDP2 on CPU ranks too, where it runs; accelerate 1.15 ignores its settings there, until its state reads them on a CPU."""
    accelerator.state.fsdp_plugin = plugin
    # Set both: a later AcceleratorState() copies the process's type over its own.
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP


def load_registered(accelerator: Accelerator, folder: Path) -> None:
    """Load schedules and other registered objects alone; accelerate 1.15 loads them only together with weights of its own arrangement."""
    for index, registered in enumerate(accelerator._custom_objects):
        load_custom_state(registered, str(folder), index)
