"""A draft that proposes a whole block in one call (PARD, 2504.18583).

Shapes: R rows, G drafted tokens (gamma), W = fed tokens, C columns of the token buffer, V vocabulary.
"""

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from transformers import PreTrainedModel

from speculative.drafters.drafter import Ask, DeviceText, ModelDrafter, Proposal, Seats
from speculative.engine.cached_model import CachedModel
from speculative.engine.parallel import check_parallel, mask_token_of
from speculative.errors import UserError

# How a draft model drafts: token by token, or a block in one call.
Drafting = Literal["autoregressive", "parallel"]
DRAFTINGS: tuple[Drafting, ...] = get_args(Drafting)


class ParallelDrafter(ModelDrafter):
    """A causal LM that is fed what was committed since the last block and gamma - 1 copies of its mask token.

    The logits at the last committed token propose the first token, those at mask k the one behind; no proposal sees another.
    What a mask leaves in the cache is scratch: the next block's text is written over it. So each block reads up to gamma + 1 new
    tokens, and its cost hardly depends on gamma. Any gamma may be asked for, also one the draft was not trained for.

    A block may end behind a doubtful token (`Ask.stop_below`) by the same reasoning as for any draft: whether token k + 1 is
    proposed depends on tokens 1..k, which are verified. It spares the target's positions, no draft call.

    Where settings name a token tree it answers with a chain.
    """

    source_names = ("parallel draft",)
    on_device = True

    def __init__(self, model: PreTrainedModel, name: str = "parallel draft"):
        """Raises UserError when the model's config names no mask token, and for a model that cannot be fed masks."""
        mask_token = mask_token_of(model.config)
        if mask_token is None:
            raise UserError(
                f"{name}: its config.json names no mask token (pard_token), so it was not trained to draft in parallel: "
                "draft token by token, or train one with student.parallel"
            )
        check_parallel(model)
        super().__init__(model, name)
        self.mask_token = mask_token
        self._columns = 0

    def start(self, seats: Seats) -> None:
        self._columns = seats.capacity
        super().start(seats)

    def fewest(self, gamma: int) -> int:
        # A text that has no room for so many is shorter than that.
        return min(gamma + 1, self._columns - (gamma - 1))

    def propose(self, ask: Ask) -> Proposal:
        return super().propose(ask._replace(tree=None))

    def _chain_logits(self, ask: Ask, ids: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        yield from self._catch_up(ask, ask.gamma - 1, self.mask_token).unbind(1)

    def _logits_on_device(
        self, text: DeviceText, gamma: int, prefix: int, shortest: int, ids: list[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        cached, read = self.cached, self.fewest(gamma)
        assert isinstance(cached, CachedModel)
        lengths_R1 = text.lengths_R.unsqueeze(1)
        starts_R1 = (lengths_R1 - read).clamp_min_(0)
        positions_RW = starts_R1 + cached.memory.positions_C[: read + gamma - 1]
        ids_RW = text.tokens_RC.gather(1, positions_RW).masked_fill(positions_RW >= lengths_R1, self.mask_token)
        if shortest >= read:
            logits_RGV = cached.feed_static(ids_RW, positions_RW, prefix, gamma)
        else:
            logits_RWV = cached.feed_static(ids_RW, positions_RW, prefix, read + gamma - 1)
            columns_RG = lengths_R1 - 1 - starts_R1 + cached.memory.positions_C[:gamma]
            logits_RGV = logits_RWV.gather(1, columns_RG.unsqueeze(-1).expand(-1, -1, logits_RWV.shape[-1]))
        yield from logits_RGV.unbind(1)
