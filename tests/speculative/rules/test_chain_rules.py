"""The rules for chains: losslessness proved by enumeration in float64, what would break it, and the edges.

The proof: over all drafted blocks and all outcomes of their coins, the emitted tokens, continued by the target, have the
target's own joint distribution of gamma + 1 tokens.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from table_models import (
    SETTINGS,
    all_sequences,
    emitted_mass,
    followed,
    recorded_rows,
    table_pair,
    target_text_probs,
    text_probs,
)
from torch.nn.functional import pad

from speculative.rules import verify as token_verify
from speculative.rules.sampling import GREEDY, SamplingSettings, one_hot, sample
from speculative.rules.verify import residual_probs, verify, verify_block, verify_greedy

V = 4
RULES = [pytest.param(verify, id="token"), pytest.param(verify_block, id="block")]
SURE = 1 - 2**-53  # the largest coin
PLAIN = SamplingSettings(1.0)


@pytest.fixture
def next_rows(monkeypatch):
    """The rows that the real functions draw their next tokens from."""
    return recorded_rows(monkeypatch, token_verify)


def block_rows(target, draft, gamma):
    """Every drafted block as one row: ids (B, G), contexts (B, G + 1), target and draft rows, probability of the ids."""
    vocab = target.shape[1]
    ids = all_sequences(vocab, gamma)
    contexts = [torch.zeros(len(ids), dtype=torch.int64)]
    for j in range(gamma):
        contexts.append(followed(contexts[-1], ids[:, j], vocab))
    contexts = torch.stack(contexts, 1)
    target_probs, draft_probs = target[contexts], draft[contexts[:, :-1]]
    drawn = draft_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1).prod(-1)
    return ids, contexts, target_probs, draft_probs, drawn


def stop_probs(rule, accept, drafted):
    """P(the block is cut behind j tokens), (B, G + 1): behind the first that fails, or the longest prefix that passes."""
    gamma = accept.shape[1]
    if rule is verify:
        accept = accept if drafted is None else accept * (torch.arange(gamma) < drafted[:, None])
        return pad(accept.cumprod(1), (1, 0), value=1.0) * pad(1 - accept, (0, 1), value=1.0)
    columns = [(1 - accept[:, j:]).prod(1) * (accept[:, j - 1] if j else 1.0) for j in range(gamma + 1)]
    return torch.stack(columns, 1)


def forced(rule, ids, stop):
    """Coins under which the block is cut behind `stop` tokens wherever that can happen."""
    coins = torch.ones(ids.shape, dtype=torch.float64)
    coins[:, 0 if rule is verify else max(0, stop - 1) : stop] = 0.0
    return coins


def emitted_texts(rule, target, draft, gamma, next_rows, drafted=None, dense=True, wrong_residual=False):
    """Exact distribution of gamma + 1 tokens under the real function; `drafted(ids)` gives the rows' own lengths."""
    ids, contexts, target_probs, draft_probs, drawn = block_rows(target, draft, gamma)
    drafted_B = None if drafted is None else drafted(ids)
    uniforms = torch.zeros(len(ids), gamma + 1, dtype=torch.float64)
    mass = torch.zeros(1)
    for stop in range(gamma + 1):
        next_rows.clear()
        rows = draft_probs if dense else None
        outcome = rule(target_probs, ids, rows, forced(rule, ids, stop), uniforms, drafted_B)
        weights = drawn * stop_probs(rule, outcome.accept_probs_BG, drafted_B)[:, stop]
        happens = weights > 0
        assert bool((outcome.accepted_B[happens] == stop).all())
        probs = next_rows[0]
        if wrong_residual and stop < gamma:
            probs = residual_probs(target_probs[:, stop], draft_probs[:, stop])
        mass = mass + emitted_mass(contexts[happens, stop], weights[happens], probs[happens], gamma + 1)
    return text_probs(mass, target, gamma + 1)


