"""Token trees: losslessness proved by enumeration in float64, against the papers' algorithm as written, and at the edges.

The proof: over all candidates, all coins and all paths, the emitted tokens, continued by the target, have the target's own
joint distribution of depth + 1 tokens.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scipy import stats
from table_models import (
    SETTINGS,
    all_sequences,
    emitted_mass,
    followed,
    table_pair,
    target_text_probs,
    text_probs,
    token_trees,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from speculative import tree_verify
from speculative.sampling import SamplingSettings, one_hot, sample
from speculative.tree import TokenTree, draw_children, top_children
from speculative.tree_verify import verify_tree, verify_tree_greedy
from speculative.verify import verify

SHAPES = {
    "chain": TokenTree.from_branching((1, 1, 1)),
    "star": TokenTree.from_branching((4,)),
    "two-levels": TokenTree.from_branching((2, 2)),
    "widening": TokenTree((0, 1, 1, 1)),
    "ragged": TokenTree((0, 0, 1, 1, 2, 3)),
    "one-deep-leg": TokenTree((0, 0, 2, 3)),
}


@pytest.fixture
def next_rows(monkeypatch):
    """The rows that the real function draws its next tokens from."""
    rows = []

    def recording(probs, uniforms):
        rows.append(probs)
        return sample(probs, uniforms)

    monkeypatch.setattr(tree_verify, "sample", recording)
    return rows


def contexts_of(tree, ids, vocab):
    """Context of every node (B, N1) when its tokens are `ids` (B, N)."""
    contexts = [torch.zeros(len(ids), dtype=torch.int64)]
    for node, parent in enumerate(tree.parents, start=1):
        contexts.append(followed(contexts[parent], ids[:, node - 1], vocab))
    return torch.stack(contexts, 1)


def drawing_probs(tree, ids, draft_rows, replacement):
    """Probability of every row of candidates under `draw_children`."""
    drawn = torch.ones(len(ids), dtype=torch.float64)
    vocab = draft_rows.shape[-1]
    for node, children in enumerate(tree.children):
        left = draft_rows[:, node].clone()
        for child in children:
            token = ids[:, child - 1 : child]
            mass = left.sum(1)
            exhausted = (token.squeeze(1) == vocab - 1).double()  # what stands for no token
            drawn *= torch.where(mass > 0, left.gather(1, token).squeeze(1) / mass.clamp_min(1e-300), exhausted)
            if not replacement:
                left.scatter_(1, token, 0.0)
    return drawn


def forced_coins(tree, stop, target_rows, ids, fixed):
    """Coins (B, D, K) under which the walk ends at node `stop` wherever it can."""
    coins = torch.ones(len(ids), tree.depth, tree.max_children, dtype=torch.float64)
    node = stop
    while node:
        parent, depth = tree.parents[node - 1], tree.depths_N1[node] - 1
        coins[:, depth, tree.children[parent].index(node)] = 0.0
        if fixed:  # one coin: the middle of the candidate's slice
            below = torch.zeros(len(ids), dtype=torch.float64)
            seen = []
            for child in tree.children[parent]:
                token = ids[:, child - 1]
                repeated = torch.stack([token == other for other in seen]).any(0) if seen else torch.zeros(()).bool()
                share = target_rows[:, parent].gather(1, token[:, None]).squeeze(1) * ~repeated
                if child == node:
                    coins[:, depth, 0] = below + share / 2
                below, seen = below + share, [*seen, token]
        node = parent
    return coins


def stop_weight(tree, stop, accept):
    """P(the walk ends at node `stop`), (B,), from the probabilities (B, D, K) of the forced walk."""
    weight, node = torch.ones(len(accept), dtype=torch.float64), stop
    if tree.children[stop]:
        weight = 1 - accept[:, tree.depths_N1[stop]].sum(1)
    while node:
        parent = tree.parents[node - 1]
        weight = weight * accept[:, tree.depths_N1[parent], tree.children[parent].index(node)]
        node = parent
    return weight


def outcomes(tree, target, draft, next_rows, ids, replacement=False, drawn=None):
    """Each way the walk can end, over all rows: (stop contexts, weights, next rows). No draft: fixed candidates."""
    vocab = target.shape[1]
    contexts = contexts_of(tree, ids, vocab)
    target_rows = target[contexts]
    draft_rows = None if draft is None else draft[contexts[:, : max(tree.inner) + 1]]
    uniforms = torch.zeros(len(ids), tree.depth + 1, dtype=torch.float64)
    if draft is not None and drawn is None:
        drawn = drawing_probs(tree, ids, draft[contexts], replacement)
    for stop in range(tree.size + 1):
        next_rows.clear()
        coins = forced_coins(tree, stop, target_rows, ids, draft is None)
        outcome = verify_tree(tree, target_rows, ids, draft_rows, coins, uniforms, replacement)
        weights = stop_weight(tree, stop, outcome.accept_probs_BDK) * (1.0 if drawn is None else drawn)
        ended = torch.cat([torch.zeros(len(ids), 1, dtype=torch.int64), outcome.path_BD], 1)
        ended = ended.gather(1, outcome.accepted_B[:, None]).squeeze(1)
        elsewhere = ended != stop
        assert float(weights[elsewhere].abs().sum()) < 1e-12, "a coin in the right place forces every possible end"
        yield contexts[:, stop], weights.masked_fill(elsewhere, 0.0), next_rows[0]


def largest_error(tree, target, draft, next_rows, replacement=False, verified_as=None):
    """Distance of the emitted text's exact distribution from the target's. `verified_as`: lie about the drawing."""
    vocab, length = target.shape[1], tree.depth + 1
    ids = all_sequences(vocab, tree.size)
    drawn = drawing_probs(tree, ids, draft[contexts_of(tree, ids, vocab)], replacement)
    ids, drawn = ids[drawn > 0], drawn[drawn > 0]
    told = replacement if verified_as is None else verified_as
    mass = sum(
        emitted_mass(contexts, weights, rows, length)
        for contexts, weights, rows in outcomes(tree, target, draft, next_rows, ids, told, drawn)
    )
    return float((text_probs(mass, target, length) - target_text_probs(target, length)).abs().max())


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_drawn_candidates_leave_exactly_the_targets_distribution(shape, settings, replacement, next_rows):
    tree = SHAPES[shape]
    vocab = 4 if tree.size <= 4 else 3
    target, draft = table_pair(1, vocab, tree.depth, settings)
    assert largest_error(tree, target, draft, next_rows, replacement) < 1e-12


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_fixed_candidates_leave_exactly_the_targets_distribution(shape, settings, next_rows):
    tree, vocab = SHAPES[shape], 3
    target, _ = table_pair(2, vocab, tree.depth, settings)
    every, length = all_sequences(vocab, tree.size), tree.depth + 1  # repeated siblings included
    expected = target_text_probs(target, length)
    mass = torch.zeros(len(every), sum(vocab**level for level in range(length + 1)), dtype=torch.float64)
    for contexts, weights, rows in outcomes(tree, target, None, next_rows, every):
        codes = followed(contexts[:, None], torch.arange(vocab), vocab)
        mass.scatter_add_(1, codes, weights[:, None] * rows / rows.sum(1, keepdim=True))
    assert float((text_probs(mass, target, length) - expected).abs().max()) < 1e-12


@pytest.mark.parametrize("shape", ["star", "two-levels", "ragged"])
def test_the_same_enumeration_catches_the_wrong_way_of_drawing(shape, next_rows):
    tree = SHAPES[shape]
    target, draft = table_pair(1, 3, tree.depth, SamplingSettings(1.0))
    assert largest_error(tree, target, draft, next_rows, replacement=False, verified_as=True) > 1e-3
    # The other way round is lossless: repeated siblings count as absent, and those that differ come from what is left.
    assert largest_error(tree, target, draft, next_rows, replacement=True, verified_as=False) < 1e-12


@pytest.mark.parametrize("replacement", [True, False])
def test_absent_candidates_take_nothing_away(replacement, next_rows):
    """A filler, put where nothing was drawn, has draft probability 0. Siblings in front of and behind it stay right."""
    tree, vocab = TokenTree.from_branching((3,)), 4
    target, draft = table_pair(3, vocab, 1, SamplingSettings(1.0))
    draft[:, 2] = 0.0
    draft /= draft.sum(1, keepdim=True)
    expected = target_text_probs(target, 2)
    pairs = all_sequences(vocab, 2)
    drawn = drawing_probs(TokenTree((0, 0)), pairs, draft[:1].expand(len(pairs), 1, vocab).repeat(1, 3, 1), replacement)
    for filler_place in range(3):
        ids = torch.cat(
            [pairs[:, :filler_place], torch.full((len(pairs), 1), 2), pairs[:, filler_place:]], 1
        )  # token 2 is never drawn
        mass = sum(
            emitted_mass(contexts, weights, rows, 2)
            for contexts, weights, rows in outcomes(tree, target, draft, next_rows, ids, replacement, drawn)
        )
        assert float((text_probs(mass, target, 2) - expected).abs().max()) < 1e-12


def twin(tree, target_probs, ids, draft_probs, coins, uniforms, replacement):
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
            if not replacement:
                spread[token] = 0.0
                spread /= spread.sum().clamp_min(1e-300)
        else:
            return path, int(sample(rest, uniforms[depth]))
        node = child
        path.append(node)
    return path, int(sample(target_probs[node], uniforms[len(path)]))


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    tree=token_trees(max_nodes=10),
    seed=st.integers(0, 10**6),
    vocab=st.integers(2, 6),
    mode=st.sampled_from(["with", "without", "fixed"]),
    sharpness=st.sampled_from([0.3, 2.0]),
)
def test_equals_the_algorithm_as_written(tree, seed, vocab, mode, sharpness):
    generator, rows, nodes = torch.Generator().manual_seed(seed), 20, tree.size + 1
    target_probs = (torch.randn(rows, nodes, vocab, generator=generator, dtype=torch.float64) * sharpness).softmax(-1)
    target_probs *= torch.rand(target_probs.shape, generator=generator) < 0.8
    target_probs[..., 0] += 1e-3
    target_probs /= target_probs.sum(-1, keepdim=True)
    noise = torch.randn(target_probs.shape, generator=generator, dtype=torch.float64)
    draft_probs = None if mode == "fixed" else (target_probs.clamp_min(1e-2).log() + noise).softmax(-1)
    ids = torch.randint(vocab, (rows, tree.size), generator=generator)
    for node, children in enumerate(tree.children):
        if children and draft_probs is not None:
            draws = torch.rand(rows, len(children), generator=generator, dtype=torch.float64)
            places = torch.tensor(children) - 1
            ids[:, places] = draw_children(draft_probs[:, node], len(children), draws, mode == "with")
    coins = torch.rand(rows, tree.depth, tree.max_children, generator=generator, dtype=torch.float64)
    uniforms = torch.rand(rows, tree.depth + 1, generator=generator, dtype=torch.float64)
    outcome = verify_tree(tree, target_probs, ids, draft_probs, coins, uniforms, mode == "with")
    for row in range(rows):
        draft_rows = None if draft_probs is None else draft_probs[row]
        inputs = target_probs[row], ids[row].tolist(), draft_rows, coins[row], uniforms[row]
        path, token = twin(tree, *inputs, mode == "with")
        assert outcome.path_BD[row].tolist() == path + [0] * (tree.depth - len(path))
        assert int(outcome.accepted_B[row]) == len(path)
        assert int(outcome.next_ids_B[row]) == token
        for depth in range(tree.depth):
            node = ([0, *path] + [None] * tree.depth)[depth]
            children = () if node is None else tree.children[node]
            overlap = 0.0
            if children and mode == "fixed":
                overlap = float(target_probs[row, node, ids[row, torch.tensor(children) - 1].unique()].sum())
            elif children:
                overlap = float(torch.minimum(target_probs[row, node], draft_probs[row, node]).sum())
            assert abs(float(outcome.overlap_BD[row, depth]) - overlap) < 1e-12
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
    # Summed another way here: 1 - sum max(target - draft, 0).
    torch.testing.assert_close(outcome.overlap_BD, expected.overlap_BG * reached, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_greedy_shortcut_equals_the_general_rule_on_one_hot_rows(shape):
    tree, vocab, generator = SHAPES[shape], 6, torch.Generator().manual_seed(0)
    ids = torch.zeros(500, tree.size, dtype=torch.int64)
    for children in tree.children:
        if children:  # siblings differ, as the most likely tokens do
            ids[:, torch.tensor(children) - 1] = top_children(
                torch.rand(500, vocab, generator=generator), len(children)
            )
    target_ids = torch.randint(vocab, (500, tree.size + 1), generator=generator)
    coins, uniforms = torch.rand(500, tree.depth, tree.max_children), torch.rand(500, tree.depth + 1)
    dense = verify_tree(tree, one_hot(target_ids, vocab), ids, None, coins, uniforms)
    for got, expected in zip(verify_tree_greedy(tree, target_ids, ids), dense, strict=True):
        assert torch.equal(got, expected)
    assert dense.accepted_B.max() == tree.depth


def test_greedy_takes_the_deepest_of_equal_siblings():
    tree = TokenTree.from_branching((2, 1))
    outcome = verify_tree_greedy(tree, torch.tensor([[7, 5, 5, 1, 2]]), torch.tensor([[7, 7, 4, 5]]))
    assert outcome.path_BD.tolist() == [[2, 4]]
    assert outcome.next_ids_B.tolist() == [2]
    assert outcome.accept_probs_BDK.tolist() == [[[0.0, 1.0], [1.0, 0.0]]]


@pytest.mark.parametrize("replacement", [True, False, None])
def test_a_target_probability_of_zero_is_never_accepted(replacement):
    tree = TokenTree.from_branching((3,))
    target = torch.tensor([0.0, 0.0, 0.4, 0.6]).expand(1, 4, 4)
    draft = None if replacement is None else torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(1, 1, 4)
    for ids in ([0, 1, 0], [1, 1, 0], [0, 3, 2] if replacement else [0, 1, 3]):
        if replacement is None:
            ids = [0, 1, 1]
        outcome = verify_tree(
            tree, target, torch.tensor([ids]), draft, torch.zeros(1, 1, 3), torch.zeros(1, 2), bool(replacement)
        )
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


def test_equal_rows_are_always_accepted_whatever_the_rounding():
    tree = TokenTree.from_branching((2, 2))
    probs = torch.rand(100, 7, 20, generator=torch.Generator().manual_seed(0)).softmax(-1)
    ids = top_children(-probs[:, [0, 0, 1, 1, 2, 2]], 1).squeeze(-1)
    coins = torch.full((100, 2, 2), 1 - 2**-53, dtype=torch.float64)
    outcome = verify_tree(tree, probs, ids, probs, coins, torch.zeros(100, 3))
    assert outcome.path_BD.tolist() == [[1, 3]] * 100
    assert torch.equal(outcome.accept_probs_BDK, torch.tensor([1.0, 0.0]).expand(100, 2, 2))


def decoded(tree, target, draft, length, rows, mode):
    """Texts (rows, length) of many trees. Every number belongs to a position, and is used again after a short block."""
    vocab, generator, width = target.shape[1], torch.Generator().manual_seed(3), tree.max_children
    stream = torch.rand(rows, length + tree.depth + 1, 2 * width + 1, generator=generator, dtype=torch.float64)
    tokens = torch.zeros(rows, length + tree.depth + 1, dtype=torch.int64)
    contexts, lengths = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    while bool((running := (lengths < length).nonzero().flatten()).numel()):
        uniforms = stream[running[:, None], lengths[running, None] + torch.arange(tree.depth + 1)]
        reached, ids = [contexts[running]], torch.zeros(len(running), tree.size, dtype=torch.int64)
        for node in range(1, tree.size + 1):
            parent = tree.parents[node - 1]
            siblings = tree.children[parent]
            if node == siblings[0]:  # all nodes of a depth share the position's numbers
                rows_of_draft, draws = draft[reached[parent]], uniforms[:, tree.depths_N1[parent], : len(siblings)]
                chosen = top_children(rows_of_draft, len(siblings))
                if mode != "fixed":
                    chosen = draw_children(rows_of_draft, len(siblings), draws, mode == "with")
                ids[:, torch.tensor(siblings) - 1] = chosen
            reached.append(followed(reached[parent], ids[:, node - 1], vocab))
        reached = torch.stack(reached, 1)
        draft_probs = None if mode == "fixed" else draft[reached]
        coins, residual = uniforms[:, :-1, width : 2 * width], uniforms[:, :, -1]
        outcome = verify_tree(tree, target[reached], ids, draft_probs, coins, residual, mode == "with")
        kept = outcome.accepted_B[:, None]
        block = torch.nn.functional.pad(ids.gather(1, outcome.path_BD.sub(1).clamp_min(0)), (0, 1))
        block.scatter_(1, kept, outcome.next_ids_B[:, None])
        tokens[running[:, None], lengths[running, None] + torch.arange(tree.depth + 1)] = block
        last = torch.nn.functional.pad(outcome.path_BD, (1, 0)).gather(1, kept)
        contexts[running] = followed(reached.gather(1, last).squeeze(1), outcome.next_ids_B, vocab)
        lengths[running] += outcome.accepted_B + 1
    return tokens[:, :length]


@pytest.mark.parametrize("mode", ["with", "without", "fixed"])
def test_real_coins_pass_a_chi_square_test_though_numbers_of_a_position_are_used_again(mode):
    vocab, length, rows, tree = 3, 4, 100_000, TokenTree.from_branching((2, 2, 1))
    target, draft = table_pair(0, vocab, length + tree.depth, SamplingSettings(1.0))
    texts = decoded(tree, target, draft, length, rows, mode)
    codes = (texts * vocab ** torch.arange(length - 1, -1, -1)).sum(1)
    counts = torch.bincount(codes, minlength=vocab**length).double()
    expected = rows * target_text_probs(target, length)
    assert stats.chisquare(counts.numpy(), (expected * counts.sum() / expected.sum()).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("mode", ["with", "without", "fixed"])
def test_more_candidates_keep_more_tokens(mode):
    kept = []
    for count in (1, 2, 3):
        tree, generator = TokenTree.from_branching((count,)), torch.Generator().manual_seed(1)
        target, draft = (table[:1].expand(4000, 1, 6) for table in table_pair(5, 6, 0, SamplingSettings(1.0)))
        uniforms = torch.rand(4000, count, generator=generator, dtype=torch.float64)
        ids = top_children(draft[:, 0], count)
        if mode != "fixed":
            ids = draw_children(draft[:, 0], count, uniforms, mode == "with")
        rows = None if mode == "fixed" else draft
        coins, residual = torch.zeros(4000, 1, count), torch.zeros(4000, 2)
        outcome = verify_tree(tree, target.expand(-1, count + 1, -1), ids, rows, coins, residual, mode == "with")
        kept.append(float(outcome.accept_probs_BDK.sum() / 4000))
    assert kept[0] < kept[1] < kept[2] <= 1.0


def tree_inputs(device):
    tree, generator = TokenTree.from_branching((3, 2, 1)), torch.Generator().manual_seed(0)
    target, draft = (torch.rand(4, 16, 32, generator=generator).softmax(-1).to(device) for _ in range(2))
    ids = torch.randint(32, (4, 15), generator=generator).to(device)
    coins, uniforms = (torch.rand(4, *shape, generator=generator).double().to(device) for shape in ((3, 3), (4,)))
    tree.on(ids.device)
    return tree, target, ids, draft, coins, uniforms


def every_rule(tree, target, ids, draft, coins, uniforms):
    return [
        verify_tree(tree, target, ids, draft, coins, uniforms),
        verify_tree(tree, target, ids, draft, coins, uniforms, replacement=True),
        verify_tree(tree, target, ids, None, coins, uniforms),
        verify_tree_greedy(tree, target.argmax(-1), ids),
    ]


def test_nothing_asks_for_a_value_on_the_way():
    """Under fake tensors an operation that must know a value (item, nonzero, a branch) raises: no synchronisation."""
    tree, *tensors = tree_inputs("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        every_rule(tree, *map(mode.from_tensor, tensors))


@pytest.mark.gpu
def test_the_device_gives_the_same_and_is_never_waited_for():
    expected, inputs = every_rule(*tree_inputs("cpu")), tree_inputs("cuda")
    every_rule(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcomes = every_rule(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for outcome, wanted in zip(outcomes, expected, strict=True):
        for got, value in zip(outcome, wanted, strict=True):
            torch.testing.assert_close(got.cpu(), value)
