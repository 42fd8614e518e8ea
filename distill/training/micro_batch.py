"""Number of sequences in one forward: `train.micro_batch_size`, or the largest that fits in memory in a trial step."""

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from torch import nn

from data.batches.collate import Batch, Example, collate
from data.signals.signal import DenseSignal
from distill.config.sections import OptimConfig, TrainConfig
from distill.loss.offsets import drawn_depths
from distill.models.heads import SplitModel
from distill.training.module import DraftModule
from distill.training.teacher import Teacher
from speculative.errors import UserError
from speculative.progress import phase

# Sizes without a trial step: on a CPU, which swaps instead of failing, and under FSDP2, where a rank holds only a shard of the draft.
ON_CPU, SHARDED = 32, 4
# Share of the device's free memory. The rest is for fragmentation, the judge's caches and other programs.
SHARE = 0.9
# Float32 numbers per trainable weight besides weight and gradient: AdamW's moments; the copy of the gradient that ranks exchange.
MOMENTS, EXCHANGE = 2, 1


def check_batches(train: TrainConfig, ranks: int) -> None:
    """Raise UserError if the sequences of a step cannot be divided evenly among ranks and micro-batches."""
    if train.packing is not None:
        return  # With packing a micro-batch is a number of rows, each with any number of sequences.
    if train.micro_batch_size is None and train.batch_size % ranks:
        raise UserError(
            f"train.batch_size = {train.batch_size} is not divisible by {ranks} ranks; "
            f"set it to {-(-train.batch_size // ranks) * ranks}"
        )
    if train.micro_batch_size is not None and train.batch_size % (train.micro_batch_size * ranks):
        raise UserError(
            f"train.batch_size = {train.batch_size} is not a multiple of micro_batch_size x ranks = "
            f"{train.micro_batch_size} x {ranks}; remove train.micro_batch_size, and it is chosen automatically"
        )


def state_bytes(module: nn.Module, optim: OptimConfig, ranks: int) -> float:
    """What training needs beside weights, gradients and activations: the optimizer's moments (an upper bound), what ranks exchange."""
    per_weight = 4 * ((MOMENTS if optim.name != "adamw8bit" else 0.5) + (EXCHANGE if ranks > 1 else 0))
    return per_weight * sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def sizes_of(train: TrainConfig, ranks: int) -> list[int]:
    """Micro-batch sizes that divide a rank's share of a step, ascending."""
    share = max(1, train.batch_size // ranks)
    return [size for size in range(1, share + 1) if share % size == 0]


def chosen_micro_batch(
    train: TrainConfig,
    optim: OptimConfig,
    accelerator: Accelerator,
    module: DraftModule,
    teacher: Teacher | None,
    longest: int,
) -> int:
    """Choose the number of sequences of one forward, the same on every rank. All ranks call it before the first update.

    teacher: the target if it runs in this process during training. longest: tokens of the longest row.
    """
    if train.micro_batch_size is not None:
        return train.micro_batch_size
    device, ranks = accelerator.device, accelerator.num_processes
    sizes = sizes_of(train, ranks)
    if device.type != "cuda" or accelerator.is_fsdp2:
        most = SHARDED if device.type == "cuda" else ON_CPU
        return max(size for size in sizes if size <= most)
    module.to(device)
    later = state_bytes(module, optim, ranks)
    torch.cuda.empty_cache()
    budget = SHARE * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_allocated(device)) - later

    @find_executable_batch_size(starting_batch_size=sizes.pop(), reduce_batch_size_fn=lambda: sizes.pop())
    def fitting(size: int) -> int:
        if not sizes:  # no smaller size is left: the first step shows whether it fits
            return size
        torch.cuda.reset_peak_memory_stats(device)
        try:
            trial_step(accelerator, module, teacher, trial_batch(size, longest, module))
            if torch.cuda.max_memory_allocated(device) > budget:
                raise torch.OutOfMemoryError("what else is needed would be out of memory.")
        finally:
            module.zero_grad(set_to_none=True)
        return size

    with phase("trying micro-batches"):
        found = fitting()
    # Free memory can differ between ranks. All have the same list of sizes, so the smallest choice is valid for every rank.
    agreed = int(accelerator.gather(torch.tensor([found], device=device)).min())
    accelerator.print(f"micro-batch: {agreed} sequences of up to {longest:,} tokens (train.micro_batch_size)")
    return agreed


def trial_batch(size: int, longest: int, module: DraftModule) -> Batch:
    """A batch of `size` rows of the maximum length where every token but the first is learnt: the worst case for memory."""
    ids, learnt = np.arange(longest) % module.inner.config.get_text_config().vocab_size, np.arange(longest) > 0
    survival, depths = module.survival, None
    if survival is not None:
        depths = drawn_depths(np.random.default_rng(0), learnt, len(survival.kept_J), survival.retain)
    return collate([Example(ids, learnt, depths=depths)] * size, 0)


def trial_step(accelerator: Accelerator, module: DraftModule, teacher: Teacher | None, batch: Batch) -> None:
    """Run forward and backward on this rank only. Weights do not change; the gradients stay for the caller to clear."""
    batch = batch.to(accelerator.device)
    # Without a target the draft's own dense logits take its place; a stored signal needs less memory.
    split = teacher.split if teacher is not None else SplitModel(module.inner)
    with torch.no_grad():
        hidden_BTD = split.hidden(batch.input_ids_BT)
    signal = DenseSignal(hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[batch.rows_R], split.head)
    module.train()
    try:
        with accelerator.autocast():
            loss, _, _ = module(batch, signal)
        loss.backward()
    finally:  # also if memory ran out
        if module.survival is not None:
            module.survival.forget()
