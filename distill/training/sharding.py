"""Weights sharded over ranks: the draft under FSDP2, the target's layers under torch's `fully_shard`.

Accelerate runs FSDP2. This file adds what Accelerate leaves open, so that a step gives the same result as without sharding: which
modules become units, the precision, how the whole model is gathered, and how one rank reads a state written by many.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator, init_empty_weights
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    load_fsdp_model,
    load_fsdp_optimizer,
)
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from distill.config.sections import OptimConfig
from distill.models.carving.layers import layer_list
from distill.models.library_state import cpu_has_bf16, load_registered, turn_on_fsdp
from distill.models.quantized import quantization_of
from distill.models.target import Target
from distill.run.run import Run
from distill.training.module import DraftModule
from speculative.errors import UserError

PLAIN = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
SHARDED_STATE = "pytorch_model_fsdp_0"  # accelerate writes this folder for a sharded state, instead of a weights file


def settled_precision(wanted: str) -> tuple[str, str | None]:
    """(mixed precision for Accelerate, a message if the launcher asks for another one) for `train.mixed_precision`.

    auto: bf16 on a GPU that supports it, or if the launcher asks for it. native: also on a CPU whose bfloat16 products are
    faster than float32 ones; elsewhere they take up to several times as long.
    """
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if wanted == "native":
        has_bf16 |= cpu_has_bf16()
    precision = wanted if wanted in ("no", "bf16") else "bf16" if has_bf16 or launcher == "bf16" else "no"
    said = f"the launcher asks for mixed_precision {launcher}, but train.mixed_precision is {wanted}; using {precision}"
    return precision, None if launcher in ("no", precision) else said


def launched_plugin() -> FullyShardedDataParallelPlugin | None:
    """The launcher's FSDP2 settings; None if it does not ask for FSDP; UserError for a setting that would change what is trained."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    plugin = FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        raise UserError("the launcher asks for FSDP 1; set fsdp_version: 2 (configs/accelerate/fsdp2.yaml)")
    if plugin.cpu_ram_efficient_loading:
        fix = "leaves the target without weights on all ranks but one; set it to false"
        raise UserError(f"fsdp_cpu_ram_efficient_loading: true {fix}")
    if plugin.activation_checkpointing:
        fix = "set it to false and student.gradient_checkpointing: true in the run's config"
        raise UserError(f"fsdp_activation_checkpointing: {fix}")
    # Accelerate's own policy rounds the loss and the reduced gradients to bfloat16. Here weights and sums stay float32 and
    # autocast sets the precision of products, so a sharded step gives the same result.
    plugin.mixed_precision_policy = MixedPrecisionPolicy()
    return plugin


def settle_launcher(
    accelerator: Accelerator, optim: OptimConfig, plugin: FullyShardedDataParallelPlugin | None
) -> None:
    """Check the launcher's settings; UserError for a launch or optimizer that does not work. ``plugin``: from `launched_plugin`."""
    kind = accelerator.distributed_type
    if kind not in (*PLAIN, DistributedType.FSDP):
        raise UserError(f"the launcher asks for {kind.value}; use one of the files in configs/accelerate/")
    if plugin is None or (accelerator.num_processes == 1 and kind in PLAIN):
        return
    if optim.name != "adamw":
        raise UserError(
            f"optim.name: {optim.name} needs whole matrices, which FSDP splits; use adamw, or configs/accelerate/ddp.yaml"
        )
    turn_on_fsdp(accelerator, plugin)