def largest_error(texts, target, gamma):
    return float((texts - target_text_probs(target, gamma + 1)).abs().max())


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("draft_rule", ["sample", "argmax-dense", "argmax-none"])
@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_the_emitted_text_has_exactly_the_targets_distribution(rule, settings, draft_rule, gamma, next_rows):
    for seed in (0, 6):
        target, draft = table_pair(seed, V, gamma, settings, settings if draft_rule == "sample" else GREEDY)
        texts = emitted_texts(rule, target, draft, gamma, next_rows, dense=draft_rule != "argmax-none")
        assert largest_error(texts, target, gamma) < 1e-12


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("gamma", [2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_rows_of_their_own_length_are_lossless(rule, gamma, dense, next_rows):
    target, draft = table_pair(2, V, gamma, PLAIN, PLAIN if dense else GREEDY)

    def drafted(ids):  # a row of no draft is impossible here: what stops it would be a token thrown away
        stops_early = ids[:, 0] == draft[0].argmax()
        return torch.where(stops_early, 1, torch.where(ids[:, 1] == 1, 2, gamma))

    lengths = [drafted, *(lambda ids, n=length: torch.full((len(ids),), n) for length in range(gamma + 1))]
    for length in lengths:
        texts = emitted_texts(rule, target, draft, gamma, next_rows, length, dense)
        assert largest_error(texts, target, gamma) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_the_same_enumeration_catches_what_is_not_lossless(rule, next_rows):
    gamma = 3
    for seed in (0, 6):  # the tables of the proof above
        target, draft = table_pair(seed, V, gamma, PLAIN)
        if rule is verify_block:
            token_wise_residual = emitted_texts(rule, target, draft, gamma, next_rows, wrong_residual=True)
            assert largest_error(token_wise_residual, target, gamma) > 1e-4
        looked_and_dropped = emitted_texts(
            rule, target, draft, gamma, next_rows, lambda ids: 1 + (ids[:, 1] > 1).long()
        )
        assert largest_error(looked_and_dropped, target, gamma) > 1e-3


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("draft_rule", ["sample", "argmax"])
def test_block_keeps_no_fewer_tokens_than_the_token_wise_rule_on_every_table(settings, draft_rule):
    gains = []
    for seed in range(8):
        for gamma in (1, 2, 3):
            target, draft = table_pair(seed, V, gamma, settings, settings if draft_rule == "sample" else GREEDY)
            ids, _, target_probs, draft_probs, drawn = block_rows(target, draft, gamma)
            inputs = target_probs, ids, draft_probs, torch.zeros(ids.shape), torch.zeros(len(ids), gamma + 1)
            block, token_wise = (
                stop_probs(rule, rule(*inputs).accept_probs_BG, None) @ torch.arange(gamma + 1.0, dtype=torch.float64)
                for rule in (verify_block, verify)
            )
            gains.append(float(drawn @ (block - token_wise)))
            if gamma == 1:
                assert abs(gains[-1]) < 1e-12
    assert min(gains) > -1e-12
    if settings.temperature == 1.0 and settings.top_k == 0 and draft_rule == "sample":
        assert max(gains) > 0.01


def block_twin(target_probs, ids, draft_probs, coins, uniforms, drafted):
    """2403.10444 Algorithm 2 as it is written, one row."""
    weight, weights, kept = 1.0, [1.0], 0
    for i in range(1, drafted + 1):
        token = ids[i - 1]
        weight = min(1.0, weight * float(target_probs[i - 1, token] / draft_probs[i - 1, token]))
        weights.append(weight)
        accept = weight
        if i < drafted:
            left = float((weight * target_probs[i] - draft_probs[i]).clamp_min(0).sum())
            accept = left / (left + 1 - weight) if left + 1 - weight > 0 else 1.0
        if float(coins[i - 1]) < accept:
            kept = i
    probs = target_probs[kept]
    if kept < drafted:
        probs = (weights[kept] * target_probs[kept] - draft_probs[kept]).clamp_min(0)
    return kept, int(sample(probs, uniforms[kept]))


def token_twin(target_probs, ids, draft_probs, coins, uniforms, drafted):
    """2211.17192 Algorithm 1 as it is written, one row."""
    for i, token in enumerate(ids[:drafted]):
        if float(coins[i]) >= float(target_probs[i, token] / draft_probs[i, token]):
            return i, int(sample((target_probs[i] - draft_probs[i]).clamp_min(0), uniforms[i]))
    return drafted, int(sample(target_probs[drafted], uniforms[drafted]))


@pytest.mark.parametrize(("rule", "twin"), [(verify, token_twin), (verify_block, block_twin)])
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(2, 6),
    gamma=st.integers(1, 5),
    sharpness=st.sampled_from([0.3, 2.0, 8.0]),
    one_hot_draft=st.booleans(),
)
def test_equals_the_algorithm_as_written(rule, twin, seed, vocab, gamma, sharpness, one_hot_draft):
    generator, rows = torch.Generator().manual_seed(seed), 30
    target_probs, draft_probs = (
        (sharpness * torch.randn(rows, length, vocab, generator=generator, dtype=torch.float64)).softmax(-1)
        for length in (gamma + 1, gamma)
    )
    target_probs *= torch.rand(target_probs.shape, generator=generator) < 0.8
    target_probs[..., 0] += 1e-3
    target_probs /= target_probs.sum(-1, keepdim=True)
    ids = torch.multinomial(draft_probs.flatten(0, 1), 1, generator=generator).view(rows, gamma)
    if one_hot_draft:
        draft_probs = one_hot(ids, vocab, torch.float64)
    coins, uniforms = (torch.rand(rows, gamma + more, generator=generator, dtype=torch.float64) for more in (0, 1))
    drafted = torch.randint(gamma + 1, (rows,), generator=generator)
    expected = [
        twin(*inputs)
        for inputs in zip(target_probs, ids.tolist(), draft_probs, coins, uniforms, drafted.tolist(), strict=True)
    ]
    outcome = rule(target_probs, ids, draft_probs, coins, uniforms, drafted)
    assert list(zip(outcome.accepted_B.tolist(), outcome.next_ids_B.tolist(), strict=True)) == expected
    if one_hot_draft:
        for got, dense in zip(rule(target_probs, ids, None, coins, uniforms, drafted), outcome, strict=True):
            torch.testing.assert_close(got, dense)
    full, plain = torch.full((rows,), gamma), rule(target_probs, ids, draft_probs, coins, uniforms)
    for got, given_all in zip(plain, rule(target_probs, ids, draft_probs, coins, uniforms, full), strict=True):
        assert torch.equal(got, given_all)


@pytest.mark.parametrize("rule", RULES)
def test_a_target_probability_of_zero_is_never_accepted(rule):
    target = torch.tensor([[[0.5, 0.5], [0.0, 1.0], [0.5, 0.5], [0.5, 0.5]]])
    draft = torch.tensor([[[0.5, 0.5], [1.0, 0.0], [0.5, 0.5]]])
    for rows in (draft, None):
        outcome = rule(target, torch.tensor([[0, 0, 0]]), rows, torch.zeros(1, 3), torch.zeros(1, 4))
        assert outcome.accepted_B.tolist() == [1]
        assert float(outcome.accept_probs_BG[0, 1]) == 0.0
        assert outcome.next_ids_B.tolist() == [1]


@pytest.mark.parametrize("rule", RULES)
def test_a_cut_that_leaves_nothing_falls_back_on_the_targets_row(rule):
    draft = torch.tensor([[[0.5, 0.5, 0.0]]]).expand(2, 1, 3)
    target = torch.tensor([[[0.4999, 0.4999, 0.0]]]).expand(2, 2, 3)  # under the draft everywhere, as rounding may do
    coins, uniforms = torch.full((2, 1), SURE, dtype=torch.float64), torch.tensor([[0.1, 0.0], [0.9, 0.0]])
    outcome = rule(target, torch.tensor([[0], [0]]), draft, coins, uniforms)
    assert outcome.accepted_B.tolist() == [0, 0]
    assert outcome.next_ids_B.tolist() == [0, 1]


@pytest.mark.parametrize("rule", RULES)
def test_extreme_ratios_stay_finite_in_float32(rule):
    tiny, gamma = 1e-38, 12
    sure, never = torch.tensor([1.0, tiny]), torch.tensor([tiny, 1.0])
    for target_row, draft_row in ((sure, never), (never, sure)):
        target, draft = target_row.expand(1, gamma + 1, 2), draft_row.expand(1, gamma, 2)
        ids = torch.zeros(1, gamma, dtype=torch.int64)
        outcome = rule(target, ids, draft, torch.full((1, gamma), 0.5), torch.zeros(1, gamma + 1))
        assert bool(outcome.accept_probs_BG.isfinite().all())
        assert outcome.accepted_B.tolist() == [gamma if target_row is sure else 0]
        assert outcome.next_ids_B.tolist() == [target_row.argmax()]


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_the_greedy_shortcut_equals_the_general_rule_on_one_hot_rows(gamma):
    generator = torch.Generator().manual_seed(gamma)
    target_ids, draft_ids = (torch.randint(3, (300, length), generator=generator) for length in (gamma + 1, gamma))
    coins, uniforms = (torch.rand(300, gamma + extra, generator=generator) for extra in (0, 1))
    dense = verify(one_hot(target_ids, 3), draft_ids, one_hot(draft_ids, 3), coins, uniforms)
    for got, expected in zip(verify_greedy(target_ids, draft_ids), dense, strict=True):
        assert torch.equal(got, expected)


def decoded(rule, target, draft, gamma, length, rows, reused):
    """Texts (rows, length) of many blocks with real coins. `reused`: columns of a stream by position, not by block."""
    vocab, generator = target.shape[1], torch.Generator().manual_seed(7)
    stream = torch.rand(rows, length + gamma + 1, 3, generator=generator, dtype=torch.float64)
    tokens = torch.zeros(rows, length + gamma + 1, dtype=torch.int64)
    contexts, lengths = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    while bool((running := (lengths < length).nonzero().flatten()).numel()):
        places = lengths[running, None] + torch.arange(gamma + 1)
        uniforms = torch.rand(len(running), gamma + 1, 3, generator=generator, dtype=torch.float64)
        uniforms[..., reused] = stream[running[:, None], places][..., reused]
        reached, ids = [contexts[running]], []
        for j in range(gamma):
            ids.append(sample(draft[reached[-1]], uniforms[:, j, 0]))
            reached.append(followed(reached[-1], ids[-1], vocab))
        reached, ids = torch.stack(reached, 1), torch.stack(ids, 1)
        outcome = rule(target[reached], ids, draft[reached[:, :-1]], uniforms[:, :-1, 1], uniforms[:, :, 2])
        kept = outcome.accepted_B[:, None]
        block = pad(ids, (0, 1)).scatter(1, kept, outcome.next_ids_B[:, None])
        tokens[running[:, None], places] = block
        contexts[running] = followed(reached.gather(1, kept).squeeze(1), outcome.next_ids_B, vocab)
        lengths[running] += outcome.accepted_B + 1
    return tokens[:, :length]


@pytest.mark.parametrize(
    ("rule", "reused", "lossless"),
    [
        pytest.param(verify, [0, 1, 2], True, id="token, numbers of a position"),
        pytest.param(verify_block, [], True, id="block, its own"),
        pytest.param(verify_block, [1], False, id="block, coins of a position"),
        pytest.param(verify_block, [0], False, id="block, draws of a position"),
    ],
)
def test_real_coins_pass_a_chi_square_test_and_a_block_needs_its_own(rule, reused, lossless):
    vocab, gamma, length, rows = 3, 3, 4, 150_000
    target, draft = table_pair(0, vocab, length + gamma, PLAIN)
    texts = decoded(rule, target, draft, gamma, length, rows, reused)
    codes = (texts * vocab ** torch.arange(length - 1, -1, -1)).sum(1)
    counts = torch.bincount(codes, minlength=vocab**length).double()
    expected = rows * target_text_probs(target, length)
    pvalue = stats.chisquare(counts.numpy(), (expected * counts.sum() / expected.sum()).numpy()).pvalue
    assert pvalue > 1e-3 if lossless else pvalue < 1e-6
