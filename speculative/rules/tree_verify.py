"""The rule that decides which path of a token tree the target keeps. Pure functions; randomness is passed in.

Both rules read from the root down and from the first sibling to the last, so what is kept down to depth d is a function
of the drafts and coins down to d: numbers of deeper positions may be used again in the next block (see `row_uniforms`).

Every node of the tree is judged at once, as if the walk came by it, and then the path is read off: a handful of large
operations instead of a small one for each sibling of each depth.

Shapes: B rows, N nodes (root not counted), N1 = N + 1, M the first nodes, as many as have draft rows, I nodes with
children, D depth, D1 = D + 1, K most children of a node, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from speculative.rules.sampling import sample
from speculative.rules.tree import TokenTree, TreeTensors


class VerifiedTree(NamedTuple):
    """Outcome of one tree.

    accepted_B: how many drafted tokens are kept, 0..D. path_BD: their nodes by depth, 0 behind accepted_B. next_ids_B:
    the token that follows them. overlap_BD: at the path's node of depth d, sum_v min(target, draft) for drawn
    candidates, the target's mass on all candidates together for fixed ones. accept_probs_BDK: probability, given the
    candidates, that the walk goes on from there to the k-th of them; its sum over k is the probability to go on at all.
    Both are 0 at depths that were not reached.
    """

    accepted_B: torch.Tensor
    path_BD: torch.Tensor
    next_ids_B: torch.Tensor
    overlap_BD: torch.Tensor
    accept_probs_BDK: torch.Tensor


def verify_tree(
    tree: TokenTree,
    target_probs_BN1V: torch.Tensor,
    node_ids_BN: torch.Tensor,
    draft_probs_BMV: torch.Tensor | None,
    coins_BDK: torch.Tensor,
    residual_uniforms_BD1: torch.Tensor,
) -> VerifiedTree:
    """Multi-candidate speculative sampling (SpecInfer, 2305.09781) of candidates drawn without replacement (2401.06706).

    target_probs_BN1V[:, n] is the target's row behind node n, draft_probs_BMV[:, n] the row that n's children were
    drawn from by `draw_children`. Leaves at the end have no children, so M may be anything from the number of the last
    parent + 1 up to N1. At a node, the first child passes as in `verify`; when it fails, the target is replaced by the
    normalised residual max(target - draft, 0), the draft by its row without that child, renormalised, and the next
    child is tested. When all fail, the last residual gives the next token.

    None for the draft: the children are fixed candidates (the draft's most likely tokens, say). A draw from the target
    is followed if it is among the children; it is made with the coin of the first sibling alone, and completed by the
    residual uniform when it is none of them.

    coins_BDK[:, d, k] is the coin of sibling k at depth d; residual_uniforms_BD1[:, a] draws the token behind a kept
    tokens. Candidates of target probability 0 never pass, whatever the coin; those of draft probability 0 and those
    that repeat a sibling count as absent. A chain gives what `verify` gives.
    """
    tensors = tree.on(node_ids_BN.device)
    ids_BIK = node_ids_BN[:, tensors.children_IK - 1]
    target_BIV = _inner_rows(tree, tensors, target_probs_BN1V)
    coins_BIK = coins_BDK[:, tensors.depths_N1[tensors.inner_I]]
    if draft_probs_BMV is None:
        judged = _judge_fixed(target_BIV, ids_BIK, coins_BIK)
    else:
        draft_BIV = _inner_rows(tree, tensors, draft_probs_BMV)
        judged = _judge_drawn(tree, target_BIV, draft_BIV, ids_BIK, coins_BIK)
    follows_BIK = judged.passes_BIK & (judged.passes_BIK.cumsum(-1) == 1)
    stop_B = _deepest(tensors, follows_BIK.flatten(1)[:, tensors.slots_N])
    path_BD, accepted_B = tensors.paths_N1D[stop_B], tensors.depths_N1[stop_B]

    rows_B = torch.arange(node_ids_BN.shape[0], device=node_ids_BN.device)
    place_B = tensors.inner_place_N1[stop_B]
    if judged.residual_BIV is None:
        first_B = place_B.clamp_min(0)
        residual_BV = target_BIV[rows_B, first_B].scatter_(1, ids_BIK[rows_B, first_B], 0.0)
    else:
        residual_BV = judged.residual_BIV[rows_B, place_B]
    # A leaf has no residual. Where nothing is left and yet every child failed (probability 0 in exact arithmetic), the
    # target's own row stands in.
    failed_B1 = (residual_BV.sum(-1, keepdim=True) > 0) & (place_B >= 0).unsqueeze(-1)
    next_probs_BV = torch.where(failed_B1, residual_BV, target_probs_BN1V[rows_B, stop_B])
    next_ids_B = sample(next_probs_BV, residual_uniforms_BD1[rows_B, accepted_B])

    places_BD = tensors.inner_place_N1[pad(path_BD[:, :-1], (1, 0))]
    reached_BD = (torch.arange(tree.depth, device=path_BD.device) <= accepted_B.unsqueeze(-1)) & (places_BD >= 0)
    overlap_BD = judged.overlap_BI.gather(1, places_BD.clamp_min(0)) * reached_BD
    accept_probs_BDK = judged.accept_probs_BIK[rows_B.unsqueeze(-1), places_BD] * reached_BD.unsqueeze(-1)
    return VerifiedTree(accepted_B, path_BD, next_ids_B, overlap_BD, accept_probs_BDK)


def verify_tree_greedy(tree: TokenTree, target_ids_BN1: torch.Tensor, node_ids_BN: torch.Tensor) -> VerifiedTree:
    """`verify_tree` at temperature 0, from the target's argmax behind every node: no row of V.

    Of equal siblings the one that leads deepest is taken; the text is the same.
    """
    tensors = tree.on(node_ids_BN.device)
    stop_B = _deepest(tensors, target_ids_BN1[:, tensors.parents_N] == node_ids_BN)
    path_BD = tensors.paths_N1D[stop_B]
    next_ids_B = target_ids_BN1.gather(1, stop_B.unsqueeze(-1)).squeeze(-1)
    # Slot of the node on the path, modulo K: its number among its siblings.
    kept_BD = path_BD > 0
    sibling_BD = tensors.slots_N[path_BD - 1] % tree.max_children
    siblings_K = torch.arange(tree.max_children, device=path_BD.device)
    taken_BDK = (siblings_K == sibling_BD.unsqueeze(-1)) & kept_BD.unsqueeze(-1)
    return VerifiedTree(tensors.depths_N1[stop_B], path_BD, next_ids_B, kept_BD.float(), taken_BDK.float())


class _Judged(NamedTuple):
    """Every family of the tree, whether the walk comes by it or not.

    passes_BIK: which children pass; the first of them is followed. accept_probs_BIK: probability that it is this one.
    residual_BIV: unnormalised row of the next token where all fail; None where it is the target's without the children.
    """

    passes_BIK: torch.Tensor
    accept_probs_BIK: torch.Tensor
    overlap_BI: torch.Tensor
    residual_BIV: torch.Tensor | None


def _judge_fixed(target_BIV: torch.Tensor, ids_BIK: torch.Tensor, coins_BIK: torch.Tensor) -> _Judged:
    probs_BIK = target_BIV.gather(-1, ids_BIK) * ~_repeats(ids_BIK)
    # One coin falls into the slice of one child, or behind them all. A parallel scan may give an empty slice a width.
    passes_BIK = (coins_BIK[..., :1] < probs_BIK.cumsum(-1, dtype=torch.float64)) & (probs_BIK > 0)
    return _Judged(passes_BIK, probs_BIK, probs_BIK.sum(-1), None)


def _judge_drawn(
    tree: TokenTree,
    target_BIV: torch.Tensor,
    draft_BIV: torch.Tensor,
    ids_BIK: torch.Tensor,
    coins_BIK: torch.Tensor,
) -> _Judged:
    tiny = torch.finfo(target_BIV.dtype).tiny
    offered_BIK = draft_BIV.gather(-1, ids_BIK)
    real_BIK = (offered_BIK > 0) & ~_repeats(ids_BIK)
    # Rows are not kept normalised: the draft's is scaled to be as heavy as what is left of the target's. A child that is
    # not real takes nothing away. The first child is tested as in `verify`, with both rows as they came.
    inverse_mass_BIK = real_BIK / _masses(tree, draft_BIV, ids_BIK, offered_BIK * real_BIK).clamp_min(tiny)
    scale_BI = real_BIK[..., 0].to(target_BIV.dtype)
    scales, wanted = [scale_BI], [target_BIV.gather(-1, ids_BIK[..., :1]).squeeze(-1)]
    residual_BIV = torch.addcmul(target_BIV, draft_BIV, scale_BI.unsqueeze(-1), value=-1).clamp_min_(0.0)
    left_BI = residual_BIV.sum(-1)
    overlap_BI = (1.0 - left_BI).clamp_min_(0.0)
    for place, count in enumerate(tree.family_counts[1:], start=1):
        # The first `count` families have such a child. Tokens of earlier siblings need not be taken out of the draft's
        # row: where they failed, nothing of them is left in the residual.
        rest_BIV = residual_BIV[:, :count]
        scale_BI = left_BI[:, :count] * inverse_mass_BIK[:, :count, place]
        scales.append(pad(scale_BI, (0, len(tree.inner) - count)))
        wanted_BI = rest_BIV.gather(-1, ids_BIK[:, :count, place : place + 1]).squeeze(-1)
        wanted.append(pad(wanted_BI, (0, len(tree.inner) - count)))
        rest_BIV.addcmul_(draft_BIV[:, :count], scale_BI.unsqueeze(-1), value=-1).clamp_min_(0.0)
        if place + 1 < tree.max_children:
            left_BI = rest_BIV.sum(-1)
    wanted_BIK, scaled_BIK = torch.stack(wanted, -1), offered_BIK * torch.stack(scales, -1)
    passes_BIK = (coins_BIK * scaled_BIK < wanted_BIK) & (scaled_BIK > 0)
    alone_BIK = (wanted_BIK / scaled_BIK.clamp_min(tiny)).clamp_max_(1.0) * (scaled_BIK > 0)
    failed_before_BIK = pad((1.0 - alone_BIK[..., :-1]).cumprod(-1), (1, 0), value=1.0)
    return _Judged(passes_BIK, alone_BIK * failed_before_BIK, overlap_BI, residual_BIV)


def _masses(tree: TokenTree, draft_BIV: torch.Tensor, ids_BIK: torch.Tensor, offered_BIK: torch.Tensor) -> torch.Tensor:
    """Mass of the draft's row that each child was drawn from, (B, I, K) or broadcastable to it."""
    if tree.max_children == 1:
        return torch.ones_like(offered_BIK[..., :1])
    # Summed from what nobody drew upwards. One minus what was drawn would be all rounding on a row nearly exhausted.
    count = tree.family_counts[1]
    undrawn_BI = draft_BIV[:, :count].scatter(-1, ids_BIK[:, :count], 0.0).sum(-1)
    undrawn_BI = pad(undrawn_BI, (0, len(tree.inner) - count))
    return undrawn_BI.unsqueeze(-1) + offered_BIK.flip(-1).cumsum(-1).flip(-1)


def _repeats(ids_BIK: torch.Tensor) -> torch.Tensor:
    """Bool (B, I, K): an earlier sibling is the same token."""
    return (ids_BIK.unsqueeze(-1) == ids_BIK.unsqueeze(-2)).tril(-1).any(-1)


def _inner_rows(tree: TokenTree, tensors: TreeTensors, probs_BN1V: torch.Tensor) -> torch.Tensor:
    """Rows (B, I, V) of the nodes with children; no copy where they come first, as in every tree that narrows."""
    count = len(tree.inner)
    in_order = tree.inner == tuple(range(count))
    return probs_BN1V[:, :count] if in_order else probs_BN1V[:, tensors.inner_I]


def _deepest(tensors: TreeTensors, taken_BN: torch.Tensor) -> torch.Tensor:
    """The deepest node that was taken together with all above it; the root when there is none."""
    broken_BN1 = (~taken_BN.unsqueeze(1) & tensors.ancestors_N1N1[:, 1:]).any(-1)
    return tensors.depths_N1.masked_fill(broken_BN1, 0).argmax(-1)