def prepare(
    accelerator: Accelerator, module: DraftModule, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[Any, list[Any]]:
    """Wrap module and optimizers with Accelerate: (wrapped module, wrapped optimizers).

    Under FSDP2 each decoder layer is a unit. Embeddings, norm and head form the root unit, which stays gathered from the start of
    the forward to the end of the backward, so the loss can use the head's weight outside the head's forward.
    """
    if accelerator.is_fsdp2:
        plugin = accelerator.state.fsdp_plugin
        layers = sorted({type(layer).__name__ for layer in layer_list(module.inner)[1]})
        plugin.transformer_cls_names_to_wrap = plugin.transformer_cls_names_to_wrap or layers
    wrapped, *prepared = accelerator.prepare(module, *optimizers)
    return wrapped, prepared


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor (all ranks call it); return any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_module(
    accelerator: Accelerator, wrapped: Any, module: DraftModule, everywhere: bool = False
) -> DraftModule | None:
    """The draft with all of its weights on the main process (or on every rank if ``everywhere``), None elsewhere. All ranks call it.

    Without sharding it is ``module`` itself, with sharding a copy on the process's device.
    """
    wanted = everywhere or accelerator.is_main_process
    if not accelerator.is_fsdp2:
        return module if wanted else None
    options = StateDictOptions(full_state_dict=True, cpu_offload=not everywhere)
    state = get_model_state_dict(wrapped, options=options)
    return _rebuilt(module, state).to(accelerator.device).eval() if wanted else None


def _rebuilt(module: DraftModule, state: dict[str, Any]) -> DraftModule:
    inner, student = module.inner, cast(Any, module.student)
    with init_empty_weights(include_buffers=False):
        fresh: Any = AutoModelForCausalLM.from_config(inner.config, dtype=inner.dtype)
        fresh.generation_config = inner.generation_config
        if hasattr(student, "peft_config"):
            from peft import get_peft_model

            fresh = get_peft_model(fresh, student.peft_config[student.active_adapter])
    fresh.load_state_dict({name.removeprefix("student."): value for name, value in state.items()}, assign=True)
    (fresh.get_base_model() if hasattr(fresh, "get_base_model") else fresh).tie_weights()
    for layer in fresh.modules():
        for name, rows in getattr(layer, "token_indices", {}).items():
            # peft copied its separately trained rows (the mask token's) before the weights were loaded.
            layer.trainable_tokens_original[name] = layer.get_base_layer().weight.data[rows].clone()
    return DraftModule(fresh, module.objective)


def load_state(accelerator: Accelerator, wrapped: Any, optimizers: Sequence[Any], folder: Path) -> None:
    """`accelerator.load_state` for any number of ranks, including one rank that reads a state written by FSDP2 ranks.

    Weights, optimizer and schedule do not depend on the number of ranks. Random numbers (dropout) do: a rank without a saved
    state starts from the run's seed.

    Raises UserError: FSDP2 ranks read a state that was written without FSDP2.
    """
    sharded = (folder / SHARDED_STATE).exists()
    if sharded and not accelerator.is_fsdp2:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
        plugin.set_state_dict_type("SHARDED_STATE_DICT")
        load_fsdp_model(plugin, accelerator, wrapped, str(folder))
        for index, optimizer in enumerate(optimizers):
            load_fsdp_optimizer(plugin, accelerator, optimizer, wrapped, str(folder), index)
        return load_registered(accelerator, folder)
    if accelerator.is_fsdp2 and not sharded:
        raise UserError(f"{folder}: written without FSDP2; continue with those launcher settings (any number of ranks)")
    accelerator.load_state(str(folder))


def shards_of(run: Run, target: Target) -> PreTrainedModel:
    """The released target with each decoder layer sharded over the ranks; every rank has the whole embeddings and head. All ranks call it.

    Only the main process reads the weights, into host memory, and sends each rank its shards, so no device holds the whole target.
    All ranks must run the same number of forwards together.

    Raises UserError: an architecture without a list of layers; quantised weights.
    """
    if quantization_of(target.side.config) is not None:
        raise UserError("target.shard: quantised weights cannot be split; use target.device_map or a stored signal")
    with target.loaded(on_host=True) if run.main else nullcontext() as whole:
        return _shards(run, whole)


def _shards(run: Run, whole: PreTrainedModel | None) -> PreTrainedModel:
    def kind() -> tuple[Any, torch.dtype]:
        assert whole is not None
        return whole.config, whole.dtype

    config, dtype = run.seen(kind)
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    buffers = {name: buffer.to(run.device) for name, buffer in model.named_buffers()}  # rotary frequencies: not saved
    for layer in layer_list(model)[1]:
        fully_shard(layer, reshard_after_forward=True)
    model.to_empty(device=run.device)
    model.tie_weights()
    for name, buffer in buffers.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, buffer)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, {} if whole is None else whole.state_dict(), options=options)
    return model.requires_grad_(False).eval()
