"""Losslessness proved by enumeration in float64, and the rule's edges.

The proof: the distribution of one block's emitted tokens, integrated over all coins and continued by the target, must
be the target's own joint distribution of gamma + 1 tokens.
"""

import itertools
from collections import defaultdict

import pytest
import torch
from scipy import stats

from speculative.errors import UserError
from speculative.rules.sampling import SamplingSettings, logits_to_probs, one_hot, sample
from speculative.rules.verify import accept_probability, draft_settings_for, residual_probs, verify, verify_greedy

V = 4
TRUNCATIONS = [{}, {"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 3, "top_p": 0.8}]
CASES = [
    pytest.param(rule, SamplingSettings(temperature, **cut), gamma, id=f"{rule}-T{temperature}-{cut}-g{gamma}")
    for temperature in (0.0, 0.5, 1.0)
    for cut in TRUNCATIONS
    for rule in ("sample", "greedy-draft", "greedy")
    if rule != "greedy" or temperature == 0.0
    for gamma in (1, 2, 3)
]


class TableModel:
    """A language model as a table: independent random logits for every context, in float64."""

    def __init__(self, seed: int):
        self.seed = seed

    def probs(self, context: tuple[int, ...], settings: SamplingSettings) -> torch.Tensor:
        number = sum((token + 1) * (V + 1) ** place for place, token in enumerate(context))
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + number)
        return logits_to_probs(2 * torch.randn(V, generator=generator, dtype=torch.float64), settings)


def joint(model: TableModel, tokens: tuple[int, ...], settings: SamplingSettings) -> float:
    probability = 1.0
    for place, token in enumerate(tokens):
        probability *= float(model.probs(tokens[:place], settings)[token])
    return probability


def block_rows(target, draft, settings, draft_settings, gamma):
    """Every drafted sequence as one row: ids (B, G), draft rows (B, G, V), target rows (B, G + 1, V)."""
    sequences = list(itertools.product(range(V), repeat=gamma))
    target_probs = torch.stack(
        [torch.stack([target.probs(drafted[:j], settings) for j in range(gamma + 1)]) for drafted in sequences]
    )
    draft_probs = torch.stack(
        [torch.stack([draft.probs(drafted[:j], draft_settings) for j in range(gamma)]) for drafted in sequences]
    )
    return torch.tensor(sequences), draft_probs, target_probs


@pytest.mark.parametrize(("rule", "settings", "gamma"), CASES)
def test_the_emitted_text_has_exactly_the_targets_distribution(rule, settings, gamma):
    target, draft = TableModel(1), TableModel(2)
    draft_settings = draft_settings_for(rule, settings)
    ids, draft_probs, target_probs = block_rows(target, draft, settings, draft_settings, gamma)
    coins, uniforms = torch.zeros(len(ids), gamma), torch.zeros(len(ids), gamma + 1)
    accept_probs = verify(target_probs, ids, draft_probs, coins, uniforms).accept_probs_BG

    emitted: dict[tuple[int, ...], float] = defaultdict(float)
    for row, drafted in enumerate(map(tuple, ids.tolist())):
        reached = joint(draft, drafted, draft_settings)
        for j in range(gamma + 1):
            if j < gamma:
                rejected = reached * (1 - float(accept_probs[row, j]))
                reached *= float(accept_probs[row, j])
                correction = residual_probs(target_probs[row, j][None], draft_probs[row, j][None])[0]
            else:
                rejected, correction = reached, target_probs[row, j]
            for token, weight in enumerate((correction / correction.sum()).tolist()):
                emitted[(*drafted[:j], token)] += rejected * weight

    continued: dict[tuple[int, ...], float] = defaultdict(float)
    for prefix, probability in emitted.items():
        for rest in itertools.product(range(V), repeat=gamma + 1 - len(prefix)):
            text = (*prefix, *rest)
            tail = joint(target, text, settings) / joint(target, prefix, settings) if probability > 0 else 0.0
            continued[text] += probability * tail
    for text in itertools.product(range(V), repeat=gamma + 1):
        assert abs(continued[text] - joint(target, text, settings)) < 1e-12


@pytest.mark.parametrize("rule", ["sample", "greedy-draft"])
def test_verify_applies_those_probabilities_to_its_coins(rule):
    settings, gamma, grid = SamplingSettings(1.0, top_k=3), 2, 2000
    draft_settings = draft_settings_for(rule, settings)
    ids, draft_probs, target_probs = block_rows(TableModel(3), TableModel(4), settings, draft_settings, gamma)
    drafted = draft_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1).prod(-1) > 0
    uniforms = ((torch.arange(grid, dtype=torch.float64) + 0.5) / grid).unsqueeze(1).expand(-1, gamma + 1)
    checked = 0
    for row in drafted.nonzero().flatten().tolist():
        rows = [table[row].expand(grid, *table[row].shape) for table in (target_probs, ids, draft_probs)]
        accept = verify(*rows, torch.zeros(grid, gamma), uniforms).accept_probs_BG[0]
        for j in range(gamma + 1):
            coins = (accept * (1 - 1e-9)).repeat(grid, 1)  # just accepted
            if j < gamma:
                if accept[j] == 1:
                    continue
                coins[:, j] = accept[j] * (1 + 1e-9)  # just rejected
            if bool((accept[:j] == 0).any()):
                continue
            outcome = verify(*rows, coins, uniforms)
            assert outcome.accepted_B.unique().tolist() == [j]
            wanted = target_probs[row, j]
            wanted = residual_probs(wanted[None], draft_probs[row, j][None])[0] if j < gamma else wanted
            counts = torch.bincount(outcome.next_ids_B, minlength=V) / grid
            torch.testing.assert_close(counts, (wanted / wanted.sum()).float(), rtol=0, atol=1.1 / grid)  # the grid
            checked += 1
    assert checked >= 3


