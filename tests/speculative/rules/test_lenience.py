"""Lenience: the emitted distribution and its distance from the target's by enumeration in float64, and lenience 1
against the lossless rule.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_models import all_sequences, followed, recorded_rows, table_pair
from tiny_models import perturbed, prompts_of, texts, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.explain.text_fit import text_fit
from speculative.measure.replay import expected_blocks, texts_kept, texts_of
from speculative.measure.token_scores import TokenScores
from speculative.rules import verify as verify_module
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings
from speculative.rules.verify import lenient_ids, verify

V = 5
PLAIN = SamplingSettings(1.0)
SIZES = [1.0, 1.3, 2.0, 50.0]
SAMPLE, ARGMAX = Rule.named("sample"), Rule.named("greedy-draft")
TARGET = tiny_model("qwen3", seed=3)
DRAFT = perturbed(TARGET, 0.05)
SAMPLED = DecodeSettings(SamplingSettings(0.9), 3, SAMPLE, 24)


@pytest.fixture
def next_rows(monkeypatch):
    return recorded_rows(monkeypatch, verify_module)


def tables(seed, length, draws):
    return table_pair(seed, V, length, PLAIN, PLAIN if draws else GREEDY)


def emitted(target_V, draft_V, lenience, draws, next_rows):
    """The distribution of the token at a drafted place, from what the real function does with each drafted token."""
    next_rows.clear()
    ids_VG = torch.arange(V).unsqueeze(1)
    rows = draft_V.expand(V, 1, V) if draws else None
    outcome = verify(target_V.expand(V, 2, V), ids_VG, rows, torch.ones(V, 1), torch.zeros(V, 2), lenience=lenience)
    kept_V = draft_V * outcome.accept_probs_BG[:, 0].double()
    after_VV = next_rows[0] / next_rows[0].sum(1, keepdim=True)
    return kept_V + ((draft_V - kept_V).unsqueeze(1) * after_VV).sum(0)


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("lenience", SIZES)
def test_the_emitted_distribution_and_its_distance_are_as_stated(lenience, draws, next_rows):
    for target_V, draft_V in zip(*tables(1, 2, draws), strict=True):
        emitted_V = emitted(target_V, draft_V, lenience, draws, next_rows)
        kept_V = torch.minimum(draft_V, lenience * target_V)
        left_V = (target_V - kept_V).clamp_min(0.0)
        stated_V = kept_V + (1.0 - kept_V.sum()) * left_V / left_V.sum().clamp_min(1e-300)
        torch.testing.assert_close(emitted_V, stated_V, rtol=0.0, atol=1e-12)
        distance = 0.5 * (emitted_V - target_V).abs().sum()
        torch.testing.assert_close(distance, (kept_V - target_V).clamp_min(0.0).sum(), rtol=0.0, atol=1e-12)
        # Whatever else follows a rejection is no nearer to the target.
        others_NV = torch.rand(50, V, dtype=torch.float64)
        others_NV = kept_V + (1.0 - kept_V.sum()) * others_NV / others_NV.sum(1, keepdim=True)
        assert bool((0.5 * (others_NV - target_V).abs().sum(1) >= distance - 1e-12).all())


@pytest.mark.parametrize("rule", [SAMPLE, ARGMAX])
@pytest.mark.parametrize("lenience", SIZES)
def test_replay_has_the_same_distance_acceptance_and_kept_blocks(lenience, rule):
    """Every text of two tokens, weighted by its probability under the target: the means are those of enumeration."""
    target, draft = tables(2, 1, rule.draws)
    ids = all_sequences(V, 2)
    contexts = torch.stack((torch.zeros(len(ids), dtype=torch.int64), followed(0, ids[:, 0], V)), 1)
    probs_NT, draft_NT = (
        table[contexts].gather(-1, ids.unsqueeze(-1)).squeeze(-1).numpy() for table in (target, draft)
    )
    scores = [scored(*rows) for rows in zip(draft_NT, probs_NT, strict=True)]
    weights_NT = np.exp(-np.stack([text.costs_T for text in texts_of(scores, rule.lenient(lenience))]))
    kept, text_N = torch.minimum(draft, lenience * target), probs_NT.prod(1)
    assert text_N @ weights_NT[:, 0] == pytest.approx(float(kept[0].sum()), abs=1e-12)
    distance = float((kept[0] - target[0]).clamp_min(0.0).sum())
    assert text_N @ (weights_NT[:, 0] - 1.0).clip(0.0) == pytest.approx(distance, abs=1e-12)
    both = sum(float(kept[0, first] * kept[1 + first].sum()) for first in range(V))
    assert text_N @ weights_NT.prod(1) == pytest.approx(both, abs=1e-12)


def scored(draft_T, target_T):
    with np.errstate(divide="ignore"):
        return TokenScores(np.log(draft_T), np.log(target_T), draft_T == 1, np.zeros(len(draft_T), dtype=int))


@pytest.mark.parametrize("lenience", [1.7, 6.0])
@pytest.mark.parametrize("gamma", [1, 3])
def test_expected_blocks_are_those_of_the_acceptance_rate_where_contexts_do_not_matter(lenience, gamma):
    target_V, draft_V = (rows[0] for rows in tables(5, 0, draws=True))
    ids = all_sequences(V, 4)
    scores = [scored(draft_V[text].numpy(), target_V[text].numpy()) for text in ids]
    blocks_N = expected_blocks(texts_of(scores, SAMPLE.lenient(lenience)), (gamma,)).others_NK[:, 0]
    rate = float(torch.minimum(draft_V, lenience * target_V).sum())
    wanted = expected_blocks(texts_kept([np.full(4, rate)]), (gamma,)).others_NK[0, 0]
    # Sums of 625 terms of both signs.
    assert target_V[ids].prod(1).numpy() @ blocks_N == pytest.approx(wanted, abs=1e-10)


@given(seed=st.integers(0, 10_000), sizes=st.tuples(st.floats(1, 20), st.floats(1, 20)))
def test_more_lenience_keeps_no_fewer_tokens_of_the_same_block(seed, sizes):
    generator = torch.Generator().manual_seed(seed)
    target, draft = (torch.rand(8, width, 9, generator=generator).softmax(-1) for width in (4, 3))
    ids = torch.randint(0, 9, (8, 3), generator=generator)
    block = target, ids, draft, torch.rand(8, 3, generator=generator), torch.rand(8, 4)
    fewer, more = (verify(*block, lenience=size).accepted_B for size in sorted(sizes))
    assert bool((fewer <= more).all())


@pytest.mark.parametrize("runner", ["eager", "compile"])
@pytest.mark.parametrize("rule", [SAMPLE, ARGMAX])
def test_decoding_with_lenience_1_is_lossless_and_tau_grows_with_it(rule, runner):
    settings = replace(SAMPLED, rule=rule)
    run = partial(decode, TARGET, prompts=prompts_of([3, 9, 5, 7] * 4), runner=runner)
    lossless, _ = run(drafter=ModelDrafter(DRAFT), settings=settings)
    counted = []
    for size in (1.0, 1.5, 3.0, 1e6):
        responses, _ = run(drafter=ModelDrafter(DRAFT), settings=replace(settings, rule=rule.lenient(size)))
        counted.append(sum(response.blocks for response in responses))
        if size == 1.0:
            assert texts(responses) == texts(lossless)
    assert counted == sorted(counted, reverse=True)
    assert counted[-1] == 16 * 24 / 4 < counted[0]


def test_the_test_of_the_text_detects_lenience():
    settings, prompts = replace(SAMPLED, max_tokens=64), prompts_of([3, 9, 5, 7] * 8)
    for size, same in ((1.0, True), (8.0, False)):
        lenient = replace(settings, rule=SAMPLE.lenient(size))
        responses, _ = decode(TARGET, ModelDrafter(perturbed(TARGET, 0.1)), prompts, lenient)
        assert text_fit(TARGET, responses, settings.sampling).same is same


def test_at_temperature_0_a_token_is_kept_if_its_bound_is_above_the_largest_probability():
    greedy, prompts = DecodeSettings(GREEDY, 3, max_tokens=24), prompts_of([3, 9, 5, 7] * 2)
    plain, _ = decode(TARGET, None, prompts, replace(greedy, gamma=0))
    for size, same in ((1.0, True), (3.0, False)):
        responses, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, replace(greedy, rule=SAMPLE.lenient(size)))
        assert (texts(responses) == texts(plain)) is same
    rows = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(3, 3)
    assert lenient_ids(2.0, rows, torch.zeros(3, dtype=torch.int64), torch.arange(3)).tolist() == [0, 1, 0]


def test_a_joint_rule_becomes_token_wise():
    assert Rule.named("block").lenient(2.0) == SAMPLE.lenient(2.0)
