"""Token trees: losslessness proved by enumeration in float64, and by counting.

The proof: over all candidates, all coins and all paths, the emitted tokens, continued by the target, have the target's own
joint distribution of depth + 1 tokens.
"""

import pytest
import torch
from scipy import stats
from table_models import (
    SETTINGS,
    TREES,
    all_sequences,
    emitted_mass,
    followed,
    recorded_rows,
    table_pair,
    target_text_probs,
    text_probs,
)

from speculative.rules import tree as tree_module
from speculative.rules.sampling import SamplingSettings
from speculative.rules.tree import TokenTree, draw_children, top_children, verify_tree


@pytest.fixture
def next_rows(monkeypatch):
    """The rows that the real function draws its next tokens from."""
    return recorded_rows(monkeypatch, tree_module)


def contexts_of(tree, ids, vocab):
    """Context of every node (B, N1) when its tokens are `ids` (B, N)."""
    contexts = [torch.zeros(len(ids), dtype=torch.int64)]
    for node, parent in enumerate(tree.parents, start=1):
        contexts.append(followed(contexts[parent], ids[:, node - 1], vocab))
    return torch.stack(contexts, 1)


def drawing_probs(tree, ids, draft_rows, replacement):
    """Probability of every row of candidates under `draw_children`; with ``replacement`` of as many independent draws."""
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


def outcomes(tree, target, draft, next_rows, ids, drawn=None):
    """Each way the walk can end, over all rows: (stop contexts, weights, next rows). No draft: fixed candidates."""
    vocab = target.shape[1]
    contexts = contexts_of(tree, ids, vocab)
    target_rows = target[contexts]
    draft_rows = None if draft is None else draft[contexts[:, : max(tree.inner) + 1]]
    uniforms = torch.zeros(len(ids), tree.depth + 1, dtype=torch.float64)
    for stop in range(tree.size + 1):
        next_rows.clear()
        coins = forced_coins(tree, stop, target_rows, ids, draft is None)
        outcome = verify_tree(tree, target_rows, ids, draft_rows, coins, uniforms)
        weights = stop_weight(tree, stop, outcome.accept_probs_BDK) * (1.0 if drawn is None else drawn)
        ended = torch.cat([torch.zeros(len(ids), 1, dtype=torch.int64), outcome.path_BD], 1)
        ended = ended.gather(1, outcome.accepted_B[:, None]).squeeze(1)
        elsewhere = ended != stop
        assert float(weights[elsewhere].abs().sum()) < 1e-12, "a coin in the right place forces every possible end"
        yield contexts[:, stop], weights.masked_fill(elsewhere, 0.0), next_rows[0]


def largest_error(tree, target, draft, next_rows, replacement=False, told=None):
    """Distance of the emitted text's exact distribution from the target's. `told`: lie about the rows drawn from."""
    vocab, length = target.shape[1], tree.depth + 1
    ids = all_sequences(vocab, tree.size)
    drawn = drawing_probs(tree, ids, draft[contexts_of(tree, ids, vocab)], replacement)
    ids, drawn = ids[drawn > 0], drawn[drawn > 0]
    mass = sum(
        emitted_mass(contexts, weights, rows, length)
        for contexts, weights, rows in outcomes(tree, target, draft if told is None else told, next_rows, ids, drawn)
    )
    return float((text_probs(mass, target, length) - target_text_probs(target, length)).abs().max())


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("shape", TREES)
def test_drawn_candidates_leave_exactly_the_targets_distribution(shape, settings, replacement, next_rows):
    """Independent draws too: repeated siblings count as absent, and those that differ come from what is left."""
    tree = TREES[shape]
    vocab = 4 if tree.size <= 4 else 3
    target, draft = table_pair(1, vocab, tree.depth, settings)
    assert largest_error(tree, target, draft, next_rows, replacement) < 1e-12


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", TREES)
def test_any_fixed_candidates_leave_exactly_the_targets_distribution(shape, settings, next_rows):
    tree, vocab = TREES[shape], 3
    target, _ = table_pair(2, vocab, tree.depth, settings)
    every, length = all_sequences(vocab, tree.size), tree.depth + 1  # repeated siblings included
    expected = target_text_probs(target, length)
    mass = torch.zeros(len(every), sum(vocab**level for level in range(length + 1)), dtype=torch.float64)
    for contexts, weights, rows in outcomes(tree, target, None, next_rows, every):
        codes = followed(contexts[:, None], torch.arange(vocab), vocab)
        mass.scatter_add_(1, codes, weights[:, None] * rows / rows.sum(1, keepdim=True))
    assert float((text_probs(mass, target, length) - expected).abs().max()) < 1e-12


@pytest.mark.parametrize("shape", ["star", "two-levels", "ragged"])
def test_the_same_enumeration_catches_other_rows_than_those_drawn_from(shape, next_rows):
    tree = TREES[shape]
    target, draft = table_pair(1, 3, tree.depth, SamplingSettings(1.0))
    assert largest_error(tree, target, draft, next_rows, told=draft.roll(1, -1)) > 1e-3


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
            for contexts, weights, rows in outcomes(tree, target, draft, next_rows, ids, drawn)
        )
        assert float((text_probs(mass, target, 2) - expected).abs().max()) < 1e-12


def decoded(tree, target, draft, length, rows, drawn):
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
                if drawn:
                    chosen = draw_children(rows_of_draft, len(siblings), draws)
                ids[:, torch.tensor(siblings) - 1] = chosen
            reached.append(followed(reached[parent], ids[:, node - 1], vocab))
        reached = torch.stack(reached, 1)
        draft_probs = draft[reached] if drawn else None
        coins, residual = uniforms[:, :-1, width : 2 * width], uniforms[:, :, -1]
        outcome = verify_tree(tree, target[reached], ids, draft_probs, coins, residual)
        kept = outcome.accepted_B[:, None]
        block = torch.nn.functional.pad(ids.gather(1, outcome.path_BD.sub(1).clamp_min(0)), (0, 1))
        block.scatter_(1, kept, outcome.next_ids_B[:, None])
        tokens[running[:, None], lengths[running, None] + torch.arange(tree.depth + 1)] = block
        last = torch.nn.functional.pad(outcome.path_BD, (1, 0)).gather(1, kept)
        contexts[running] = followed(reached.gather(1, last).squeeze(1), outcome.next_ids_B, vocab)
        lengths[running] += outcome.accepted_B + 1
    return tokens[:, :length]


@pytest.mark.parametrize("drawn", [True, False])
def test_real_coins_pass_a_chi_square_test_though_numbers_of_a_position_are_used_again(drawn):
    vocab, length, rows, tree = 3, 4, 100_000, TokenTree.from_branching((2, 2, 1))
    target, draft = table_pair(0, vocab, length + tree.depth, SamplingSettings(1.0))
    texts = decoded(tree, target, draft, length, rows, drawn)
    codes = (texts * vocab ** torch.arange(length - 1, -1, -1)).sum(1)
    counts = torch.bincount(codes, minlength=vocab**length).double()
    expected = rows * target_text_probs(target, length)
    assert stats.chisquare(counts.numpy(), (expected * counts.sum() / expected.sum()).numpy()).pvalue > 1e-3
