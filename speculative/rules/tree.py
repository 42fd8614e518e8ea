"""Token trees: their shape, the candidates of their nodes, and the rule that decides which path the target keeps. Pure; randomness is
passed in.

Both rules read from the root down and from the first sibling to the last. All nodes are judged at once, as if each were reached, and then
the path is read: a few large operations instead of a small one for each sibling of each depth.

Shapes: B rows (R: any leading dimensions), N nodes (root not counted), N1 = N + 1, M the first nodes, as many as have draft rows, I nodes
with children, D depth, D1 = D + 1, K candidates per node, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from speculative.errors import UserError
from speculative.rules.sampling import sample

# A verify call of more tokens never pays; a larger shape is a typing error.
MAX_NODES = 1024


class TreeTensors(NamedTuple):
    """A tree as index tensors on one device; int64 unless said otherwise.

    parents_N: parent of node n + 1. depths_N1. ancestors_N1N1 (bool): entry (n, m) says that m is n or above n, so row
    n is what node n may attend to. paths_N1D: nodes from depth 1 down to the node itself, padded with 0.

    The rest serves `verify_tree`, which works family by family. inner_I: the nodes with children, most children first.
    inner_place_N1: position of a node in inner_I, -1 for a leaf. children_IK: their children; a missing one is replaced
    by the first, and so is a repeat that cannot pass. slots_N: place of node n + 1 in the flattened (I, K) layout.
    """

    parents_N: torch.Tensor
    depths_N1: torch.Tensor
    ancestors_N1N1: torch.Tensor
    paths_N1D: torch.Tensor
    inner_I: torch.Tensor
    inner_place_N1: torch.Tensor
    children_IK: torch.Tensor
    slots_N: torch.Tensor


@dataclass(frozen=True)
class TokenTree:
    """A static tree of drafted tokens. Node 0 is the root, the last committed token; parents[i] belongs to node i + 1. Nodes are numbered
    level by level, and siblings in the order in which they are drawn and tested. Raises UserError for anything else.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", tuple(self.parents))
        if not 1 <= len(self.parents) <= MAX_NODES:
            raise UserError(f"a token tree has {len(self.parents)} nodes: must be 1 to {MAX_NODES}")
        for node, parent in enumerate(self.parents, start=1):
            if not isinstance(parent, int) or not 0 <= parent < node:
                raise UserError(f"node {node} of the token tree has parent {parent!r}: must be one of 0..{node - 1}")
        if list(self.depths_N1) != sorted(self.depths_N1):
            raise UserError(f"token tree {self.parents}: list the nodes level by level, so that depths never decrease")

    @classmethod
    def from_branching(cls, branching: Sequence[int]) -> TokenTree:
        """Every node of depth d has `branching[d]` children: (3, 2, 1) has 3 + 6 + 6 nodes, (1,) * gamma is a chain. Raises UserError for
        an empty shape, a number below 1 and a tree beyond MAX_NODES.
        """
        shape = tuple(branching)
        if not shape or any(not isinstance(count, int) or count < 1 for count in shape):
            raise UserError(f"token tree {shape}: give one positive number of candidates for each depth, as in 3, 2, 1")
        widths = [math.prod(shape[: depth + 1]) for depth in range(len(shape))]
        if sum(widths) > MAX_NODES:
            raise UserError(f"token tree {shape} has {sum(widths)} nodes: at most {MAX_NODES}, give fewer candidates")
        parents: list[int] = []
        level = [0]
        for count in shape:
            parents += [node for node in level for _ in range(count)]
            level = list(range(level[-1] + 1, len(parents) + 1))
        return cls(tuple(parents))

    @property
    def size(self) -> int:
        """Nodes without the root."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return self.depths_N1[-1]

    @cached_property
    def depths_N1(self) -> tuple[int, ...]:
        """Depth of every node; the root has 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of every node, in the order in which they are tested."""
        children: list[list[int]] = [[] for _ in range(self.size + 1)]
        for node, parent in enumerate(self.parents, start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes of every depth, the root's level included: levels[0] is (0,)."""
        levels: list[list[int]] = [[] for _ in range(self.depth + 1)]
        for node, depth in enumerate(self.depths_N1):
            levels[depth].append(node)
        return tuple(map(tuple, levels))

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """Nodes that have children, most children first."""
        inner = [node for node, children in enumerate(self.children) if children]
        return tuple(sorted(inner, key=lambda node: -len(self.children[node])))

    @cached_property
    def family_counts(self) -> tuple[int, ...]:
        """For each sibling number 0..K-1, how many nodes have such a child: the first that many of `inner`."""
        sizes = [len(self.children[node]) for node in self.inner]
        return tuple(sum(size > place for size in sizes) for place in range(sizes[0]))

    @property
    def max_children(self) -> int:
        """The most children that one node has."""
        return len(self.family_counts)

    def on(self, device: torch.device) -> TreeTensors:
        """The tree as tensors on a device, copied there once: later calls neither copy nor wait."""
        return _tensors(self, device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # The tensors outlive the decode call that creates them.
def _tensors(tree: TokenTree, device: torch.device) -> TreeTensors:
    size = tree.size
    ancestors = torch.eye(size + 1, dtype=torch.bool)
    paths = torch.zeros(size + 1, tree.depth, dtype=torch.int64)
    for node, parent in enumerate(tree.parents, start=1):
        ancestors[node] |= ancestors[parent]
        paths[node] = paths[parent]
        paths[node, tree.depths_N1[node] - 1] = node
    inner_place = torch.full((size + 1,), -1)
    slots = torch.zeros(size, dtype=torch.int64)
    families = []
    for place, node in enumerate(tree.inner):
        children = tree.children[node]
        inner_place[node] = place
        families.append([*children, *[children[0]] * (tree.max_children - len(children))])
        for sibling, child in enumerate(children):
            slots[child - 1] = place * tree.max_children + sibling
    parents, depths, inner, kin = map(torch.tensor, (tree.parents, tree.depths_N1, tree.inner, families))
    tensors = parents, depths, ancestors, paths, inner, inner_place, kin, slots
    return TreeTensors(*(tensor.to(device) for tensor in tensors))


def draw_children(draft_probs_RV: torch.Tensor, count: int, uniforms_RK: torch.Tensor) -> torch.Tensor:
    """Draw `count` candidates (*R, K) from each row without replacement by inverse transform, one uniform in [0, 1) each. Once a row has
    fewer tokens with mass than children, what follows is a token that cannot be drawn, which `verify_tree` takes for no candidate.
    Different nodes of one depth may share their uniforms: at most one of them is on the path that is kept.
    """
    ids, draft_probs_RV = [], draft_probs_RV.clone()
    for place in range(count):
        # A row without mass gives some id.
        drawn_R = sample(draft_probs_RV, uniforms_RK[..., place])
        ids.append(drawn_R)
        if place + 1 < count:
            draft_probs_RV.scatter_(-1, drawn_R.unsqueeze(-1), 0.0)
    return torch.stack(ids, -1)


def top_children(logits_RV: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` most likely tokens (*R, K), most likely first: fixed candidates, which need no draft rows."""
    return logits_RV.topk(count, dim=-1).indices


class VerifiedTree(NamedTuple):
    """Outcome of one tree.

    accepted_B: how many drafted tokens are kept, 0..D. path_BD: their nodes by depth, 0 after accepted_B. next_ids_B: the token that
    follows them. accept_probs_BDK: probability, given the candidates, that the walk goes on from the path's node of depth d to the k-th
    of them, 0 at depths that were not reached.
    """

    accepted_B: torch.Tensor
    path_BD: torch.Tensor
    next_ids_B: torch.Tensor
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

    target_probs_BN1V[:, n] is the target's row after node n, draft_probs_BMV[:, n] the row that n's children were drawn from by
    `draw_children`; M may be anything from the number of the last parent + 1 up to N1. At a node, the first child passes as in `verify`;
    when it fails, the target is replaced by the normalised residual max(target - draft, 0), the draft by its row without that child,
    renormalised, and the next child is tested. When all fail, the last residual gives the next token.

    None for the draft: the children are fixed candidates (the draft's most likely tokens, say). A draw from the target is followed if it
    is among the children; it is made with the coin of the first sibling alone, and completed by the residual uniform when it is none of
    them.

    coins_BDK[:, d, k] is the coin of sibling k at depth d; residual_uniforms_BD1[:, a] draws the token after a kept tokens. Candidates of
    target probability 0 never pass, whatever the coin; those of draft probability 0 and repeats count as absent. A chain gives what
    `verify` gives.
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
    # target's own row is used.
    failed_B1 = (residual_BV.sum(-1, keepdim=True) > 0) & (place_B >= 0).unsqueeze(-1)
    next_probs_BV = torch.where(failed_B1, residual_BV, target_probs_BN1V[rows_B, stop_B])
    next_ids_B = sample(next_probs_BV, residual_uniforms_BD1[rows_B, accepted_B])

    places_BD = tensors.inner_place_N1[pad(path_BD[:, :-1], (1, 0))]
    reached_BD = (torch.arange(tree.depth, device=path_BD.device) <= accepted_B.unsqueeze(-1)) & (places_BD >= 0)
    accept_probs_BDK = judged.accept_probs_BIK[rows_B.unsqueeze(-1), places_BD] * reached_BD.unsqueeze(-1)
    return VerifiedTree(accepted_B, path_BD, next_ids_B, accept_probs_BDK)


def verify_tree_greedy(
    tree: TokenTree, target_ids_BN1: torch.Tensor, node_ids_BN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first three of `verify_tree` at temperature 0, from the target's argmax after every node, without rows of V. Of equal siblings
    the one that leads deepest is taken.
    """
    tensors = tree.on(node_ids_BN.device)
    stop_B = _deepest(tensors, target_ids_BN1[:, tensors.parents_N] == node_ids_BN)
    next_ids_B = target_ids_BN1.gather(1, stop_B.unsqueeze(-1)).squeeze(-1)
    return tensors.depths_N1[stop_B], tensors.paths_N1D[stop_B], next_ids_B


class _Judged(NamedTuple):
    """All families of the tree, whether reached or not. passes_BIK: which children pass; the first of them is followed. accept_probs_BIK:
    probability that it is this one. residual_BIV: unnormalised row of the next token where all fail; None where it is the target's without
    the children.
    """

    passes_BIK: torch.Tensor
    accept_probs_BIK: torch.Tensor
    residual_BIV: torch.Tensor | None


def _judge_fixed(target_BIV: torch.Tensor, ids_BIK: torch.Tensor, coins_BIK: torch.Tensor) -> _Judged:
    probs_BIK = target_BIV.gather(-1, ids_BIK) * ~_repeats(ids_BIK)
    # One coin falls into the slice of one child, or after all of them. A parallel scan may give an empty slice a width.
    passes_BIK = (coins_BIK[..., :1] < probs_BIK.cumsum(-1, dtype=torch.float64)) & (probs_BIK > 0)
    return _Judged(passes_BIK, probs_BIK, None)


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
    return _Judged(passes_BIK, alone_BIK * failed_before_BIK, residual_BIV)


def _masses(tree: TokenTree, draft_BIV: torch.Tensor, ids_BIK: torch.Tensor, offered_BIK: torch.Tensor) -> torch.Tensor:
    """Mass of the draft's row that each child was drawn from, (B, I, K) or broadcastable to it."""
    if tree.max_children == 1:
        return torch.ones_like(offered_BIK[..., :1])
    # Summed upwards from the tokens not drawn. One minus the drawn mass would be mostly rounding when little mass is left.
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
