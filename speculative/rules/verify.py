"""The rules that decide which drafted tokens the target keeps. Pure functions; randomness is passed in.

Speculative sampling (`verify`) tests each token on its own. Block verification (`verify_block`, arXiv 2403.10444) carries the ratio target
/ draft along the block and cuts it as a whole, so that no rule which is lossless for every pair emits more tokens a block in expectation.
Every block needs uniforms of its own (see `block_uniforms`): a later block that used a number again would be biased
as soon as its width, or
here how much of this block is kept, depends on a discarded token.

Shapes: B rows, G drafted tokens (gamma), G1 = G + 1, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from speculative.errors import UserError
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings, sample


class Verified(NamedTuple):
    """Outcome of one block. accepted_B: how many drafted tokens are kept, 0..G. next_ids_B: the token that follows them (correction or
    bonus). accept_probs_BG: probability that the drafted token passes, were it reached.
    """

    accepted_B: torch.Tensor
    next_ids_B: torch.Tensor
    accept_probs_BG: torch.Tensor


def draft_settings_for(rule: Rule, settings: SamplingSettings) -> SamplingSettings:
    """Settings the draft samples under: the target's, its temperature alone, or those of its argmax. Raises
    UserError for rule `greedy` with
    a temperature above 0 (the target would sample: that is `greedy-draft`).
    """
    if rule.greedy and not settings.greedy:
        raise UserError(
            f"rule = 'greedy' needs temperature 0, not {settings.temperature}: "
            "set temperature to 0, or use rule 'greedy-draft' for a sampling target"
        )
    if not rule.truncated:
        return SamplingSettings(settings.temperature)
    return settings if rule.draws else GREEDY


def accept_probability(target_prob: torch.Tensor, draft_prob: torch.Tensor) -> torch.Tensor:
    """min(1, target / draft) of the drafted token, elementwise; 2211.17192 Algorithm 1. 0 where the target has 0."""
    return (target_prob / draft_prob.clamp_min(torch.finfo(draft_prob.dtype).tiny)).clamp_max_(1.0)


def residual_probs(target_probs_BV: torch.Tensor, draft_probs_BV: torch.Tensor) -> torch.Tensor:
    """Unnormalised max(target - draft, 0), the distribution of the correction; 2211.17192 Algorithm 1. Where nothing is left (target =
    draft up to rounding) the target's own row is returned.
    """
    residual_BV = (target_probs_BV - draft_probs_BV).clamp_min(0.0)
    return torch.where(residual_BV.sum(-1, keepdim=True) > 0, residual_BV, target_probs_BV)


def verify(
    target_probs_BG1V: torch.Tensor,
    draft_ids_BG: torch.Tensor,
    draft_probs_BGV: torch.Tensor | None,
    coins_BG: torch.Tensor,
    residual_uniforms_BG1: torch.Tensor,
    drafted_B: torch.Tensor | None = None,
    lenience: float = 1.0,
) -> Verified:
    """Speculative sampling, 2211.17192 Algorithm 1, for every rule: greedy choices are one-hot rows.

    `draft_probs_BGV` must be the probabilities the ids were drawn from; None means one-hot rows at `draft_ids_BG`
    (a draft that takes its argmax), without building them. Token j passes when coin * draft < target, so a target
    probability of 0 is never accepted, whatever the coin. `residual_uniforms_BG1[:, j]` draws the token that replaces
    a rejected j, or the bonus token at j = G. G may be 0: plain sampling from the target. `drafted_B`: how many of the
    G tokens are real in each row, the bonus token following the last of them; None = all. It may depend on committed
    text and on the tokens it keeps, never on a later token of the block. `lenience`: see `Rule`.
    """
    gamma = draft_ids_BG.shape[1]
    rows_B = torch.arange(draft_ids_BG.shape[0], device=draft_ids_BG.device)
    drafted_BG1 = draft_ids_BG.unsqueeze(-1)
    target_prob_BG = target_probs_BG1V[:, :gamma].gather(-1, drafted_BG1).squeeze(-1)
    bounds_BG = lenience * target_prob_BG
    if draft_probs_BGV is None:
        passes_BG = coins_BG < bounds_BG
        accept_probs_BG = bounds_BG.clamp_max(1.0)
    else:
        draft_prob_BG = draft_probs_BGV.gather(-1, drafted_BG1).squeeze(-1)
        passes_BG = coins_BG * draft_prob_BG < bounds_BG
        accept_probs_BG = accept_probability(bounds_BG, draft_prob_BG)

    if drafted_B is not None:
        passes_BG &= torch.arange(gamma, device=passes_BG.device) < drafted_B.unsqueeze(-1)
    accepted_B = passes_BG.cumprod(-1, dtype=torch.int64).sum(-1)

    # Only one position a row needs its residual: the first rejected one, or the bonus position with no draft at all.
    next_probs_BV = target_probs_BG1V[rows_B, accepted_B]
    if gamma > 0:
        reached_B = accepted_B.clamp_max(gamma - 1)
        rejected_B1 = (accepted_B < (gamma if drafted_B is None else drafted_B)).unsqueeze(-1)
        if draft_probs_BGV is None:
            # The rejected candidate had all of the draft's mass, so the residual is the target without its bound: without it, if lossless.
            rejected_ids_B1 = draft_ids_BG[rows_B, reached_B].unsqueeze(-1)
            taken_B1 = bounds_BG[rows_B, reached_B].unsqueeze(-1) * rejected_B1
            left_B1 = (next_probs_BV.gather(-1, rejected_ids_B1) - taken_B1).clamp_min(0.0)
            residual_BV = next_probs_BV.scatter(-1, rejected_ids_B1, left_B1)
            next_probs_BV = torch.where(residual_BV.sum(-1, keepdim=True) > 0, residual_BV, next_probs_BV)
        else:
            next_probs_BV = residual_probs(next_probs_BV, draft_probs_BGV[rows_B, reached_B] * rejected_B1)
    next_ids_B = sample(next_probs_BV, residual_uniforms_BG1[rows_B, accepted_B])
    return Verified(accepted_B, next_ids_B, accept_probs_BG)


def verify_greedy(
    target_ids_BG1: torch.Tensor, draft_ids_BG: torch.Tensor, drafted_B: torch.Tensor | None = None
) -> Verified:
    """`verify` for one-hot target and draft rows given by their ids alone: the same outcome without any row of V."""
    gamma = draft_ids_BG.shape[1]
    matches_BG = target_ids_BG1[:, :gamma] == draft_ids_BG
    passes_BG = matches_BG
    if drafted_B is not None:
        passes_BG = matches_BG & (torch.arange(gamma, device=matches_BG.device) < drafted_B.unsqueeze(-1))
    accepted_B = passes_BG.cumprod(-1, dtype=torch.int64).sum(-1)
    next_ids_B = target_ids_BG1.gather(1, accepted_B.unsqueeze(-1)).squeeze(-1)
    return Verified(accepted_B, next_ids_B, matches_BG.float())


def lenient_ids(
    lenience: float, logits_RV: torch.Tensor, target_R: torch.Tensor, drafted_R: torch.Tensor
) -> torch.Tensor:
    """Temperature 0: the drafted ids where lenience keeps them, else the target's."""
    probs_RV = logits_RV.float().softmax(-1)
    bounds_R = lenience * probs_RV.gather(-1, drafted_R.unsqueeze(-1)).squeeze(-1)
    return torch.where(bounds_R > probs_RV.amax(-1), drafted_R, target_R)


