"""An output head of the most frequent tokens only; a draft never proposes another token, so its text stays the target's (2502.14856).

Shapes: N tokens of the head, V vocabulary, D hidden width.
"""

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from speculative.errors import UserError

# Key of a draft's config.json: the ids of its head, rising. The saved weights have a row for every token.
HEAD_IDS = "head_token_ids"


class FrequentHead(nn.Linear):
    """The rows of a linear head for some tokens (rising ids), for inference. The logits (..., V) of all other tokens are -inf."""

    kept_N: torch.Tensor

    def __init__(self, head: nn.Linear, ids: list[int]) -> None:
        super().__init__(head.in_features, len(ids), bias=head.bias is not None, device="meta")
        self.register_buffer("kept_N", torch.tensor(ids, device=head.weight.device), persistent=False)
        self.rows = head.out_features
        for name, rows in head.named_parameters():
            setattr(self, name, nn.Parameter(rows.detach()[self.kept_N], requires_grad=False))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., V)."""
        return self.spread(super().forward(input))

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """(..., N) -> (..., V)."""
        return logits.new_full((*logits.shape[:-1], self.rows), -torch.inf).index_copy_(-1, self.kept_N, logits)


def head_ids_of(config: PretrainedConfig) -> list[int] | None:
    """The token ids of a draft's head; None if it covers all. Raises UserError for anything but rising ids that have rows."""
    ids, rows = getattr(config, HEAD_IDS, None), config.get_text_config(decoder=True).vocab_size
    rising = isinstance(ids, list) and all(type(one) is int for one in ids) and ids == sorted(set(ids))
    if ids is not None and not (rising and len(ids) >= 4 and 0 <= ids[0] <= ids[-1] < rows):
        raise UserError(f"config.json of the draft: {HEAD_IDS}: must be at least 4 rising ids, 0..{rows - 1}")
    return ids


def trim_head(model: PreTrainedModel) -> PreTrainedModel:
    """Trim the head to the tokens in the model's config, in place; without that key nothing changes. Raises UserError: see `plain_head`."""
    ids = head_ids_of(model.config)
    if ids is not None and not isinstance(model.get_output_embeddings(), FrequentHead):
        model.set_output_embeddings(FrequentHead(plain_head(model), ids))
    return model


def plain_head(model: PreTrainedModel) -> nn.Linear:
    """The head, if it can be trimmed. Raises UserError: it is no plain linear layer, or a cap would make -inf finite."""
    head, text = model.get_output_embeddings(), model.config.get_text_config(decoder=True)
    if type(head) is not nn.Linear or getattr(text, "final_logit_softcapping", None):
        told = f"{type(model).__name__} has no plain linear head (8-bit weights, an adapter, or a cap on its logits)"
        raise UserError(f"student.head_tokens: {told}; leave the key out")
    return head
