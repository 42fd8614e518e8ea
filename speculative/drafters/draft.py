"""A draft model and how it drafts."""

from collections.abc import Hashable
from dataclasses import dataclass

from transformers import PreTrainedModel

from speculative.drafters.drafter import Drafter, ModelDrafter
from speculative.drafters.parallel import DRAFTINGS, Drafting, ParallelDrafter
from speculative.drafters.registry import Parts, registers
from speculative.engine.parallel import mask_token_of
from speculative.errors import UserError
from speculative.rules.tree import TokenTree

# Gammas up to which a parallel draft is replayed, unless a larger one is decoded: each costs a draft token a response token.
PARALLEL_OFFSETS = 8


@dataclass(frozen=True, eq=False)
class Draft:
    """A draft model that drafts token by token, or a block in one pass. Raises UserError where it cannot draft so."""

    model: PreTrainedModel
    drafting: Drafting = "autoregressive"

    def __post_init__(self) -> None:
        if self.drafting not in DRAFTINGS:
            raise UserError(f"drafting {self.drafting}: one of {', '.join(DRAFTINGS)}")
        self.drafter()

    @property
    def parallel(self) -> bool:
        """Whether a block is one pass."""
        return self.drafting == "parallel"

    @property
    def shape(self) -> Hashable:
        """Drafts of one shape that draft alike take the same time."""
        return self.drafting, *((name, tuple(weight.shape)) for name, weight in self.model.named_parameters())

    def drafter(self) -> ModelDrafter:
        """A fresh proposer."""
        return ParallelDrafter(self.model) if self.parallel else ModelDrafter(self.model)

    def offsets(self, gamma: int, least: int = PARALLEL_OFFSETS) -> int | None:
        """Offsets to score it at (`token_scores.score_tokens`) when it is decoded with gamma; None token by token."""
        return max(gamma, least) if self.parallel else None


def drafts_of(model: PreTrainedModel) -> tuple[Draft, ...]:
    """The model by every way to draft that its config offers, token by token first."""
    return tuple(Draft(model, how) for how in DRAFTINGS[: 1 if mask_token_of(model.config) is None else None])


@registers("draft")
@registers("token tree", TokenTree.from_branching((3, 2, 1)))
def _draft(parts: Parts) -> Drafter:
    return parts.drafter()
