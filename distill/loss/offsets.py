"""Which offsets of a parallel block are learnt, and how much each counts: pure laws, randomness passed in.

Every response position starts a block; offset j = 1..J of a block is the j-th token behind the text that it knows, from a forward that sees
j - 1 mask tokens in place of the tokens between. With l(s, j) the loss of start s at offset j against the target's distribution there, a step
minimises

    1 / response tokens x sum_s sum_j [depth_s >= j] w_j / retain^(j-1) l(s, j)        w_j = P(a block reaches offset j) = survival_(j-1)

depth_s is drawn with P(depth_s >= j) = retain^(j-1) (conditional drop, arXiv 2504.18583), so the expectation over draws is sum_s sum_j w_j
l(s, j) at a cost of 1 / (1 - retain) rows a start. w_1 = 1: offset 1 is the autoregressive loss as it is without blocks, and its denominator.

Legend: J offsets, B texts, R starts (response tokens), N asked offsets above 1.
"""

import numpy as np
import torch
from torch import Tensor

# Of the running mean of survival: half of what a step added is forgotten 7 steps later.
DECAY = 0.9


def drawn_depths(generator: np.random.Generator, loss_mask: np.ndarray, tokens: int, retain: float) -> np.ndarray:
    """Offsets asked of the block whose first token is each id of a sequence, (ids,) int64; 0 where that is no response token.

    P(depth >= j) = retain^(j-1) for j up to `tokens`, cut where the response ends: behind it nothing is known.
    """
    size = len(loss_mask)
    drawn = np.full(size, tokens) if retain == 1.0 else np.minimum(generator.geometric(1.0 - retain, size), tokens)
    ends = np.where(loss_mask, size, np.arange(size))
    room = np.minimum.accumulate(ends[::-1])[::-1] - np.arange(size)
    return np.minimum(drawn, room)


def survival_sums(accepted_BJ: Tensor, depths_B: Tensor) -> Tensor:
    """(2, J) float64 of blocks: how many keep their first j tokens, by P(token j is kept | text); how many ask for offset j at all.

    accepted_BJ: that probability of each drafted token; what lies behind a block's depth is not looked at. Given text that the target wrote,
    the expectation of the product is P(the first j drafted tokens of a block are all kept).
    """
    asked_BJ = torch.arange(accepted_BJ.shape[-1], device=depths_B.device) < depths_B.unsqueeze(-1)
    kept_BJ = accepted_BJ.double().cumprod(-1).where(asked_BJ, 0.0)
    return torch.stack([kept_BJ.sum(0), asked_BJ.double().sum(0)])


class Survival:
    """The running mean of P(the first j drafted tokens of a block are kept), j = 1..J, over training steps. Part of a checkpoint.

    It starts at 1, so that a young draft is taught every offset. Weights change between steps only, by sums over all ranks and micro-batches.
    """

    def __init__(self, tokens: int, retain: float) -> None:
        """tokens: J. retain: see `drawn_depths`."""
        self.retain = retain
        self.kept_J = [1.0] * tokens
        self.seen_2J = torch.zeros(2, tokens, dtype=torch.float64)

    def weights(self) -> list[float]:
        """w_j / retain^(j-1) of each offset: what multiplies the loss of a row that was drawn."""
        reached_J = [1.0, *self.kept_J[:-1]]
        return [reached / self.retain**place for place, reached in enumerate(reached_J)]

    def note(self, sums_2J: Tensor) -> None:
        """Adds a micro-batch of the present step (`survival_sums`)."""
        self.seen_2J = self.seen_2J.to(sums_2J.device) + sums_2J

    def settle(self, sums_2J: Tensor | None = None) -> None:
        """Ends a step; sums_2J: what all ranks noted in it, by default what this one did. An offset nobody asked for stays as it was."""
        kept_J, asked_J = (self.seen_2J if sums_2J is None else sums_2J).tolist()
        for place, (kept, asked) in enumerate(zip(kept_J, asked_J, strict=True)):
            if asked:
                self.kept_J[place] += (1.0 - DECAY) * (kept / asked - self.kept_J[place])
        self.forget()

    def forget(self) -> None:
        """What was noted since the last step is no step's."""
        self.seen_2J = torch.zeros_like(self.seen_2J)

    def state_dict(self) -> dict[str, list[float]]:
        """For a checkpoint."""
        return {"kept": list(self.kept_J)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """From a checkpoint."""
        self.kept_J = list(state["kept"])
