"""The architectures that compiled code and fused kernels compute, one row each: where a model keeps the parts of a plain decoder.

A plain decoder has an embedding, one rotary table, layers of attention and gated MLP, a norm and a head, and scales nothing in between.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from speculative.engine.survey import facts_of, survey
from speculative.engine.windows import attention_windows


@dataclass(frozen=True)
class Architecture:
    """Names of attributes: first those of the model without its head, then those of a layer."""

    layers: str = "layers"
    rotary: str = "rotary_emb"
    norm: str = "norm"
    epsilon: str = "norm.variance_epsilon"
    attention_norm: str = "input_layernorm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    query_norm: str = ""  # of each head; "" for none
    key_norm: str = ""
    out: str = "self_attn.o_proj"
    head_width: str = "self_attn.head_dim"
    scaling: str = "self_attn.scaling"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    activation: str = "hidden_act"  # a key of the config


# By the `model_type` of a config.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "qwen2": Architecture(),
    "qwen3": Architecture(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
}

# An adapter or a parametrisation is a module of another package that looks like the module it replaced.
OWN_CALLS = ("torch.nn.modules.", "transformers.models.", "transformers.activations")


class Unfit(Exception):
    """The model has a part that our code does not support."""


class LayerParts(NamedTuple):
    """Modules of a layer, the weights of its norms, and the positions that a token sees, 0 for all."""

    norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    window: int
    query: nn.Module
    key: nn.Module
    value: nn.Module
    out: nn.Module
    gate: nn.Module
    up: nn.Module
    down: nn.Module


class Parts:
    """Parts and sizes of a plain decoder. Raises Unfit for an unsupported size or activation, AttributeError for names
    of another release.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        row, body, config = _row(model), model.base_model, model.config
        self.width: int = config.hidden_size
        self.embedding: Any = model.get_input_embeddings()
        self.head: Any = model.get_output_embeddings()
        self.norm: torch.Tensor = attrgetter(row.norm)(body).weight
        self.epsilon: float = attrgetter(row.epsilon)(body)
        layers = list(attrgetter(row.layers)(body))[: config.num_hidden_layers]
        self.head_width: int = attrgetter(row.head_width)(layers[0])
        self.scaling: float = attrgetter(row.scaling)(layers[0])
        activation = getattr(config, row.activation)
        if activation not in ("silu", "swish") or self.head_width % 2:
            raise Unfit(f"{activation}, heads of {self.head_width}")
        # The cached answer may be of a deeper model.
        windows = attention_windows(model)[: len(layers)]
        self.layers = [_layer(row, layer, window) for layer, window in zip(layers, windows, strict=True)]


def _layer(row: Architecture, layer: Any, window: int | None) -> LayerParts:
    def norm(name: str) -> Any:
        return attrgetter(name)(layer).weight if name else None

    modules = attrgetter(row.query, row.key, row.value, row.out, row.gate, row.up, row.down)(layer)
    norms = norm(row.attention_norm), norm(row.query_norm), norm(row.key_norm), norm(row.mlp_norm)
    return LayerParts(*norms, window or 0, *modules)


def rotary_of(model: PreTrainedModel) -> Any:
    """The module that makes cosines and sines of a plain decoder's positions."""
    return attrgetter(_row(model).rotary)(model.base_model)


def _row(model: PreTrainedModel) -> Architecture:
    return ARCHITECTURES[model.config.model_type]


def is_plain(model: PreTrainedModel) -> bool:
    """Whether the model is of a known architecture, without hooks, replaced parts or autocast."""
    # A wrapper (peft, a compiled model) has the config of its model but does more.
    both = type(model), type(model.base_model)
    of_transformers = all(kind.__module__.startswith("transformers.models.") for kind in both)
    if not of_transformers or model.config.model_type not in ARCHITECTURES:
        return False
    if torch.is_autocast_enabled(model.device.type):
        return False
    facts = facts_of(model)
    if "plain" not in facts:
        facts["plain"] = all(
            type(module).__module__.startswith(OWN_CALLS) or hasattr(module, "values")
            for module in survey(model).modules
        )
    return facts["plain"] and not survey(model).listened_to
