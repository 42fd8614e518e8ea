"""An output head of the most frequent tokens only; a draft never proposes another token, so its text stays the target's (2502.14856).

Shapes: N tokens of the head, V vocabulary, D hidden width.
"""

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from speculative.errors import UserError

# Key of a draft's config.json: the ids of its head, rising. The saved weights have a row for every token.
HEAD_IDS = "head_token_ids"
FEWEST_TOKENS = 4


class FrequentHead(nn.Linear):
    """The rows of a linear head for some tokens, for inference. The logits (..., V) of all other tokens are -inf."""

    kept_N: torch.Tensor

    def __init__(self, head: nn.Linear, ids: list[int]) -> None:
        """``ids``: rising."""
        super().__init__(head.in_features, len(ids), bias=head.bias is not None, device="meta")
        kept_N = torch.tensor(ids, device=head.weight.device)
        self.register_buffer("kept_N", kept_N, persistent=False)
        self.rows = head.out_features
        self.weight = nn.Parameter(head.weight.detach()[kept_N], requires_grad=False)
        if head.bias is not None:
            self.bias = nn.Parameter(head.bias.detach()[kept_N], requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., V)."""
        return self.spread(super().forward(input))

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """(..., N) -> (..., V)."""
        return logits.new_full((*logits.shape[:-1], self.rows), -torch.inf).index_copy_(-1, self.kept_N, logits)


def head_ids_of(config: PretrainedConfig) -> list[int] | None:
    """The token ids of a draft's head; None if it covers all. Raises UserError for anything but rising ids that have rows."""
    ids, rows = getattr(config, HEAD_IDS, None), config.get_text_config(decoder=True).vocab_size
    if ids is None:
        return None
    rising = isinstance(ids, list) and all(type(one) is int for one in ids) and ids == sorted(set(ids))
    if not rising or len(ids) < FEWEST_TOKENS or ids[0] < 0 or ids[-1] >= rows:
        raise UserError(
            f"config.json of the draft: {HEAD_IDS}: must be at least {FEWEST_TOKENS} rising ids, 0..{rows - 1}"
        )
    return ids


def trim_head(model: PreTrainedModel) -> PreTrainedModel:
    """Trim the head to the tokens in the model's config, in place; without that key nothing changes.

    Raises UserError: a head that is not a plain linear layer, or logits that are capped after it.
    """
    ids, head = head_ids_of(model.config), model.get_output_embeddings()
    if ids is None or isinstance(head, FrequentHead):
        return model
    require_plain_head(model)
    assert isinstance(head, nn.Linear)
    model.set_output_embeddings(FrequentHead(head, ids))
    return model


def require_plain_head(model: Any) -> None:
    """Raise UserError if the head cannot be trimmed: not a linear layer, or a cap that would make -inf finite."""
    text = model.config.get_text_config(decoder=True)
    if type(model.get_output_embeddings()) is not nn.Linear or getattr(text, "final_logit_softcapping", None):
        raise UserError(
            f"student.head_tokens: the head of {type(model).__name__} is not a plain linear layer (8-bit weights, or a cap on its logits); "
            "leave the key out"
        )
