"""Token trees: their shape against a slow reading of it, and the candidates drawn for their nodes."""

import pytest
import torch
from hypothesis import given
from table_models import token_trees

from speculative.errors import UserError
from speculative.rules.tree import MAX_NODES, TokenTree, draw_children, top_children


def test_from_branching_counts_every_level():
    tree = TokenTree.from_branching((3, 2, 1))
    assert tree.parents == (0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9)
    assert (tree.size, tree.depth, tree.max_children) == (15, 3, 3)
    assert tree.levels == ((0,), (1, 2, 3), (4, 5, 6, 7, 8, 9), (10, 11, 12, 13, 14, 15))
    assert tree.children[:4] == ((1, 2, 3), (4, 5), (6, 7), (8, 9))
    assert tree.family_counts == (10, 4, 1)
    assert TokenTree.from_branching([1] * 4).parents == (0, 1, 2, 3)
    assert TokenTree.from_branching([1, 3]).inner == (1, 0)


@given(tree=token_trees(max_nodes=12))
def test_every_view_of_the_shape_agrees_with_the_parents(tree):
    def above(node):
        return [] if node == 0 else [*above(tree.parents[node - 1]), node]

    tensors = tree.on(torch.device("cpu"))
    for node in range(tree.size + 1):
        path = above(node)
        assert tree.depths_N1[node] == len(path)
        assert node in tree.levels[len(path)]
        assert tensors.ancestors_N1N1[node].nonzero().flatten().tolist() == [0, *path]
        assert tensors.paths_N1D[node].tolist() == path + [0] * (tree.depth - len(path))
        assert all(tree.parents[child - 1] == node for child in tree.children[node])
    assert sorted(child for children in tree.children for child in children) == list(range(1, tree.size + 1))
    assert tree.max_children == max(map(len, tree.children))
    assert tensors.children_IK.flatten()[tensors.slots_N].tolist() == list(range(1, tree.size + 1))
    for node, family in zip(tree.inner, tensors.children_IK.tolist(), strict=True):
        missing = tree.max_children - len(tree.children[node])
        assert family == [*tree.children[node], *[tree.children[node][0]] * missing]
    assert tensors.inner_I[tensors.inner_place_N1[list(tree.inner)]].tolist() == list(tree.inner)
    assert tree.on(torch.device("cpu")) is tensors, "copied once"


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), "0 nodes"),
        ((0,) * (MAX_NODES + 1), "1025 nodes"),
        ((0, 2), "node 2 .* parent 2"),
        ((0, -1), "node 2 .* parent -1"),
        ((0, 0.5), r"node 2 .* parent 0\.5"),
        ((0, 1, 0), "level by level"),
    ],
)
def test_nonsense_parents_are_refused(parents, message):
    with pytest.raises(UserError, match=message):
        TokenTree(parents)


@pytest.mark.parametrize("branching", [(), (0,), (2, 0), (2, -1), (1.5,), ("3",), (10, 10, 10, 10), (2,) * 64])
def test_nonsense_branching_is_refused(branching):
    with pytest.raises(UserError, match="token tree"):
        TokenTree.from_branching(branching)


def test_children_are_drawn_from_the_row_and_then_from_what_is_left_of_it():
    grid = 600
    probs = torch.tensor([0.5, 0.0, 0.2, 0.3], dtype=torch.float64)
    points = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    uniforms = torch.cartesian_prod(points, points)
    ids = draw_children(probs.expand(len(uniforms), 4), 2, uniforms)
    shares = torch.bincount(ids[:, 0] * 4 + ids[:, 1], minlength=16).view(4, 4) / len(uniforms)
    expected = (probs[:, None] * probs[None, :] / (1 - probs[:, None])).fill_diagonal_(0.0)
    torch.testing.assert_close(shares, expected.float(), rtol=0, atol=2 / grid)  # the grid
    assert torch.equal(shares > 0, expected > 0)


def test_an_exhausted_row_repeats_itself_and_never_leaves_the_vocabulary():
    probs = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    before = probs.clone()
    ids = draw_children(probs, 3, torch.full((2, 3), 0.6, dtype=torch.float64))
    assert ids.tolist() == [[1, 2, 2], [2, 0, 2]]
    assert torch.equal(probs, before), "the caller's rows are left alone"


def test_leading_dimensions_and_the_most_likely_tokens():
    probs = torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(0))
    uniforms = torch.rand(4, 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = draw_children(probs, 2, uniforms)
    assert ids.shape == (4, 3, 2)
    assert torch.equal(ids[2, 1], draw_children(probs[2, 1], 2, uniforms[2, 1]))
    top = top_children(probs, 2)
    assert torch.equal(top[..., 0], probs.argmax(-1))
    assert torch.equal(top, probs.argsort(-1, descending=True)[..., :2])
