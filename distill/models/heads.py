"""A causal LM in two parts: body (ids -> hidden states) and head (hidden states -> logits).

The trainer needs logits of response positions only, one chunk at a time; transformers' forward computes all of them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.loss.chunk_heads import OutputHead
from distill.models.library_state import packing_known
from speculative.engine.models import in_eval_mode
from speculative.errors import UserError


class SplitModel:
    """Body and head of a causal LM, checked once against its own forward. Not a module: it has no parameters of its own."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises `UserError` if body and head together do not give the model's logits."""
        self.model = model
        self.body: nn.Module = model.base_model
        embeddings = model.get_output_embeddings()
        if embeddings is None or self.body is model:
            raise UserError(f"{type(model).__name__} has no separate output head to distil; use a causal LM")
        text_config: Any = model.config.get_text_config()
        # Cohere multiplies by logit_scale, Granite divides by logits_scaling.
        times, over = (float(getattr(text_config, name, None) or 1.0) for name in ("logit_scale", "logits_scaling"))
        self.head = OutputHead(embeddings, times / over, getattr(text_config, "final_logit_softcapping", None))
        self._check()

    def hidden(self, input_ids_BT: Tensor, position_ids_BT: Tensor | None = None, attention: Any = None) -> Tensor:
        """(B, T) ids -> (B, T, D) hidden states that the head reads.

        With `position_ids_BT`, sequences packed into one row do not attend to each other: transformers finds where positions
        restart and masks across them. With `attention`, this mask of the model's own format decides.
        """
        options = {"position_ids": position_ids_BT, "attention_mask": attention}
        options = {name: value for name, value in options.items() if value is not None}
        with packing_known(position_ids_BT is not None and attention is None):
            hidden_BTD = self.body(input_ids=input_ids_BT, use_cache=False, **options).last_hidden_state
        return hidden_BTD.to(input_ids_BT.device)

    def _check(self) -> None:
        vocabulary, device = self.model.config.get_text_config().vocab_size, next(self.model.parameters()).device
        probe_BT = torch.arange(8, device=device).unsqueeze(0) % vocabulary
        with torch.no_grad(), in_eval_mode(self.model):
            expected, split = self.model(input_ids=probe_BT, use_cache=False).logits, self.head(self.hidden(probe_BT))
        if expected.shape != split.shape or not torch.allclose(expected.float(), split.float(), rtol=1e-2, atol=1e-2):
            raise UserError(
                f"{type(self.model).__name__}: body and head do not give the model's logits; use another architecture"
            )
