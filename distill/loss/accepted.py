"""The expected accepted length of a block along the target's own text, and the weights of its gradient. Pure functions.

A block that starts at row t and drafts gamma tokens keeps the first j of them with probability E prod_{i<j} a_(t+i). The expectation is over
text of the target, and a = min(1, draft / target) at the text's token (arXiv 2211.17192: sum_v draft min(1, target / draft) = sum_v target
min(1, draft / target), applied token by token). So

    L_t = sum_{j=1..gamma} a_t a_(t+1) .. a_(t+j-1)        (cut where the text ends)

is an unbiased estimate of the accepted length. The text is fixed during training, so its gradient is an ordinary derivative and needs no
REINFORCE. Credit and baseline come from policy gradients (TVD++, arXiv 2403.00858, which uses samples of the draft). Let
reach_k = a_(s-k) .. a_(s-1) be the probability that a block that started k rows earlier reaches row s. Let value_m = 1 + a_(s+1)
value_(m-1)(s + 1) with value_0 = 1 be the length still to gain there. Then

    d (sum_t L_t) / d a_s = G_s = sum_{k<gamma} reach_k value_(gamma-1-k).

The value is known for the text's token only. A baseline b_m that depends only on the text before s replaces it for all tokens, here
sum_{i<=m} alpha_s^i with the row's own overlap alpha_s = E a_s. With D_s = sum_k reach_k b_(gamma-1-k)

    gradient of sum_s  D_s alpha_s + (G_s - D_s) a_s        (D and G held fixed)

has the same expectation. Except for the correction term it is dense in the vocabulary. At gamma 1 it is the gradient of 1 - TV.

Legend: R rows (response tokens), one text after the other.
"""

import torch
from torch import Tensor


def rows_follow(rows_R: Tensor) -> Tensor:
    """(R,) bool: the row before is the position before in the same text. `rows_R`: see `data.batches.collate.Batch`."""
    return torch.cat([rows_R.new_zeros(1), rows_R.diff() == 1])[: len(rows_R)].bool()


def accepted_lengths(accept_R: Tensor, follows_R: Tensor, gamma: int) -> Tensor:
    """L_t of the block that starts at each row, 0..gamma. (R,)"""
    return accept_R * _values(accept_R, follows_R, gamma)[-1]


def credits(accept_R: Tensor, alpha_R: Tensor, follows_R: Tensor, gamma: int) -> tuple[Tensor, Tensor]:
    """(D, G) of each row: the weight of its overlap, and of its text's token before the baseline is subtracted. (R,) each."""
    values, reach_R = _values(accept_R, follows_R, gamma), torch.ones_like(accept_R)
    baselines = [torch.ones_like(alpha_R)]
    for _ in range(gamma - 1):
        baselines.append(1.0 + alpha_R * baselines[-1])
    dense_R, gain_R = torch.zeros_like(accept_R), torch.zeros_like(accept_R)
    for slots in reversed(range(gamma)):
        dense_R, gain_R = dense_R + reach_R * baselines[slots], gain_R + reach_R * values[slots]
        reach_R = (reach_R * accept_R).roll(1).where(follows_R, 0.0)
    return dense_R, gain_R


def _values(accept_R: Tensor, follows_R: Tensor, gamma: int) -> list[Tensor]:
    """value_0 .. value_(gamma-1) of each row."""
    goes_on_R = torch.cat([follows_R[1:], follows_R.new_zeros(1)])[: len(follows_R)]
    values = [torch.ones_like(accept_R)]
    for _ in range(gamma - 1):
        values.append(1.0 + (accept_R * values[-1]).roll(-1).where(goes_on_R, 0.0))
    return values
