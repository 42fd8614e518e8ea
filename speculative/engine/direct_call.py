"""A plain decoder's forward with its layers called directly.

On a CPU a third of a small draft's step is what a causal LM of transformers wraps around its layers: masks that are given already,
options read from a config, records of outputs nobody asked for.

Shapes: K rows of one call, Q query tokens, P prefix, V vocabulary.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

# Embeddings, one rotary table, layers, norm, head and nothing else; others may look so and scale something in between.
PLAIN_DECODERS = frozenset({"llama", "mistral", "qwen2", "qwen3"})

# Whether a model's direct call gave the very logits of its own: asked once.
_same: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


class DirectCall:
    """The forward of one of `PLAIN_DECODERS` on a cache and a mask that are ready."""

    def __init__(self, model: PreTrainedModel):
        body: Any = model.base_model
        head: Any = model.lm_head
        self._model, self._head = model, head
        self._embed, self._rotary, self._norm = body.embed_tokens, body.rotary_emb, body.norm
        self._layers = list(body.layers)[: body.config.num_hidden_layers]

    def __call__(
        self,
        ids_KQ: torch.Tensor,
        positions_KQ: torch.Tensor,
        mask_K1QP: torch.Tensor | None,
        cache: Cache,
        logits_kept: int,
    ) -> torch.Tensor:
        """Logits (K, logits_kept, V). Without a mask a query sees the whole prefix: of a single one that is right."""
        hidden = self._embed(ids_KQ)
        angles = self._rotary(hidden, position_ids=positions_KQ)
        for layer in self._layers:
            hidden = layer(
                hidden, attention_mask=mask_K1QP, position_embeddings=angles, position_ids=positions_KQ,
                past_key_values=cache, use_cache=True,
            )  # fmt: skip
        logits: torch.Tensor = self._head(self._norm(hidden)[:, -logits_kept:])
        return logits

    def checked(self, own: Callable[[], torch.Tensor], *arguments: Any) -> torch.Tensor:
        """The direct call's logits where it is known to give the bits of the model's own call, else the own call's.

        The first time both are made; the own one last, so that what it writes is what the cache holds.
        """
        same = _same.get(self._model)
        if same:
            return self(*arguments)
        if same is None:
            try:
                directly = self(*arguments)
            except (
                AttributeError,
                IndexError,
                TypeError,
                ValueError,
            ):  # Another release's layers may want something else.
                directly = None
            logits = own()
            # NaN is the loop's to report, not a difference.
            _same[self._model] = directly is not None and torch.equal(directly.nan_to_num(), logits.nan_to_num())
            return logits
        return own()


def direct_call(model: PreTrainedModel) -> DirectCall | None:
    """None for a model of another kind and one whose call somebody listens to or has replaced, as it is now."""
    # A wrapper (peft's, a compiled model) has its model's config and does more than its model.
    of_transformers = all(type(one).__module__.startswith("transformers.models.") for one in (model, model.base_model))
    if not of_transformers or model.config.model_type not in PLAIN_DECODERS:
        return None
    touched = any(
        "forward" in vars(one) or one._forward_hooks or one._forward_pre_hooks or one._compiled_call_impl is not None
        for one in (model, model.base_model)
    )
    try:
        return None if touched else DirectCall(model)
    except AttributeError:  # Another release's names.
        return None