@pytest.mark.parametrize("rule", ["sample", "greedy-draft"])
def test_verify_with_real_coins_passes_a_chi_square_test(rule):
    settings, gamma, rows = SamplingSettings(1.0, top_p=0.9), 2, 200_000
    target, draft, generator = TableModel(5), TableModel(6), torch.Generator().manual_seed(0)
    draft_settings = draft_settings_for(rule, settings)
    draft_table = torch.stack([draft.probs((first,), draft_settings) for first in range(V)])
    target_pairs = torch.stack([target.probs((first,), settings) for first in range(V)])
    target_triples = torch.stack(
        [torch.stack([target.probs((first, second), settings) for second in range(V)]) for first in range(V)]
    )
    uniforms = torch.rand(rows, gamma + 1, 3, generator=generator, dtype=torch.float64)
    first_probs = draft.probs((), draft_settings).expand(rows, V)
    first = sample(first_probs, uniforms[:, 0, 0])
    second = sample(draft_table[first], uniforms[:, 1, 0])
    target_probs = torch.stack(
        [target.probs((), settings).expand(rows, V), target_pairs[first], target_triples[first, second]], 1
    )
    draft_probs = torch.stack([first_probs, draft_table[first]], 1)
    ids = torch.stack([first, second], 1)
    outcome = verify(target_probs, ids, draft_probs, uniforms[:, :-1, 1], uniforms[:, :, 2])
    emitted = torch.where(torch.arange(gamma) < outcome.accepted_B[:, None], ids, -1)
    emitted = torch.cat([emitted, torch.full((rows, 1), -1)], 1).scatter(
        1, outcome.accepted_B[:, None], outcome.next_ids_B[:, None]
    )
    continuation = torch.rand(rows, generator=generator, dtype=torch.float64)
    missing = emitted[:, 1] < 0  # blocks of one token are continued by the target
    emitted[missing, 1] = sample(target_pairs[emitted[missing, 0]], continuation[missing])
    counts = torch.bincount(emitted[:, 0] * V + emitted[:, 1], minlength=V * V).double()
    expected = rows * (target.probs((), settings)[:, None] * target_pairs).flatten()
    assert torch.equal(counts > 0, expected > 0)
    possible = expected > 0
    assert stats.chisquare(counts[possible].numpy(), expected[possible].numpy()).pvalue > 1e-3


def test_a_target_probability_of_zero_is_never_accepted():
    target = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    draft = torch.tensor([[[1.0, 0.0]]])
    outcome = verify(target, torch.tensor([[0]]), draft, torch.zeros(1, 1), torch.zeros(1, 2))
    assert outcome.accepted_B.tolist() == [0]
    assert outcome.next_ids_B.tolist() == [1]
    assert outcome.accept_probs_BG.tolist() == [[0.0]]


def test_accept_probability_and_overlap():
    target, draft = torch.tensor([0.2, 0.6, 0.0, 0.3]), torch.tensor([0.4, 0.3, 0.5, 0.0])
    torch.testing.assert_close(accept_probability(target, draft), torch.tensor([0.5, 1.0, 0.0, 1.0]))
    rows_target, rows_draft = torch.tensor([[[0.2, 0.8], [1.0, 0.0]]]), torch.tensor([[[0.7, 0.3]]])
    outcome = verify(rows_target, torch.tensor([[1]]), rows_draft, torch.zeros(1, 1), torch.zeros(1, 2))
    torch.testing.assert_close(outcome.overlap_BG, torch.tensor([[0.5]]))


def test_equal_rows_are_always_accepted_and_leave_a_usable_residual():
    probs = torch.rand(100, 4, 20, generator=torch.Generator().manual_seed(0)).softmax(-1)
    ids = probs[:, :3].argmin(-1)
    coins = torch.full((100, 3), 1 - 2**-53, dtype=torch.float64)
    assert verify(probs, ids, probs[:, :3], coins, torch.zeros(100, 4)).accepted_B.tolist() == [3] * 100
    assert torch.equal(residual_probs(probs[:, 0], probs[:, 0]), probs[:, 0])


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_shortcuts_equal_the_general_rule_on_one_hot_rows(gamma):
    generator = torch.Generator().manual_seed(gamma)
    target_ids = torch.randint(3, (300, gamma + 1), generator=generator)
    draft_ids = torch.randint(3, (300, gamma), generator=generator)
    coins, uniforms = (torch.rand(300, gamma + extra, 1, generator=generator).squeeze(-1) for extra in (0, 1))
    dense = verify(one_hot(target_ids, 3), draft_ids, one_hot(draft_ids, 3), coins, uniforms)
    for got, expected in zip(verify_greedy(target_ids, draft_ids), dense, strict=True):
        assert torch.equal(got, expected)
    probs = torch.rand(300, gamma + 1, 3, generator=generator).softmax(-1)
    dense = verify(probs, draft_ids, one_hot(draft_ids, 3), coins, uniforms)
    for got, expected in zip(verify(probs, draft_ids, None, coins, uniforms), dense, strict=True):
        torch.testing.assert_close(got, expected)


def test_rules_that_contradict_the_settings_are_refused():
    with pytest.raises(UserError, match="greedy-draft"):
        draft_settings_for("greedy", SamplingSettings(1.0))
    with pytest.raises(UserError, match="argmax"):
        draft_settings_for("argmax", SamplingSettings(1.0))
    assert draft_settings_for("greedy-draft", SamplingSettings(0.7)).greedy
    assert draft_settings_for("sample", SamplingSettings(0.7)) == SamplingSettings(0.7)
