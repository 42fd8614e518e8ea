"""Weights in pieces over the ranks: the draft under FSDP2 or DeepSpeed ZeRO, the target's layers under torch's `fully_shard`.

Accelerate drives the engines; this file holds what it leaves open, so that the loop's step is the same exact step under each:
which modules become units, in which arithmetic, when gradients are exchanged and weights updated, how the whole model is put
together again, and a state of many ranks read by one.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator, PartialState, init_empty_weights
from accelerate.checkpointing import load_custom_state
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    broadcast_object_list,
    load_fsdp_model,
    load_fsdp_optimizer,
)
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from distill.config.sections import SPIKE_FACTOR, OptimConfig, TrainConfig
from distill.models.layers import layer_list
from distill.models.quantized import quantization_of
from distill.models.target import Target
from distill.training.module import DraftModule
from speculative.errors import UserError

PLAIN = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
ZERO_STATE = "pytorch_model"  # the folder of DeepSpeed's
SHARDED_STATE = "pytorch_model_fsdp_0"  # the folder that accelerate's sharded state has in place of a weights file


def require_deepspeed() -> None:
    """Before an `Accelerator` is made.

    Raises:
        UserError: the launcher asks for DeepSpeed and it is not installed.
    """
    if asked_for("DEEPSPEED") and importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            "the launcher asks for DeepSpeed: `pip install deepspeed`, or use configs/accelerate/fsdp2.yaml"
        )


def asked_for(engine: str) -> bool:
    """Whether the launcher's settings name an engine: FSDP or DEEPSPEED."""
    return os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true"


def spike_factor(accelerator: Accelerator, optim: OptimConfig) -> float:
    """`optim.spike_factor`, or what it is by default: DeepSpeed cannot skip an update."""
    if optim.spike_factor is not None:
        return optim.spike_factor
    return 0.0 if accelerator.distributed_type is DistributedType.DEEPSPEED else SPIKE_FACTOR


def settled_precision(wanted: str) -> tuple[str, str | None]:
    """(mixed precision for Accelerate, a line where the launcher asks for another one) of `train.mixed_precision`.

    auto: bf16 on a GPU that has it, or where the launcher says so.
    """
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    on_gpu = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    precision = wanted if wanted != "auto" else "bf16" if on_gpu or asked == "bf16" else "no"
    if asked in ("no", precision):
        return precision, None
    return (
        precision,
        f"the launcher asks for mixed_precision {asked}; train.mixed_precision: {wanted} decides: {precision}",
    )


