"""Token trees: their shape against a slow reading of it, the candidates of their nodes, and the rule against the papers' algorithm
as written, against its shortcuts, and at the edges.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_models import TREES, token_trees

from speculative.rules.sampling import one_hot, sample
from speculative.rules.tree import TokenTree, draw_children, top_children, verify_tree, verify_tree_greedy
from speculative.rules.verify import verify


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


def twin(tree, target_probs, ids, draft_probs, coins, uniforms):
    """Multi-candidate speculative sampling as it is written, one row, one node at a time, everything normalised."""
    node, path = 0, []
    while tree.children[node]:
        rest, spread, depth = target_probs[node].clone(), None, len(path)
        spread = None if draft_probs is None else draft_probs[node].clone()
        start, seen = 0.0, set()
        for k, child in enumerate(tree.children[node]):
            token = ids[child - 1]
            if spread is None:
                if token not in seen and start <= float(coins[depth, 0]) < start + float(target_probs[node, token]):
                    break
                if token not in seen:
                    start += float(target_probs[node, token])
                seen.add(token)
                rest[token] = 0.0
                continue
            if spread[token] == 0:
                continue
            if float(coins[depth, k] * spread[token]) < float(rest[token]):
                break
            rest = (rest - spread).clamp_min(0)
            rest /= rest.sum()
            spread[token] = 0.0
            spread /= spread.sum().clamp_min(1e-300)
        else:
            return path, int(sample(rest, uniforms[depth]))
        node = child
        path.append(node)
    return path, int(sample(target_probs[node], uniforms[len(path)]))


@given(
    tree=token_trees(max_nodes=10),
    seed=st.integers(0, 10**6),
    vocab=st.integers(2, 6),
    drawn=st.booleans(),
    sharpness=st.sampled_from([0.3, 2.0]),
)
def test_equals_the_algorithm_as_written(tree, seed, vocab, drawn, sharpness):
    generator, rows, nodes = torch.Generator().manual_seed(seed), 20, tree.size + 1
    target_probs = (torch.randn(rows, nodes, vocab, generator=generator, dtype=torch.float64) * sharpness).softmax(-1)
    target_probs *= torch.rand(target_probs.shape, generator=generator) < 0.8
    target_probs[..., 0] += 1e-3
    target_probs /= target_probs.sum(-1, keepdim=True)
    noise = torch.randn(target_probs.shape, generator=generator, dtype=torch.float64)
    draft_probs = (target_probs.clamp_min(1e-2).log() + noise).softmax(-1) if drawn else None
    ids = torch.randint(vocab, (rows, tree.size), generator=generator)
    for node, children in enumerate(tree.children):
        if children and draft_probs is not None:
            draws = torch.rand(rows, len(children), generator=generator, dtype=torch.float64)
            places = torch.tensor(children) - 1
            ids[:, places] = draw_children(draft_probs[:, node], len(children), draws)
    coins = torch.rand(rows, tree.depth, tree.max_children, generator=generator, dtype=torch.float64)
    uniforms = torch.rand(rows, tree.depth + 1, generator=generator, dtype=torch.float64)
    outcome = verify_tree(tree, target_probs, ids, draft_probs, coins, uniforms)
    for row in range(rows):
        draft_rows = None if draft_probs is None else draft_probs[row]
        inputs = target_probs[row], ids[row].tolist(), draft_rows, coins[row], uniforms[row]
        path, token = twin(tree, *inputs)
        assert outcome.path_BD[row].tolist() == path + [0] * (tree.depth - len(path))
        assert int(outcome.accepted_B[row]) == len(path)
        assert int(outcome.next_ids_B[row]) == token
        for depth in range(tree.depth):
            node = ([0, *path] + [None] * tree.depth)[depth]
            children = () if node is None else tree.children[node]
            assert not bool(outcome.accept_probs_BDK[row, depth, len(children) :].any())


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_a_chain_equals_the_plain_rule(gamma, dtype, dense):
    generator, rows, vocab = torch.Generator().manual_seed(gamma), 3000, 8
    logits = torch.randn(rows, gamma + 1, vocab, generator=generator, dtype=dtype)
    target_probs = logits.softmax(-1)
    draft_probs = (logits + torch.randn(logits.shape, generator=generator, dtype=dtype)).softmax(-1)[:, :gamma]
    draft_probs[:300] = target_probs[:300, :gamma]
    ids = torch.multinomial(draft_probs.flatten(0, 1), 1, generator=generator).view(rows, gamma)
    coins, uniforms = (torch.rand(rows, gamma + more, generator=generator, dtype=torch.float64) for more in (0, 1))
    rows_of_draft = draft_probs if dense else None
    tree = TokenTree.from_branching((1,) * gamma)
    outcome = verify_tree(tree, target_probs, ids, rows_of_draft, coins.unsqueeze(-1), uniforms)
    expected = verify(target_probs, ids, rows_of_draft, coins, uniforms)
    assert torch.equal(outcome.accepted_B, expected.accepted_B)
    assert torch.equal(outcome.next_ids_B, expected.next_ids_B)
    places = torch.arange(gamma)
    assert torch.equal(outcome.path_BD, (places + 1) * (places < expected.accepted_B[:, None]))
    reached = places <= expected.accepted_B[:, None]
    assert torch.equal(outcome.accept_probs_BDK.squeeze(-1), expected.accept_probs_BG * reached)


@pytest.mark.parametrize("shape", TREES)
def test_the_greedy_shortcut_equals_the_general_rule_on_one_hot_rows(shape):
    tree, vocab, generator = TREES[shape], 6, torch.Generator().manual_seed(0)
    ids = torch.zeros(500, tree.size, dtype=torch.int64)
    for children in tree.children:
        if children:  # siblings differ, as the most likely tokens do
            ids[:, torch.tensor(children) - 1] = top_children(
                torch.rand(500, vocab, generator=generator), len(children)
            )
    target_ids = torch.randint(vocab, (500, tree.size + 1), generator=generator)
    coins, uniforms = torch.rand(500, tree.depth, tree.max_children), torch.rand(500, tree.depth + 1)
    dense = verify_tree(tree, one_hot(target_ids, vocab), ids, None, coins, uniforms)
    for got, expected in zip(verify_tree_greedy(tree, target_ids, ids), dense[:3], strict=True):
        assert torch.equal(got, expected)
    assert dense.accepted_B.max() == tree.depth


@pytest.mark.parametrize("drawn", [True, False])
def test_a_target_probability_of_zero_is_never_accepted(drawn):
    tree = TokenTree.from_branching((3,))
    target = torch.tensor([0.0, 0.0, 0.4, 0.6]).expand(1, 4, 4)
    draft = torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(1, 1, 4) if drawn else None
    for ids in ([0, 1, 0], [1, 1, 0], [0, 1, 3]) if drawn else ([0, 1, 1],):
        outcome = verify_tree(tree, target, torch.tensor([ids]), draft, torch.zeros(1, 1, 3), torch.zeros(1, 2))
        assert outcome.accepted_B.tolist() == [0]
        assert outcome.next_ids_B.tolist() == [2]
        assert not bool(outcome.accept_probs_BDK.any())


def test_a_row_nearly_exhausted_is_verified_with_its_true_mass_in_float32():
    """Behind a first candidate of nearly all the mass, one minus what was drawn would be mostly rounding."""
    tree, rare = TokenTree.from_branching((2,)), 3e-7
    draft = torch.tensor([1 - 2 * rare, rare, rare])
    draft = (draft / draft.sum()).expand(1, 1, 3)
    target = torch.tensor([0.0, 0.3, 0.7]).expand(1, 3, 3)
    uniforms = torch.zeros(1, 2)
    # The second candidate comes from (0, 1/2, 1/2): token 1 passes with 0.3 / 0.5, token 2 always.
    for token, expected in ((1, 0.6), (2, 1.0)):
        outcome = verify_tree(tree, target, torch.tensor([[0, token]]), draft, torch.zeros(1, 1, 2), uniforms)
        torch.testing.assert_close(outcome.accept_probs_BDK[0, 0, 1], torch.tensor(expected), rtol=0, atol=1e-5)


def test_a_failure_that_leaves_nothing_falls_back_on_the_targets_row():
    draft = torch.tensor([[[0.5, 0.5, 0.0]]]).expand(2, 1, 3)
    target = torch.tensor([[[0.4999, 0.4999, 0.0]]]).expand(2, 2, 3)  # under the draft everywhere, as rounding may do
    coins, uniforms = torch.full((2, 1, 1), 1 - 2**-53, dtype=torch.float64), torch.tensor([[0.1, 0.0], [0.9, 0.0]])
    outcome = verify_tree(TokenTree((0,)), target, torch.tensor([[0], [0]]), draft, coins, uniforms)
    assert outcome.accepted_B.tolist() == [0, 0]
    assert outcome.next_ids_B.tolist() == [0, 1]
