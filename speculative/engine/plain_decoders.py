"""Plain decoders: which models our own code can compute, and whether it gives their logits.

Shapes: R rows, Q query tokens, V vocabulary.
"""

import warnings
import weakref
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from speculative.engine.frequent_head import FrequentHead
from speculative.engine.models import evaluating, vocab_rows
from speculative.engine.survey import facts_of, survey

# Models of embedding, one rotary table, layers, norm and head only. Others may look the same but scale something in between.
PLAIN_DECODERS = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# An adapter or a parametrisation is a module of another package that looks like the module it replaced.
OWN_CALLS = ("torch.nn.modules.", "transformers.models.", "transformers.activations", FrequentHead.__module__)
CHECKED_TOKENS, CHECKED_PARTS = 6, ((0, 4), (4, 5), (5, 6))  # one and several tokens of a row
# Allowed difference of logits, relative to the largest. With weights other than float32, or products that round, the model's own call
# rounds activations too.
TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 0.1

# Whether a model's calls in our code, by its name, agreed with its own, checked once.
_agrees: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, bool]] = weakref.WeakKeyDictionary()


class Unfit(Exception):
    """The model has a part that our code does not support."""


def is_plain(model: PreTrainedModel) -> bool:
    """Whether the model is of a known architecture, without hooks, replaced parts or autocast."""
    # A wrapper (peft, a compiled model) has the config of its model but does more.
    of_transformers = all(type(one).__module__.startswith("transformers.models.") for one in (model, model.base_model))
    if not of_transformers or model.config.model_type not in PLAIN_DECODERS:
        return False
    if torch.is_autocast_enabled(model.device.type):
        return False
    facts = facts_of(model)
    if "plain" not in facts:
        facts["plain"] = all(
            type(one).__module__.startswith(OWN_CALLS) or hasattr(one, "values") for one in survey(model).modules
        )
    return facts["plain"] and not survey(model).listened_to


def agrees(
    model: PreTrainedModel, what: str, open_calls: Callable[[], Callable[[torch.Tensor, int], torch.Tensor]]
) -> bool:
    """Whether our code gives the model's own logits, tested on a few tokens at the first use. `open_calls` returns a function of ids
    (2, Q) and the position of the first; it gives logits (2, Q, V).
    """
    known = _agrees.setdefault(model, {})
    if what not in known:
        tokens = CHECKED_TOKENS
        ids = torch.arange(1, 2 * tokens + 1).remainder(vocab_rows(model)).view(2, tokens).to(model.device)
        with evaluating(model):
            call = open_calls()
            own = model(input_ids=ids, use_cache=False).logits.float()
            parts = [call(ids[:, start:stop].contiguous(), start) for start, stop in CHECKED_PARTS]
            found = torch.cat(parts, 1).float()
        # NaN in the model's own logits does not count as a difference; the loop reports it.
        told = own.isfinite()
        if not told.any():
            return True  # nothing to compare yet
        difference, largest = (found - own)[told].abs().max(), own[told].abs().max()
        exact = all(weight.dtype == torch.float32 for weight in model.parameters())
        exact = exact and torch.get_float32_matmul_precision() == "highest"
        known[what] = bool(difference <= (TOLERANCE if exact else ROUNDED_TOLERANCE) * largest)
        if not known[what]:
            warnings.warn(
                f"{what} and {type(model).__name__} itself give different logits ({difference:.2g} apart): "
                "the model runs eagerly",
                stacklevel=2,
            )
    return known[what]


def refuse(model: PreTrainedModel, what: str) -> None:
    """Remember that our code, by its name, does not compute this model."""
    _agrees.setdefault(model, {})[what] = False
