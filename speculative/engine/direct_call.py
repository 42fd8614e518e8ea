"""A plain decoder's forward with its layers called directly.

On a CPU a causal LM of transformers spends more of a one-layer draft's step in what it wraps around the layers (masks it is given
already, options of its config, records of outputs nobody asked for) than in half of the layer itself.

Shapes: K rows of one call, Q query tokens, P prefix, V vocabulary.
"""

import weakref
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
        self._embed, self._rotary, self._norm = body.embed_tokens, body.rotary_emb, body.norm
        self._layers, self._head = list(body.layers), head

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


def direct_call(model: PreTrainedModel) -> DirectCall | None:
    """None for a model of another kind, one whose call somebody listens to or has replaced, and one that is known to differ."""
    # A wrapper (peft's, a compiled model) has its model's config and does more than its model.
    of_transformers = type(model).__module__.startswith("transformers.models.")
    if not of_transformers or model.config.model_type not in PLAIN_DECODERS or not _same.get(model, True):
        return None
    touched = any(
        "forward" in vars(one) or one._forward_hooks or one._forward_pre_hooks or one._compiled_call_impl is not None
        for one in (model, model.base_model)
    )
    return None if touched else DirectCall(model)


def is_same(model: PreTrainedModel, own: torch.Tensor, direct: torch.Tensor) -> bool:
    """Whether both calls gave the same bits; remembered for `direct_call`."""
    _same[model] = torch.equal(own, direct)
    return _same[model]


def is_known(model: PreTrainedModel) -> bool:
    """Whether this model's two calls were compared."""
    return model in _same
