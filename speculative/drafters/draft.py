"""A draft model and how it drafts: token by token, or a whole block in one call (PARD, 2504.18583).

Shapes: R rows, G drafted tokens (gamma), W = fed tokens, C columns of the token buffer, V vocabulary.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from transformers import PreTrainedModel

from speculative.drafters.drafter import Ask, DeviceText, Drafter, ModelDrafter, Proposal, Seats
from speculative.drafters.registry import Parts, way
from speculative.engine.cached_model import CachedModel
from speculative.engine.models import check_parallel, mask_token_of
from speculative.errors import UserError
from speculative.rules.tree import TokenTree

# How a draft model drafts: token by token, or a block in one call.
Drafting = Literal["autoregressive", "parallel"]
DRAFTINGS: tuple[Drafting, ...] = get_args(Drafting)


class ParallelDrafter(ModelDrafter):
    """A causal LM that reads the tokens committed since the last block and gamma - 1 copies of its mask token. It always proposes a chain.

    The logits at the last committed token propose the first token, those at mask k propose the token after it; proposals do not see each
    other. The next block overwrites the masks' entries in the cache. So each block reads up to gamma + 1 new tokens, and its cost hardly
    depends on gamma, which may be one the draft was not trained for.
    """

    source_names = ("parallel draft",)
    on_device = True

    def __init__(self, model: PreTrainedModel):
        """Raises UserError if the model's config has no mask token, and for a model that does not support masks."""
        mask_token = mask_token_of(model.config)
        if mask_token is None:
            raise UserError(
                "parallel draft: its config.json has no mask token (pard_token), so it was not trained for parallel drafting: "
                "draft token by token, or train a draft with student.parallel"
            )
        check_parallel(model)
        super().__init__(model, "parallel draft")
        self.mask_token = mask_token
        self._columns = 0

    def start(self, seats: Seats) -> None:
        self._columns = seats.capacity
        super().start(seats)

    def fewest(self, gamma: int) -> int:
        # A text close to the capacity leaves room for fewer tokens.
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


# Largest gamma at which a parallel draft is replayed, unless decoding uses a larger one: each costs one draft token per response token.
PARALLEL_OFFSETS = 8


@dataclass(frozen=True, eq=False)
class Draft:
    """A draft model that drafts token by token, or a block in one pass. Raises UserError if the model does not support it."""

    model: PreTrainedModel
    drafting: Drafting = "autoregressive"

    def __post_init__(self) -> None:
        if self.drafting not in DRAFTINGS:
            raise UserError(f"drafting = {self.drafting!r}: must be one of {', '.join(DRAFTINGS)}")
        self.drafter()

    @property
    def parallel(self) -> bool:
        """Whether a block is one forward pass."""
        return self.drafting == "parallel"

    @property
    def shape(self) -> Hashable:
        """A key: drafts of one shape and drafting mode take the same time."""
        window = getattr(self.model.config.get_text_config(decoder=True), "sliding_window", None)
        return self.drafting, window, *((name, tuple(weight.shape)) for name, weight in self.model.named_parameters())

    def drafter(self) -> ModelDrafter:
        return ParallelDrafter(self.model) if self.parallel else ModelDrafter(self.model)

    def offsets(self, gamma: int, least: int = PARALLEL_OFFSETS) -> int | None:
        """Offsets to score it at (`token_scores.score_tokens`) when it is decoded with gamma; None for token-by-token drafts."""
        return max(gamma, least) if self.parallel else None


def drafts_of(model: PreTrainedModel) -> tuple[Draft, ...]:
    """The model in every drafting mode that its config supports, token by token first."""
    return tuple(Draft(model, how) for how in DRAFTINGS[: 1 if mask_token_of(model.config) is None else None])


@way("draft", needs=("draft",))
@way("token-tree", needs=("draft",), tree=TokenTree.from_branching((3, 2, 1)), served=False, replayed=False)
def _draft(parts: Parts) -> Drafter:
    return parts.drafter()


@way("parallel", needs=("draft",), parallel=True)
def _parallel(parts: Parts) -> Drafter:
    assert parts.draft is not None
    return Draft(parts.draft.model, "parallel").drafter()