# Logarithms and derived values are (B, G), so float64 is cheap.
TINY = torch.finfo(torch.float64).tiny


def verify_block(
    target_probs_BG1V: torch.Tensor,
    draft_ids_BG: torch.Tensor,
    draft_probs_BGV: torch.Tensor | None,
    coins_BG: torch.Tensor,
    residual_uniforms_BG1: torch.Tensor,
    drafted_B: torch.Tensor | None = None,
) -> Verified:
    """Keep the longest prefix whose coin passes; 2403.10444 Algorithm 2. Same arguments and result as `verify`.

    With weight_0 = 1 and weight_i = min(1, weight_(i-1) * target(x_i) / draft(x_i)), a prefix of i tokens passes when its coin is under
    accept_probs_BG[:, i - 1], the paper's h_i: weight_G for the whole block, and otherwise left / (left + 1 - weight_i) with left = sum_v
    max(weight_i * target - draft, 0) at the position after it. The token after the longest passing prefix comes from that residual, not
    from the token-wise one, or from the target's row after a whole block. A prefix of target probability 0 has h = 0 and never passes,
    whatever the coin.
    """
    gamma = draft_ids_BG.shape[1]
    device = draft_ids_BG.device
    rows_B = torch.arange(draft_ids_BG.shape[0], device=device)
    if gamma == 0:
        nothing_B0 = target_probs_BG1V[:, 0, :0]
        next_ids_B = sample(target_probs_BG1V[:, 0], residual_uniforms_BG1[:, 0])
        return Verified(torch.zeros_like(rows_B), next_ids_B, nothing_B0)

    tested_probs_BGV = target_probs_BG1V[:, :gamma]
    weights_BG, target_prob_BG = _weights(tested_probs_BGV, draft_ids_BG, draft_probs_BGV)
    weights_before_BG = pad(weights_BG[:, :-1], (1, 0), value=1.0)
    if draft_probs_BGV is None:
        # What is left of weight * target where one token is taken out whole: weight <= 1, so nothing else is touched.
        left_BG = weights_before_BG * (1.0 - target_prob_BG)
    else:
        scale_BG1 = weights_before_BG.to(tested_probs_BGV.dtype).unsqueeze(-1)
        residual_BGV = (tested_probs_BGV * scale_BG1).sub_(draft_probs_BGV).clamp_min_(0.0)
        left_BG = residual_BGV.sum(-1)

    # Written as 1 - spare / (left + spare), h is exactly 0 where nothing is left and exactly 1 where weight is 1.
    spare_BG = 1.0 - weights_BG[:, :-1]
    accept_BG = torch.cat((1.0 - spare_BG / (left_BG[:, 1:] + spare_BG).clamp_min(TINY), weights_BG[:, -1:]), 1)
    counts_G = torch.arange(1, gamma + 1, device=device)
    last_B1: int | torch.Tensor = gamma
    if drafted_B is not None:
        last_B1 = drafted_B.unsqueeze(-1)
        accept_BG = torch.where(counts_G == last_B1, weights_BG, accept_BG).mul_(counts_G <= last_B1)
    accepted_B = ((coins_BG < accept_BG) * counts_G).amax(-1)

    behind_B = accepted_B.clamp_max(gamma - 1)
    if draft_probs_BGV is None:
        cut_ids_B1 = draft_ids_BG[rows_B, behind_B].unsqueeze(-1)
        correction_BV = tested_probs_BGV[rows_B, behind_B].scatter_(1, cut_ids_B1, 0.0)
        mass_B1 = correction_BV.sum(-1, keepdim=True)
    else:
        correction_BV = residual_BGV[rows_B, behind_B]
        mass_B1 = left_BG[rows_B, behind_B].unsqueeze(-1)
    # A cut where nothing is left has probability 0 in exact arithmetic; after rounding, the target's own row is used.
    cut_B1 = (accepted_B.unsqueeze(-1) < last_B1) & (mass_B1 > 0)
    next_probs_BV = torch.where(cut_B1, correction_BV, target_probs_BG1V[rows_B, accepted_B])
    next_ids_B = sample(next_probs_BV, residual_uniforms_BG1[rows_B, accepted_B])
    return Verified(accepted_B, next_ids_B, accept_BG.to(tested_probs_BGV.dtype))


def _weights(
    tested_probs_BGV: torch.Tensor, draft_ids_BG: torch.Tensor, draft_probs_BGV: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight_1 .. weight_G in float64, the target's probability of each drafted token)."""
    drafted_BG1 = draft_ids_BG.unsqueeze(-1)
    target_prob_BG = tested_probs_BGV.gather(-1, drafted_BG1).squeeze(-1)
    if draft_probs_BGV is None:
        return target_prob_BG.double().cumprod(-1), target_prob_BG
    draft_prob_BG = draft_probs_BGV.gather(-1, drafted_BG1).squeeze(-1)
    # The recursion is a random walk that is held at 0 from above: its value is the free walk minus its highest point so
    # far (the start, 0, included). One scan instead of G steps.
    ratio_BG = target_prob_BG.double() / draft_prob_BG.clamp_min(torch.finfo(draft_prob_BG.dtype).tiny)
    walk_BG = ratio_BG.log().cumsum(-1)
    return (walk_BG - walk_BG.cummax(-1).values.clamp_min(0.0)).exp(), target_prob_BG
