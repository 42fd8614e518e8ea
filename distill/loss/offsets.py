"""Which offsets of a parallel block are learnt, and the weight of each. Pure functions; randomness is passed in.

Every response position starts a block. Offset j = 1..J of a block is the j-th token after the known text, predicted by a forward that has
j - 1 mask tokens in place of the tokens between. With l(s, j) the loss of start s at offset j against the target's
distribution there, a step
minimises

    1 / response tokens x sum_s sum_j [depth_s >= j] w_j / retain^(j-1) l(s, j)        w_j = P(a block reaches offset j) = survival_(j-1)

depth_s is drawn with P(depth_s >= j) = retain^(j-1) (conditional drop, arXiv 2504.18583), so the expectation over draws is sum_s sum_j w_j
l(s, j) at a cost of 1 / (1 - retain) rows a start. w_1 = 1: offset 1 is the autoregressive loss, with its denominator.

Legend: J offsets, B texts, R starts (response tokens), N asked offsets above 1.
"""

import numpy as np
import torch
from torch import Tensor

# Decay of the running mean of survival: its half-life is 7 steps.
DECAY = 0.9

RETAIN = 0.7  # probability that a block which trains an offset also trains the next one


def drawn_depths(
    generator: np.random.Generator, loss_mask: np.ndarray, tokens: int, retain: float = RETAIN
) -> np.ndarray:
    """Offsets asked of the block whose first token is each id of a sequence, (ids,) int64; 0 for ids that are not response tokens.

    P(depth >= j) = retain^(j-1) for j up to `tokens`, cut at the end of the response.
    """
    size = len(loss_mask)
    drawn = np.full(size, tokens) if retain == 1.0 else np.minimum(generator.geometric(1.0 - retain, size), tokens)
    ends = np.where(loss_mask, size, np.arange(size))
    left = np.minimum.accumulate(ends[::-1])[::-1] - np.arange(size)
    return np.minimum(drawn, left)


def survival_sums(accepted_BJ: Tensor, depths_B: Tensor) -> Tensor:
    """(2, J) float64: the expected number of blocks that keep their first j tokens, and the number of blocks that have offset j.

    accepted_BJ: P(token j is kept | text) of each draft token; entries beyond a block's depth are ignored. On text of the target,
    the expectation of the product is P(the first j draft tokens of a block are all kept).
    """
    asked_BJ = torch.arange(accepted_BJ.shape[-1], device=depths_B.device) < depths_B.unsqueeze(-1)
    kept_BJ = accepted_BJ.double().cumprod(-1).where(asked_BJ, 0.0)
    return torch.stack([kept_BJ.sum(0), asked_BJ.double().sum(0)])


class Survival:
    """Running mean over training steps of P(the first j draft tokens of a block are kept), j = 1..J. Part of a checkpoint.

    It starts at 1, so that an untrained draft learns every offset. Weights change between steps only, from sums over
    all ranks and micro-batches.
    """

    def __init__(self, tokens: int, retain: float = RETAIN) -> None:
        """tokens: J. retain: see `drawn_depths`."""
        self.retain = retain
        self.kept_J = [1.0] * tokens
        self.seen_2J = torch.zeros(2, tokens, dtype=torch.float64)

    def weights(self) -> list[float]:
        """w_j / retain^(j-1) of each offset: the factor of the loss of a drawn row."""
        reached_J = [1.0, *self.kept_J[:-1]]
        return [reached / self.retain**place for place, reached in enumerate(reached_J)]

    def note(self, sums_2J: Tensor) -> None:
        """Add the `survival_sums` of a micro-batch of the current step."""
        self.seen_2J = self.seen_2J.to(sums_2J.device) + sums_2J

    def settle(self, sums_2J: Tensor | None = None) -> None:
        """End a step. sums_2J: the sums of all ranks, by default those of this rank. An offset without blocks does not change."""
        kept_J, asked_J = (self.seen_2J if sums_2J is None else sums_2J).tolist()
        for place, (kept, asked) in enumerate(zip(kept_J, asked_J, strict=True)):
            if asked:
                self.kept_J[place] += (1.0 - DECAY) * (kept / asked - self.kept_J[place])
        self.forget()

    def forget(self) -> None:
        """Discard the sums added since the last step."""
        self.seen_2J = torch.zeros_like(self.seen_2J)

    def state_dict(self) -> dict[str, list[float]]:
        return {"kept": list(self.kept_J)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.kept_J = list(state["kept"])
