"""Carve a draft from the target: the layers that it keeps, and their weights."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from distill.models.quantized import full_weight, quantization_name, quantization_of, without_quantization
from speculative.errors import UserError


def layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return (name in the model, module list) of the layers: the first list as long as the config's depth; UserError without one."""
    depth = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return name, module
    raise UserError(f"{type(model).__name__}: no list of {depth} layers to carve or shard; use student.init: config")


def per_layer_fields(config: Any) -> dict[str, list[Any]]:
    """Return the fields of a text config that have one entry per layer, such as `layer_types`."""
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list)
        and len(value) == config.num_hidden_layers
        and not name.endswith(("_id", "_ids"))
        and name != "architectures"
    }


@contextmanager
def layers_only(model: PreTrainedModel, kept: Sequence[int]) -> Iterator[None]:
    """Inside, the model has only the kept layers, in that order, and computes without a cache like a draft carved from them; no copies."""
    name, layers = layer_list(model)
    parent = model.get_submodule(name.rpartition(".")[0])
    leaf = name.rpartition(".")[2]
    config = model.config.get_text_config()
    depth, fields = config.num_hidden_layers, per_layer_fields(config)
    chosen = [layers[index] for index in kept]
    indexed: list[tuple[Any, int, int]] = [
        (module, position, module.layer_idx)  # type: ignore[misc]
        for position, layer in enumerate(chosen)
        for module in layer.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
    ]
    try:
        setattr(parent, leaf, nn.ModuleList(chosen))
        config.num_hidden_layers = len(chosen)
        for field, values in fields.items():
            setattr(config, field, [values[index] for index in kept])
        for module, position, _ in indexed:
            module.layer_idx = position
        yield
    finally:
        setattr(parent, leaf, layers)
        config.num_hidden_layers = depth
        for field, values in fields.items():
            setattr(config, field, values)
        for module, _, before in indexed:
            module.layer_idx = before


def carve(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return a draft made of some of the target's layers, its embeddings, final norm and head; copied, float32.

    Raises UserError: a layer that the target does not have, the same layer twice, an architecture without a plain list of layers, only
    recurrent layers of a hybrid, or a multimodal model whose text model cannot be extracted.
    """
    if target.config.get_text_config(decoder=True) is not target.config:
        raise UserError(
            f"student.init: carved: {type(target).__name__} is multimodal, and transformers has no causal LM for its text model "
            "only; use student.init: pretrained or config"
        )
    depth = target.config.get_text_config().num_hidden_layers
    chosen = [layer + depth if layer < 0 else layer for layer in layers]
    if not chosen or any(not 0 <= layer < depth for layer in chosen):
        raise UserError(f"student.layers = {list(layers)}: the target has layers 0 to {depth - 1} (or -{depth} to -1)")
    if len(set(chosen)) != len(chosen):
        raise UserError(f"student.layers = {list(layers)}: a layer of the target appears twice; list each layer once")
    kinds = getattr(target.config, "layer_types", None) or []
    attention = [layer for layer, kind in enumerate(kinds) if "attention" in kind and kind != "linear_attention"]
    if attention and not set(attention) & set(chosen):
        raise UserError(
            f"student.layers = {list(layers)}: recurrent layers only, and {type(target).__name__} cannot decode without an "
            f"attention layer; take in one of {attention}"
        )
    with layers_only(target, chosen):
        config = copy.deepcopy(target.config)
        state = {key: full_weight(value).float() for key, value in target.state_dict().items()}
    without_quantization(config)
    return filled(
        config, state, target, f"student.init: carved: the target's weights are packed ({quantization_name(target.config)}), "
        "so no layer can be copied; carve from the unquantised model and give it as student.path, or use student.init: config"
        if quantization_of(target.config) is not None else f"student.init: carved: {type(target).__name__} cannot be carved",
    )  # fmt: skip


def filled(config: Any, state: dict[str, Tensor], source: PreTrainedModel, refusal: str) -> PreTrainedModel:
    """Return a float32 model of this config with these weights and the generation config of `source`.

    Raises UserError: the config needs other weights; the message is `refusal` and the first of them.
    """
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    expected = {(key, value.shape) for key, value in made.state_dict().items()}
    if other := sorted(key for key, _ in expected ^ {(key, value.shape) for key, value in state.items()}):
        raise UserError(f"{refusal} ({other[0]} does not fit)")
    made.load_state_dict(state)
    made.generation_config = copy.deepcopy(source.generation_config)
    return made.eval()
