"""Self-speculation: the target's first layers and its own head propose, and share the target's cache.

Shapes: R rows, L layers.
"""

import copy
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from speculative.drafters.drafter import Ask, Drafter, ModelDrafter, Proposal, Seats
from speculative.drafters.registry import Parts, way
from speculative.engine.cached_model import CachedModel
from speculative.engine.library_state import hollow_copy
from speculative.engine.memory import cache_entry
from speculative.engine.models import is_recurrent, layer_stacks
from speculative.engine.survey import Turn
from speculative.errors import UserError, out_of_memory


class EarlyExit(ModelDrafter):
    """The target stopped after its first L layers, with its own final norm and head (2309.08168, without the tuning). It has no weights
    and no cache of its own: the first layers write the same states as the verify call, and all earlier states are in the target's cache.
    So there is no prefill and no catch-up.
    """

    source_names: tuple[str, ...] = ("early exit",)
    on_device = True
    shares_cache = True

    def __init__(self, target: PreTrainedModel, layers: int):
        """Raises UserError if the target has too few layers, no single list of layers, or a recurrent state."""
        if is_recurrent(target):
            raise UserError(f"{type(target).__name__} has a recurrent state and no early exit: use a draft model")
        with Turn(target):  # its config is copied
            super().__init__(first_layers(target, layers), name=f"early exit after {layers} layers")

    def start(self, seats: Seats) -> None:
        assert isinstance(seats.target, CachedModel)
        self._cached = CachedModel(self.model, self.name, seats.rows, seats.capacity, seats.runner, seats.target.memory)
        self.read_R = np.zeros(seats.rows, dtype=np.int64)

    def admit(self, rows: list[int], tokens_RC: np.ndarray, lengths_R: np.ndarray) -> None: ...

    def keep(self, rows: list[int]) -> None:
        self.read_R = self.read_R[rows]  # The target compacts the cache.

    def propose(self, ask: Ask) -> Proposal:
        self.read_R = ask.lengths_R - 1  # The target read all but the last token, whichever drafter proposed it.
        return super().propose(ask)


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """The same causal LM with only its first `count` layers; it shares all parameters with the model. Raises UserError for a count outside
    1 .. layers - 1 and for models whose stack of layers is not one ModuleList.
    """
    total = model.config.get_text_config(decoder=True).num_hidden_layers
    if not 1 <= count < total:
        raise UserError(
            f"early exit after {count} layers: must be 1..{total - 1}, because the target has {total} layers"
        )
    stacks = layer_stacks(model)
    if len(stacks) != 1:
        raise UserError(f"early exit needs one list of {total} layers and {type(model).__name__} has none: use another")
    shorter = hollow_copy(model)
    parent = shorter
    *path, last = stacks[0].split(".")
    for name in path:
        child = hollow_copy(getattr(parent, name))
        if hasattr(child, "config"):
            child.config = _shorter_config(child.config, count)
        setattr(parent, name, child)
        parent = child
    stack = getattr(parent, last)
    assert isinstance(stack, nn.ModuleList)
    setattr(parent, last, stack[:count])
    shorter.config = _shorter_config(model.config, count)
    try:
        cache_entry(shorter)
    except (
        RuntimeError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:  # layers that use those left out, or their number
        if out_of_memory(error):
            raise
        raise UserError(
            f"{type(model).__name__} does not run with its first {count} layers alone, so it has no early exit: use a draft model"
        ) from error
    return shorter


def _shorter_config(config: Any, count: int) -> Any:
    shorter = copy.deepcopy(config)
    text = shorter.get_text_config(decoder=True)
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types)[:count]
    text.num_hidden_layers = count
    return shorter


@way("early-exit", served=False, replayed=False)
def _early_exit(parts: Parts) -> Drafter:
    layers = parts.target.config.get_text_config(decoder=True).num_hidden_layers
    return EarlyExit(parts.target, parts.layers or max(1, layers // 3))
