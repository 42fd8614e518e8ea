"""The shape of a token tree, and how the candidates of its nodes are chosen.

Shapes: N nodes (root not counted), N1 = N + 1, D depth, K candidates per node, R rows (any leading dimensions),
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from speculative.errors import UserError
from speculative.rules.sampling import sample

# A verify call of more tokens than this never pays; a shape that asks for it is a slip of the keyboard.
MAX_NODES = 1024


class TreeTensors(NamedTuple):
    """A tree as index tensors on one device; int64 unless said otherwise.

    parents_N: parent of node n + 1. depths_N1. ancestors_N1N1 (bool): entry (n, m) says that m is n or above n, so row
    n is what node n may attend to. paths_N1D: nodes from depth 1 down to the node itself, padded with 0.

    The rest serves `verify_tree`, which works family by family. inner_I: the nodes with children, most children first.
    inner_place_N1: where a node stands in inner_I, -1 for a leaf. children_IK: their children; a missing one is replaced
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
    """A static tree of drafted tokens. Node 0 is the root, the last committed token; parents[i] belongs to node i + 1.

    Nodes are numbered level by level, and siblings in the order in which they are drawn and tested. Raises UserError
    for anything else.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", tuple(self.parents))
        if not 1 <= len(self.parents) <= MAX_NODES:
            raise UserError(f"a token tree has {len(self.parents)} nodes: give it 1 to {MAX_NODES}")
        for node, parent in enumerate(self.parents, start=1):
            if not isinstance(parent, int) or not 0 <= parent < node:
                raise UserError(f"node {node} of the token tree has parent {parent!r}: must be one of 0..{node - 1}")
        if list(self.depths_N1) != sorted(self.depths_N1):
            raise UserError(f"token tree {self.parents}: number the nodes level by level, so that depths never fall")

    @classmethod
    def from_branching(cls, branching: Sequence[int]) -> TokenTree:
        """Every node of depth d has `branching[d]` children: (3, 2, 1) has 3 + 6 + 6 nodes, (1,) * gamma is a chain.

        Raises UserError for an empty shape, a number below 1 and a tree beyond MAX_NODES.
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
@torch.inference_mode(False)  # They outlive the decode call that asks first.
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
    tensors = TreeTensors(
        parents_N=torch.tensor(tree.parents),
        depths_N1=torch.tensor(tree.depths_N1),
        ancestors_N1N1=ancestors,
        paths_N1D=paths,
        inner_I=torch.tensor(tree.inner),
        inner_place_N1=inner_place,
        children_IK=torch.tensor(families),
        slots_N=slots,
    )
    return TreeTensors(*(tensor.to(device) for tensor in tensors))


def draw_children(draft_probs_RV: torch.Tensor, count: int, uniforms_RK: torch.Tensor) -> torch.Tensor:
    """Draw `count` candidates (*R, K) from each row by inverse transform, one uniform in [0, 1) each.

    The second comes from the row without the first, and so on; once a row has fewer tokens with mass than children,
    what follows is a token that cannot be drawn, which `verify_tree` takes for no candidate.
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
