"""A causal LM in two halves: body (ids -> hidden states) and head (hidden states -> logits).

The trainer needs logits of response positions only, a chunk at a time; transformers' own forward makes all of them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from speculative.errors import UserError


class SplitModel:
    """Body and head of a causal LM, checked once against the model's own forward.

    Not a module: it refers to the model and owns no parameters.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises `UserError` when body then head does not give the model's own logits."""
        self.model = model
        self.body: nn.Module = model.base_model
        embeddings = model.get_output_embeddings()
        if embeddings is None or self.body is model:
            raise UserError(
                f"{type(model).__name__} has no separate output head: not a causal LM that can be distilled"
            )
        self.projection: nn.Module = embeddings
        text_config: Any = model.config.get_text_config()
        self.softcap: float | None = getattr(text_config, "final_logit_softcapping", None)
        # Cohere multiplies by logit_scale, Granite divides by logits_scaling.
        self.scale = float(getattr(text_config, "logit_scale", None) or 1.0) / float(
            getattr(text_config, "logits_scaling", None) or 1.0
        )
        self._check()

    def hidden(self, input_ids_BT: Tensor) -> Tensor:
        """(B, T) ids -> (B, T, D) hidden states that the head reads."""
        return self.body(input_ids=input_ids_BT, use_cache=False).last_hidden_state

    def head(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V) logits."""
        logits = self.projection(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def head_parameters(self) -> list[nn.Parameter]:
        """Trainable parameters of the head."""
        return [parameter for parameter in self.projection.parameters() if parameter.requires_grad]

    def _check(self) -> None:
        parameter = next(self.model.parameters())
        probe_BT = (
            torch.arange(8, device=parameter.device).unsqueeze(0) % self.model.config.get_text_config().vocab_size
        )
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            expected, split = self.model(input_ids=probe_BT, use_cache=False).logits, self.head(self.hidden(probe_BT))
        self.model.train(training)
        if expected.shape != split.shape or not torch.allclose(expected.float(), split.float(), rtol=1e-2, atol=1e-2):
            raise UserError(
                f"{type(self.model).__name__}: body and head do not give the model's own logits; its final step is not known here"
            )
