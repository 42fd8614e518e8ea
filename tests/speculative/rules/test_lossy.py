"""Lossy rules: the emitted law and its distance from the target's by enumeration in float64, and lenience 1 against the lossless rule."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_models import all_sequences, followed, recorded_rows, table_pair
from tiny_models import logits, perturbed, prompts_of, texts, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.errors import UserError
from speculative.explain.target_view import choice_bounds
from speculative.explain.text_law import text_law
from speculative.measure.replay import expected_blocks, lossy_texts, texts_kept
from speculative.measure.token_scores import TokenScores
from speculative.rules import verify as verify_module
from speculative.rules.lossy import Lossy
from speculative.rules.sampling import GREEDY, SamplingSettings, logits_to_probs, one_hot
from speculative.rules.tree import TokenTree
from speculative.rules.verify import verify

V = 5
PLAIN = SamplingSettings(1.0)
LENIENT = [Lossy(1.0), Lossy(1.3), Lossy(2.0), Lossy(50.0)]
TYPICAL = [Lossy(epsilon=0.01), Lossy(epsilon=0.09), Lossy(epsilon=0.5)]
WAYS = [(lossy, draws) for lossy in LENIENT for draws in (True, False)] + [(lossy, False) for lossy in TYPICAL]
TARGET = tiny_model("qwen3", seed=3)
DRAFT = perturbed(TARGET, 0.05)
SAMPLED = DecodeSettings(SamplingSettings(0.9), 3, "sample", 24)


@pytest.fixture
def next_rows(monkeypatch):
    return recorded_rows(monkeypatch, verify_module)


def kept_mass(target, draft, lossy):
    """min(draft, bound), written out."""
    if lossy.epsilon:
        entropy = -(target * target.log().nan_to_num(neginf=0.0)).sum(-1, keepdim=True)
        return draft * (target > torch.clamp(lossy.epsilon**0.5 * torch.exp(-entropy), max=lossy.epsilon))
    return torch.minimum(draft, lossy.lenience * target)


def tables(seed, length, draws):
    return table_pair(seed, V, length, PLAIN, PLAIN if draws else GREEDY)


def emitted_law(target_V, draft_V, lossy, draws, next_rows):
    """The law of the token at a drafted place, from what the real function does with each drafted token."""
    next_rows.clear()
    ids_VG = torch.arange(V).unsqueeze(1)
    rows = draft_V.expand(V, 1, V) if draws else None
    outcome = verify(target_V.expand(V, 2, V), ids_VG, rows, torch.ones(V, 1), torch.zeros(V, 2), lossy=lossy)
    kept_V = draft_V * outcome.accept_probs_BG[:, 0].double()
    after_VV = next_rows[0] / next_rows[0].sum(1, keepdim=True)
    return kept_V + ((draft_V - kept_V).unsqueeze(1) * after_VV).sum(0)


@pytest.mark.parametrize(("lossy", "draws"), WAYS)
def test_the_emitted_law_and_its_distance_are_as_stated(lossy, draws, next_rows):
    for target_V, draft_V in zip(*tables(1, 2, draws), strict=True):
        emitted_V, kept_V = emitted_law(target_V, draft_V, lossy, draws, next_rows), kept_mass(target_V, draft_V, lossy)
        left_V = (target_V - kept_V).clamp_min(0.0)
        stated_V = kept_V + (1.0 - kept_V.sum()) * left_V / left_V.sum().clamp_min(1e-300)
        torch.testing.assert_close(emitted_V, stated_V, rtol=0.0, atol=1e-12)
        distance = 0.5 * (emitted_V - target_V).abs().sum()
        torch.testing.assert_close(distance, (kept_V - target_V).clamp_min(0.0).sum(), rtol=0.0, atol=1e-12)
        if not lossy.epsilon:
            lossless = torch.minimum(draft_V, target_V).sum()
            torch.testing.assert_close(distance, kept_V.sum() - lossless, rtol=0.0, atol=1e-12)
        # Whatever else follows a rejection is no nearer to the target.
        others_NV = torch.rand(50, V, dtype=torch.float64)
        others_NV = kept_V + (1.0 - kept_V.sum()) * others_NV / others_NV.sum(1, keepdim=True)
        assert bool((0.5 * (others_NV - target_V).abs().sum(1) >= distance - 1e-12).all())


@pytest.mark.parametrize("lossy", LENIENT)
def test_replay_has_the_same_distance_acceptance_and_kept_blocks(lossy):
    """Every text of two tokens, weighted by its probability under the target: the means are those of enumeration."""
    target, draft = tables(2, 1, draws=True)
    ids = all_sequences(V, 2)
    contexts = torch.stack((torch.zeros(len(ids), dtype=torch.int64), followed(0, ids[:, 0], V)), 1)
    probs_NT, draft_NT = (own[contexts].gather(-1, ids.unsqueeze(-1)).squeeze(-1).numpy() for own in (target, draft))
    scores = [scored(*rows) for rows in zip(draft_NT, probs_NT, strict=True)]
    weights_NT = np.exp(-np.stack([one.costs_T for one in lossy_texts(scores, lossy, "sample")]))
    kept, text_N = kept_mass(target, draft, lossy), probs_NT.prod(1)
    assert text_N @ weights_NT[:, 0] == pytest.approx(float(kept[0].sum()), abs=1e-12)
    distance = float((kept[0] - target[0]).clamp_min(0.0).sum())
    assert text_N @ (weights_NT[:, 0] - 1.0).clip(0.0) == pytest.approx(distance, abs=1e-12)
    both = sum(float(kept[0, first] * kept[1 + first].sum()) for first in range(V))
    assert text_N @ weights_NT.prod(1) == pytest.approx(both, abs=1e-12)


def scored(draft_T, target_T):
    return TokenScores(np.log(draft_T), np.log(target_T), draft_T == 1, np.zeros(len(draft_T), dtype=int))


@pytest.mark.parametrize("lossy", [Lossy(1.0), Lossy(1.7), Lossy(6.0)])
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_expected_blocks_are_those_of_the_acceptance_rate_where_contexts_do_not_matter(lossy, gamma):
    target_V, draft_V = (rows[0] for rows in tables(5, 0, draws=True))
    ids = all_sequences(V, 4)
    scores = [scored(draft_V[own].numpy(), target_V[own].numpy()) for own in ids]
    blocks_N = expected_blocks(lossy_texts(scores, lossy, "sample"), (gamma,)).others_NK[:, 0]
    rate = float(kept_mass(target_V, draft_V, lossy).sum())
    wanted = expected_blocks(texts_kept([np.full(4, rate)]), (gamma,)).others_NK[0, 0]
    # Sums of 625 terms of both signs.
    assert target_V[ids].prod(1).numpy() @ blocks_N == pytest.approx(wanted, abs=1e-10)


@pytest.mark.parametrize("lossy", [*LENIENT, *TYPICAL])
def test_a_draft_that_takes_its_argmax_is_replayed_exactly_in_every_context(lossy):
    sampling = SamplingSettings(0.8, top_k=20)
    texts_N, _ = decode(TARGET, None, prompts_of([3, 9, 5]), replace(SAMPLED, gamma=0, sampling=sampling))
    choices = [np.arange(len(one.response_ids)) % 7 for one in texts_N]
    found = choice_bounds(TARGET, texts_N, choices, lossy, sampling)
    for text, choice_T, found_T2 in zip(texts_N, choices, found, strict=True):
        logits_TV = logits(TARGET, [*text.prompt_ids, *text.response_ids])[0, len(text.prompt_ids) - 1 : -1]
        probs_TV = logits_to_probs(logits_TV, sampling)
        kept_TV = kept_mass(probs_TV, one_hot(torch.from_numpy(choice_T), probs_TV.shape[1]), lossy)
        wanted = torch.stack((kept_TV.sum(1), (kept_TV - probs_TV).clamp_min(0.0).sum(1)), 1)
        # float32 of a batch of another shape
        torch.testing.assert_close(torch.from_numpy(found_T2).float(), wanted, rtol=1e-4, atol=1e-6)


@given(seed=st.integers(0, 10_000), gamma=st.integers(0, 4), dense=st.booleans(), own_lengths=st.booleans())
def test_lenience_1_is_the_lossless_rule_to_the_last_bit(seed, gamma, dense, own_lengths):
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.rand(*shape, generator=generator)

    target, draft = (3.0 * drawn(6, gamma + 1, 9)).softmax(-1), (3.0 * drawn(6, gamma, 9)).softmax(-1)
    target[0], draft[1] = one_hot(torch.zeros(gamma + 1, dtype=torch.int64), 9), 1 / 9
    ids = torch.randint(0, 9, (6, gamma), generator=generator)
    counts = torch.randint(0, gamma + 1, (6,), generator=generator) if own_lengths else None
    block = (target, ids, draft if dense else None, drawn(6, gamma), drawn(6, gamma + 1), counts)
    for lossless, lenient in zip(verify(*block), verify(*block, lossy=Lossy()), strict=True):
        assert torch.equal(lossless, lenient)


@given(seed=st.integers(0, 10_000), sizes=st.tuples(st.floats(1, 20), st.floats(1, 20)))
def test_more_lenience_keeps_no_fewer_tokens_of_the_same_block(seed, sizes):
    generator = torch.Generator().manual_seed(seed)
    target, draft = (torch.rand(8, width, 9, generator=generator).softmax(-1) for width in (4, 3))
    block = (
        target,
        torch.randint(0, 9, (8, 3), generator=generator),
        draft,
        torch.rand(8, 3, generator=generator),
        torch.rand(8, 4),
    )
    fewer, more = (verify(*block, lossy=Lossy(size)).accepted_B for size in sorted(sizes))
    assert bool((fewer <= more).all())


@pytest.mark.parametrize("runner", ["eager", "compile"])
@pytest.mark.parametrize("rule", ["sample", "greedy-draft"])
def test_decoding_with_lenience_1_is_lossless_and_tau_grows_with_it(rule, runner):
    settings = replace(SAMPLED, rule=rule)
    run = partial(decode, TARGET, prompts=prompts_of([3, 9, 5, 7] * 4), runner=runner)
    lossless, _ = run(drafter=ModelDrafter(DRAFT), settings=settings)
    counted = []
    for size in (1.0, 1.5, 3.0, 1e6):
        responses, _ = run(drafter=ModelDrafter(DRAFT), settings=replace(settings, lossy=Lossy(size)))
        counted.append(sum(one.blocks for one in responses))
        if size == 1.0:
            assert [vars(one) | {"commit_seconds": 0} for one in responses] == [
                vars(one) | {"commit_seconds": 0} for one in lossless
            ]
    assert counted == sorted(counted, reverse=True)
    assert counted[-1] == 16 * 24 / 4 < counted[0]


@pytest.mark.parametrize(
    ("rule", "lossy"), [("sample", Lossy(2.0)), ("greedy-draft", Lossy(2.0)), ("greedy-draft", TYPICAL[1])]
)
def test_compiled_code_gives_what_python_gives(rule, lossy):
    settings, prompts = replace(SAMPLED, rule=rule, lossy=lossy), prompts_of([3, 9, 5, 17])
    ours, theirs = (
        decode(TARGET, ModelDrafter(DRAFT), prompts, settings, runner=runner)[0] for runner in ("compile", "eager")
    )
    assert texts(ours) == texts(theirs)
    assert [one.accepted_counts for one in ours] == [one.accepted_counts for one in theirs]
    lossless, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, replace(settings, lossy=None), runner="eager")
    assert texts(ours) != texts(lossless)


def test_the_test_of_the_text_hears_what_is_lossy():
    settings, prompts = replace(SAMPLED, max_tokens=64), prompts_of([3, 9, 5, 7] * 8)
    for lossy, same in ((Lossy(1.0), True), (Lossy(8.0), False)):
        responses, _ = decode(TARGET, ModelDrafter(perturbed(TARGET, 0.1)), prompts, replace(settings, lossy=lossy))
        assert text_law(TARGET, responses, settings.sampling).same is same


def test_at_temperature_0_a_token_is_kept_if_its_bound_is_above_the_largest_probability():
    greedy, prompts = DecodeSettings(GREEDY, 3, "greedy", 24), prompts_of([3, 9, 5, 7] * 2)
    plain, _ = decode(TARGET, None, prompts, replace(greedy, gamma=0))
    for lossy, same in ((Lossy(1.0), True), (Lossy(3.0), False), (Lossy(epsilon=0.01), False)):
        responses, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, replace(greedy, lossy=lossy))
        assert (texts(responses) == texts(plain)) is same
    rows = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(3, 3)
    kept = Lossy(2.0).greedy_ids(rows, torch.zeros(3, dtype=torch.int64), torch.arange(3))
    assert kept.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lossy": Lossy(2.0), "rule": "block"}, "rule 'block'"),
        ({"lossy": Lossy(epsilon=0.1)}, "rule 'sample'"),
        ({"lossy": Lossy(2.0), "tree": TokenTree.from_branching((2, 1, 1))}, "token trees"),
    ],
)
def test_what_has_no_lossy_rule_is_refused(changes, told):
    with pytest.raises(UserError, match=told):
        replace(SAMPLED, **changes)


@pytest.mark.parametrize("wrong", [{"lenience": 0.9}, {"lenience": float("inf")}, {"epsilon": -0.1}, {"epsilon": 1.0}])
def test_a_size_outside_its_range_is_refused(wrong):
    with pytest.raises(UserError, match="at least"):
        Lossy(**wrong)