def settle_launcher(accelerator: Accelerator, optim: OptimConfig, train: TrainConfig) -> None:
    """Accepts what the launcher asks for, or says what to change.

    Accelerate turns FSDP and DeepSpeed on for accelerators only and would train plainly on CPU ranks without a word; both run
    there too, so they are turned on here.

    Raises:
        UserError: an engine that is not known here, or a setting with which it would train something else than was asked for.
    """
    kind = accelerator.distributed_type
    if kind not in (*PLAIN, DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise UserError(f"the launcher asks for {kind.value}; use one of the files in configs/accelerate/")
    engine = next((name for name in ("FSDP", "DEEPSPEED") if asked_for(name)), None)
    if engine is None or (accelerator.num_processes == 1 and kind in PLAIN):
        return
    if optim.name != "adamw":
        raise UserError(
            f"optim.name: {optim.name} needs whole matrices, which {engine} cuts; use adamw, or configs/accelerate/ddp.yaml"
        )
    if optim.ema:
        raise UserError(
            f"optim.ema: the average needs whole weights, which {engine} cuts; set it to 0, or use configs/accelerate/ddp.yaml"
        )
    if engine == "FSDP":
        _settle_fsdp(accelerator)
    else:
        _settle_deepspeed(accelerator, optim, train)


def _turn_on(accelerator: Accelerator, kind: DistributedType) -> None:
    # Both: a later AcceleratorState() copies the process's kind over its own.
    accelerator.state.distributed_type = PartialState().distributed_type = kind


def _settle_fsdp(accelerator: Accelerator) -> None:
    plugin = getattr(accelerator.state, "fsdp_plugin", None) or FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        raise UserError("the launcher asks for FSDP 1; set fsdp_version: 2 (configs/accelerate/fsdp2.yaml)")
    if plugin.cpu_ram_efficient_loading:
        raise UserError(
            "fsdp_cpu_ram_efficient_loading: true leaves the target without weights on all ranks but one; set it to false"
        )
    if plugin.activation_checkpointing:
        raise UserError(
            "fsdp_activation_checkpointing: set it to false and student.gradient_checkpointing: true in the run's config"
        )
    # Accelerate's own policy rounds the loss and the reduced gradients to bfloat16. Here weights and sums stay float32 and
    # autocast does the rest, so that a sharded step is the same step.
    plugin.mixed_precision_policy = MixedPrecisionPolicy()
    accelerator.state.fsdp_plugin = plugin
    _turn_on(accelerator, DistributedType.FSDP)


def _settle_deepspeed(accelerator: Accelerator, optim: OptimConfig, train: TrainConfig) -> None:
    plugin = accelerator.state.deepspeed_plugins if accelerator.distributed_type is DistributedType.DEEPSPEED else None
    if isinstance(plugin, dict):
        plugin = next(iter(plugin.values()))
    if plugin is None:
        import deepspeed
        from accelerate.utils import DeepSpeedPlugin

        plugin = DeepSpeedPlugin()
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        plugin.set_mixed_precision("no")
        plugin.select(_from_accelerator_state=True)
        accelerator.state.deepspeed_plugins = {"default": plugin}
    settings = plugin.deepspeed_config
    stage = settings["zero_optimization"]["stage"]
    if stage not in (2, 3):
        raise UserError(f"zero_stage: {stage}; use 2 or 3 (configs/accelerate/), or ddp.yaml")
    if optim.spike_factor:
        raise UserError(
            "optim.spike_factor: DeepSpeed cannot skip an update; set it to null or 0, or use configs/accelerate/fsdp2.yaml"
        )
    for section in ("offload_optimizer", "offload_param"):
        if settings["zero_optimization"].get(section, {}).get("device", "none") != "none":
            raise UserError(
                f"{section}_device: not supported here; set it to none, or use configs/accelerate/fsdp2.yaml"
            )
    # The window is ours (see `micro_step`), so is the denominator; weights stay float32 and autocast does the rest, as without.
    settings["gradient_accumulation_steps"], settings["train_micro_batch_size_per_gpu"] = (
        1,
        train.micro_batch_size or 1,  # chosen later; DeepSpeed only prints it
    )
    settings["gradient_clipping"] = optim.max_grad_norm
    settings["bf16"] = settings["fp16"] = {"enabled": False}
    if settled_precision(train.mixed_precision)[0] == "bf16":
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    unset_hf_deepspeed_config()
    _turn_on(accelerator, DistributedType.DEEPSPEED)


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether no rank has all of the draft's weights between two steps."""
    return accelerator.is_fsdp2 or _zero_stage(accelerator) == 3


def _zero_stage(accelerator: Accelerator) -> int:
    if accelerator.distributed_type is not DistributedType.DEEPSPEED:
        return 0
    return int(accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"])


def prepare(
    accelerator: Accelerator, module: DraftModule, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[Any, list[Any]]:
    """(wrapped module, wrapped optimizers).

    Under FSDP2 each decoder layer is a unit; embeddings, norm and head are one more, the root's: whole from the start of the
    forward to the end of the backward, so the loss may use the head's weight outside the head's own forward. ZeRO-3 is told so.
    """
    if accelerator.is_fsdp2:
        module._no_split_modules = sorted({type(layer).__name__ for layer in layer_list(module.inner)[1]})  # type: ignore[assignment]
    wrapped, *prepared = accelerator.prepare(module, *optimizers)
    # Else transformers would cut every model that is loaded from here on under ZeRO-3: the target, and what is judged.
    unset_hf_deepspeed_config()
    if _zero_stage(accelerator) == 3:
        _keep_head_whole(module)
    return wrapped, prepared


def _keep_head_whole(module: DraftModule) -> None:
    """Under ZeRO-3 the head is gathered with the module that makes the loss, not with each of its own calls.

    Those are one a chunk, so their number differs from rank to rank, which ZeRO-3 takes for a fault; and the loss uses the
    weight outside of them.
    """
    import deepspeed

    projection = module.inner.get_output_embeddings()
    for parameter in projection.parameters():
        deepspeed.zero.register_external_parameter(module, parameter)
    for hooks in (projection._forward_pre_hooks, projection._forward_hooks, projection._backward_hooks):
        hooks.clear()


@contextlib.contextmanager
def micro_step(accelerator: Accelerator, wrapped: Any, last: bool) -> Iterator[None]:
    """Around forward and backward of one micro-batch: ranks exchange gradients behind the last of a window only."""
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        wrapped.set_gradient_accumulation_boundary(last)
        yield
        return
    with contextlib.nullcontext() if last else accelerator.no_sync(wrapped):
        yield


def autocast(accelerator: Accelerator) -> Any:
    """Around the draft's forward: DDP's wrapper and DeepSpeed's engine cast by themselves, FSDP2's unit does not."""
    return accelerator.autocast() if accelerator.is_fsdp2 else contextlib.nullcontext()


def backward(accelerator: Accelerator, wrapped: Any, loss: Tensor) -> None:
    """The loss's gradients, and nothing else: Accelerate's own would let DeepSpeed update the weights here, unseen."""
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        wrapped.backward(loss)
    else:
        accelerator.backward(loss)


def clip_gradients(accelerator: Accelerator, wrapped: Any, max_norm: float) -> float:
    """Norm of the whole gradient before clipping it to ``max_norm``. All ranks call it.

    DeepSpeed clips in its own step, and is asked for the gradient a parameter at a time.
    """
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        from deepspeed.utils import safe_get_full_grad

        gradients = (safe_get_full_grad(weight) for weight in wrapped.parameters() if weight.requires_grad)
        squares = [gradient.double().square().sum() for gradient in gradients if gradient is not None]
        return float(torch.stack(squares).sum().sqrt())
    return float(whole(accelerator.clip_grad_norm_(wrapped.parameters(), max_norm)))


def update(accelerator: Accelerator, wrapped: Any, optimizers: Sequence[Any]) -> None:
    """One step of the optimizers."""
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        wrapped.step()
    for optimizer in optimizers:
        optimizer.step()  # under DeepSpeed it does nothing


def whole(tensor: Tensor) -> Tensor:
    """A tensor put together from the ranks' pieces (all ranks call it); any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_module(
    accelerator: Accelerator, wrapped: Any, module: DraftModule, everywhere: bool = False
) -> DraftModule | None:
    """The draft with all of its weights on the main process (or ``everywhere``), None elsewhere. All ranks call it.

    Without sharding that is ``module`` itself; with it a copy, on the process's device.
    """
    wanted = everywhere or accelerator.is_main_process
    if not is_sharded(accelerator):
        return module if wanted else None
    if accelerator.is_fsdp2:
        options = StateDictOptions(full_state_dict=True, cpu_offload=not everywhere)
        state = get_model_state_dict(wrapped, options=options)
    else:
        state = _gathered_state(module, wanted)
    return _rebuilt(module, state).to(accelerator.device).eval() if wanted else None


def _gathered_state(module: DraftModule, wanted: bool) -> dict[str, Any]:
    """The module's state under ZeRO-3, on the CPU of the ranks that want it."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()} if wanted else {}


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
            # What peft keeps of rows that train by themselves (a mask token's) was copied before there were weights.
            layer.trainable_tokens_original[name] = layer.get_base_layer().weight.data[rows].clone()
    return DraftModule(fresh, module.objective)


def whole_draft(accelerator: Accelerator, wrapped: Any, module: DraftModule) -> PreTrainedModel:
    """The draft as rollouts need it: an ordinary model of the present weights on every rank, adapters merged. All ranks ask together."""
    full = full_module(accelerator, wrapped, module, everywhere=True)
    assert full is not None
    return full.exported()


def load_state(accelerator: Accelerator, wrapped: Any, optimizers: Sequence[Any], folder: Path) -> None:
    """`accelerator.load_state` for any number of ranks, also for one that reads what FSDP2 ranks wrote.

    Weights, optimizer and schedule do not depend on the number of ranks. Random numbers (dropout) do: a rank without a state
    of its own goes on from the run's seed.

    Raises:
        UserError: written under another kind of launcher (FSDP2's one plain process may read), or by DeepSpeed ranks of another
            number.
    """
    if _zero_stage(accelerator):
        ranks = len(list(folder.glob("random_states_*.pkl")))
        if not (folder / ZERO_STATE).is_dir():
            raise UserError(f"{folder}: written without DeepSpeed; go on with the same launcher settings")
        if ranks != accelerator.num_processes:
            raise UserError(
                f"{folder}: DeepSpeed's state of {ranks} ranks; go on with as many (FSDP2's is read by any number)"
            )
        accelerator.load_state(str(folder))
        return
    if (folder / ZERO_STATE).is_dir():
        raise UserError(f"{folder}: written under DeepSpeed; go on with the same launcher settings")
    sharded = (folder / SHARDED_STATE).exists()
    if sharded and not accelerator.is_fsdp2:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
        plugin.set_state_dict_type("SHARDED_STATE_DICT")
        load_fsdp_model(plugin, accelerator, wrapped, str(folder))
        for index, optimizer in enumerate(optimizers):
            load_fsdp_optimizer(plugin, accelerator, optimizer, wrapped, str(folder), index)
        for index, custom in enumerate(accelerator._custom_objects):
            load_custom_state(custom, str(folder), index)
        return
    if accelerator.is_fsdp2 and not sharded:
        raise UserError(
            f"{folder}: written by a run without FSDP2; go on with the same launcher settings (any number of ranks)"
        )
    accelerator.load_state(str(folder))


def sharded_teacher(accelerator: Accelerator, target: Target) -> PreTrainedModel:
    """The target with each decoder layer cut over the ranks; embeddings and head are whole on each. All ranks call it.

    The main process alone reads the weights, into its own memory, and hands out the pieces: no device ever holds the whole, and
    whoever wants that (to judge live) loads it when the pieces are gone. Every forward needs all ranks at once, the same number
    of times each: as in training.

    Raises:
        UserError: an architecture without a list of layers; quantised weights.
    """
    if quantization_of(target.side.config) is not None:
        raise UserError(
            "target.shard: quantised weights cannot be cut over ranks; use target.device_map, or a stored signal"
        )
    target.release()
    whole = target.host_model() if accelerator.is_main_process else None
    kept = [None] if whole is None else [(whole.config, whole.dtype)]
    config, dtype = broadcast_object_list(kept)[0]
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    buffers = {
        name: buffer.to(accelerator.device) for name, buffer in model.named_buffers()
    }  # rotary frequencies: not saved
    for layer in layer_list(model)[1]:
        fully_shard(layer, reshard_after_forward=True)
    model.to_empty(device=accelerator.device)
    model.tie_weights()
    for name, buffer in buffers.items():
        parent, _, leaf = name.rpartition(".")
        model.get_submodule(parent)._buffers[leaf] = buffer
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, {} if whole is None else whole.state_dict(), options=options)
    return model.requires_grad_(False).eval()
