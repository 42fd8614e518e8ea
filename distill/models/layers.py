"""A model's list of layers, and what its config says of each."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from speculative.errors import UserError


def layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """(name in the model, list) of the layers: the first list as long as the config says the model is deep.

    Raises:
        UserError: there is none.
    """
    depth = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return name, module
    raise UserError(
        f"{type(model).__name__}: no list of {depth} layers, so it can be neither carved nor sharded; use student.init: config"
    )


def per_layer_fields(config: Any) -> dict[str, list[Any]]:
    """Fields of a text config with one entry per layer, such as `layer_types`."""
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list)
        and len(value) == config.num_hidden_layers
        and not name.endswith(("_id", "_ids"))
        and name != "architectures"
    }
