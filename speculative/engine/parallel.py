"""Drafts that propose a whole block in one forward (2504.18583): their mask token, and many blocks asked in one pass.

Behind a text whose last known token is at position s the draft is fed copies of one mask token; position ids simply go on. The
logits at s predict token s + 1 (offset 1), those at the mask of position s + k - 1 predict token s + k (offset k).

Shapes: B texts, T positions of a text (padded on the right), L columns of the pass, N masks.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from speculative.engine.models import by_layer_kind, check_decodable, is_recurrent, window_kinds
from speculative.errors import UserError

# The keys of a draft's config.json that vLLM reads, in its order.
MASK_TOKEN_KEYS = ("pard_token", "ptd_token_id")


def mask_token_of(config: PretrainedConfig) -> int | None:
    """The token id that stands for a token not known yet; None where the config names none: no parallel draft.

    Raises UserError for a value that is no row of the embedding.
    """
    for key in MASK_TOKEN_KEYS:
        token = getattr(config, key, None)
        if token is None:
            continue
        rows = config.get_text_config(decoder=True).vocab_size
        if type(token) is not int or not 0 <= token < rows:
            raise UserError(f"config.json of the draft: {key} = {token!r}: must be a token id, 0..{rows - 1}")
        return token
    return None


class MaskedPass(NamedTuple):
    """A pass over texts with the masks of many blocks behind them: columns 0..T-1 are the text's own, then come masks.

    input_ids_BL, position_ids_BL. attention: what the model takes as `attention_mask`: additive (B, 1, L, L) in the model's
    dtype, or one by kind of layer. Mask n: columns_N[n] of text texts_N[n]; its logits predict token starts_N[n] +
    offsets_N[n]. Offset 1 of start s is column s.
    """

    input_ids_BL: torch.Tensor
    position_ids_BL: torch.Tensor
    attention: torch.Tensor | dict[str, torch.Tensor]
    texts_N: torch.Tensor
    starts_N: torch.Tensor
    offsets_N: torch.Tensor
    columns_N: torch.Tensor

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Arguments of the model's forward."""
        return {
            "input_ids": self.input_ids_BL,
            "position_ids": self.position_ids_BL,
            "attention_mask": self.attention,
            "use_cache": False,
        }


def masked_pass(model: PreTrainedModel, ids_BT: torch.Tensor, depths_BT: torch.Tensor, mask_token: int) -> MaskedPass:
    """The pass in which each block asked for is answered as if the text ended at its start.

    depths_BT: at each position s that starts a block, its largest offset: masks 1..depth-1 are fed, of which mask k stands at
    position s + k and sees the text up to s and the masks before it of its own start. 0 or 1 asks for no mask. Text sees text only,
    so its logits are those of a pass without masks.

    Memory and time of the attention grow with L^2, L = T + the masks of the text with most.

    Raises UserError (through `check_parallel`) for a model that cannot be asked so.
    """
    windows = check_parallel(model)
    device, (texts, length) = ids_BT.device, ids_BT.shape
    deepest = int(depths_BT.max()) if depths_BT.numel() else 0
    offsets_K = torch.arange(2, max(deepest, 1) + 1, device=device)
    texts_N, starts_N, kinds_N = (depths_BT.unsqueeze(-1) >= offsets_K).nonzero(as_tuple=True)
    offsets_N = offsets_K[kinds_N]
    counts_B = torch.bincount(texts_N, minlength=texts)
    columns_N = length + torch.arange(len(texts_N), device=device) - (counts_B.cumsum(0) - counts_B)[texts_N]
    width = length + (int(counts_B.max()) if len(counts_B) else 0)

    # Of each column: the last text position it sees, and its offset from there (0: the text itself, -1: padding).
    seen_BL = torch.full((texts, width), -1, device=device)
    steps_BL = torch.full((texts, width), -1, device=device)
    seen_BL[:, :length], steps_BL[:, :length] = torch.arange(length, device=device), 0
    seen_BL[texts_N, columns_N], steps_BL[texts_N, columns_N] = starts_N, offsets_N - 1
    ids_BL = torch.cat((ids_BT, ids_BT.new_full((texts, width - length), mask_token)), 1)
    positions_BL = (seen_BL + steps_BL).clamp_min(0)

    text_BLL = (steps_BL == 0).unsqueeze(1) & (seen_BL.unsqueeze(1) <= seen_BL.unsqueeze(2))
    own_BLL = (seen_BL.unsqueeze(1) == seen_BL.unsqueeze(2)) & (steps_BL.unsqueeze(1) <= steps_BL.unsqueeze(2))
    visible_BLL = text_BLL | (own_BLL & (steps_BL != 0).unsqueeze(1))
    masks = []
    for window in windows:
        hidden_BLL = ~visible_BLL
        if window is not None:
            hidden_BLL |= positions_BL.unsqueeze(2) - positions_BL.unsqueeze(1) >= window
        zeros = torch.zeros(hidden_BLL.shape, dtype=model.dtype, device=device)
        masks.append(zeros.masked_fill_(hidden_BLL, torch.finfo(model.dtype).min).unsqueeze(1))
    return MaskedPass(ids_BL, positions_BL, by_layer_kind(masks), texts_N, starts_N, offsets_N, columns_N)


def check_parallel(model: PreTrainedModel) -> list[int | None]:
    """The windows of the model's layers, each kind once, full attention (None) first.

    Raises UserError for a model that cannot be asked for many blocks in one pass: recurrent layers, layers with masks of their
    own, attention that takes no 4-D mask, windows of several sizes.
    """
    check_decodable(model, "parallel draft")
    if is_recurrent(model):
        raise UserError(
            f"parallel draft ({type(model).__name__}) keeps a recurrent state, in which mask tokens would stay: "
            "give a draft with attention layers only"
        )
    return window_kinds(model, "parallel draft")
