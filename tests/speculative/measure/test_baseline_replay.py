"""Baselines on stored text against live decoding of the real drafters and against slow twins, text by text."""

import functools
import math

import numpy as np
import pytest
from scored_texts import kept_at_least, random_scores
from tiny_models import perturbed, prompts_of, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.lookup import PromptLookup
from speculative.drafters.lookup_draft import LookupDraft
from speculative.drafters.past_responses import PastResponses, ResponseIndex
from speculative.evaluate import HeldoutResponse
from speculative.measure import replay as replay_module
from speculative.measure.baseline_replay import (
    NGRAM_SIZES,
    found_blocks,
    found_steps,
    kept_by_lookup,
    kept_by_past_responses,
    tuned_lookup,
)
from speculative.measure.cost import StepCosts, given_costs
from speculative.measure.replay import Blocks, agreement_of, texts_of
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings

VOCAB = 8  # Small, so that texts repeat themselves and lookup has something to find.
TARGET = tiny_model(vocab_size=VOCAB)
DRAFT = perturbed(TARGET, 0.05)
SAMPLED = SamplingSettings(0.8)


def rule_of(sampling):
    return "greedy" if sampling.greedy else "sample"


def live_texts(drafter, sampling, gamma, rule=None, prompts=(4, 9, 15), tokens=40):
    settings = DecodeSettings(sampling, gamma, Rule.named(rule or rule_of(sampling)), tokens)
    responses, _ = decode(TARGET, drafter, prompts_of(list(prompts), vocab_size=VOCAB), settings, batch_size=64)
    return responses


def datastore():
    texts = live_texts(None, SAMPLED, 0, prompts=[7] * 6)
    return ResponseIndex.build([text.response_ids for text in texts], VOCAB, min_ngram=2, max_ngram=5)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("gamma", [1, 3, 6])
@pytest.mark.parametrize("sizes", [(3, 1), (4, 2), None], ids=["3-1", "4-2", "past responses"])
def test_stored_text_has_the_blocks_of_live_decoding(sampling, gamma, sizes):
    store = datastore()
    live = live_texts(PromptLookup(*sizes) if sizes else PastResponses(store), sampling, gamma)
    kept = [kept_by_lookup(text, 8, *sizes) if sizes else kept_by_past_responses(text, 8, store) for text in live]
    found = found_blocks([*kept, np.zeros(0, dtype=int)], (gamma,))
    drafted = [sum(count > 0 for count in one.drafted_counts) for one in live]
    assert found.found_NK[:, 0].tolist() == [*drafted, 0]
    assert found.calls_NK[:, 0].tolist() == [*(one.blocks for one in live), 0]
    assert sum(drafted) > 10  # or nothing was tested


@pytest.mark.parametrize(("gamma", "then_gamma"), [(1, 1), (3, 3), (6, 6), (6, 1)])
@pytest.mark.parametrize("first", ["lookup", "past"])
def test_a_greedy_cascade_has_exactly_the_blocks_of_live_decoding(gamma, then_gamma, first):
    store = datastore()
    drafter = PromptLookup(4, 2) if first == "lookup" else PastResponses(store)
    live = live_texts(LookupDraft(drafter, ModelDrafter(DRAFT), then_gamma), GREEDY, gamma)
    kept = [
        kept_by_lookup(text, gamma, 4, 2) if first == "lookup" else kept_by_past_responses(text, gamma, store)
        for text in live
    ]
    scores = score_tokens(DRAFT, live, GREEDY)
    found = found_blocks(kept, (gamma,), texts_of(scores, Rule.named("greedy")), (then_gamma,))
    assert found.calls_NK[:, 0].tolist() == [one.blocks for one in live]
    assert found.found_NK.sum() > 0 < found.others_NK.sum()
    if then_gamma == gamma:
        assert agreement_of(scores, Rule.named("greedy"), [one.blocks for one in live], gamma, sure=kept).z == 0.0
    else:
        longer = found_blocks(kept, (gamma,), texts_of(scores, Rule.named("greedy")))
        assert longer.calls_NK.sum() < found.calls_NK.sum()


class Counted(LookupDraft):
    """Counts the blocks in which the draft's tokens were taken."""

    drafted = 0

    def propose(self, ask):
        proposal = super().propose(ask)
        self.drafted += int(((proposal.sources_R == 1) & ask.active_R).sum())
        return proposal


@pytest.mark.parametrize("rule", ["sample", "block", "greedy-draft"])
@pytest.mark.parametrize("gamma", [2, 5])
def test_a_sampled_cascade_agrees_with_live_decoding_within_coins(rule, gamma):
    worse = perturbed(TARGET, 0.15)
    settings = DecodeSettings(SAMPLED, gamma, Rule.named(rule), 40)
    cascade = Counted(PromptLookup(4, 2), ModelDrafter(worse))
    live, _ = decode(TARGET, cascade, prompts_of([6] * 60, vocab_size=VOCAB), settings, batch_size=60)
    kept = [kept_by_lookup(text, gamma, 4, 2) for text in live]
    scores = score_tokens(worse, live, SAMPLED)
    counted = [one.blocks for one in live]
    assert abs(agreement_of(scores, Rule.named(rule), counted, gamma, sure=kept).z) < 4
    # Without the lookup in front the blocks would be others: the check sees who proposed.
    assert agreement_of(scores, Rule.named(rule), counted, gamma).agrees is False
    blocks = found_blocks(kept, (gamma,), texts_of(scores, Rule.named(rule)))
    assert blocks.found_NK.sum() > 50
    # Some blocks stand in for others, so their number varies less than if each were a coin.
    assert blocks.others_NK.sum() == pytest.approx(cascade.drafted, abs=4 * math.sqrt(cascade.drafted))


def cascade_by_recursion(scores, kept_T, rule, gamma, then_gamma):
    """Expected (found, drafted) blocks of one text."""

    @functools.cache
    def ahead(start):
        if start >= len(scores):
            return np.zeros(2)
        if kept_T[start] >= 0:
            return np.array([1, 0]) + ahead(start + min(kept_T[start], gamma) + 1)
        left = min(then_gamma, len(scores) - start)
        kept = [kept_at_least(scores, rule, start, count) for count in range(left + 1)] + [0.0]
        behind = sum((kept[count] - kept[count + 1]) * ahead(start + count + 1) for count in range(left + 1))
        return np.array([0, 1]) + behind

    return ahead(0)


@pytest.mark.parametrize("rule", ["sample", "block", "greedy"])
def test_the_cascade_equals_its_recursion(rule, monkeypatch):
    scores = [random_scores(length, length) for length in (25, 1, 40, 3)]
    rng = np.random.default_rng(5)
    kept = [rng.integers(-3, 8, len(text)).clip(-1) for text in scores]
    gammas, then_gammas = (1, 2, 5, 7, 7), (1, 2, 5, 7, 2)
    blocks = found_blocks(kept, gammas, texts_of(scores, Rule.named(rule)), then_gammas)
    for row, (text, kept_T) in enumerate(zip(scores, kept, strict=True)):
        for column, (gamma, then_gamma) in enumerate(zip(gammas, then_gammas, strict=True)):
            expected = cascade_by_recursion(text, kept_T, rule, gamma, then_gamma)
            # Sums in another order.
            np.testing.assert_allclose([one[row, column] for one in blocks], expected, rtol=1e-10, atol=1e-12)
    monkeypatch.setattr(replay_module, "ENTRIES_PER_GROUP", 1)
    for one, other in zip(
        found_blocks(kept, gammas, texts_of(scores, Rule.named(rule)), then_gammas), blocks, strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_blocks_cost_what_the_proposer_costs_and_in_a_batch_the_widest():
    blocks = Blocks(np.array([[3]]), np.array([[2]]))
    one = StepCosts(2.0, {4: 1.0}, {4: 3.0}, batch_size=1, context=0)  # v(4) = 1.5, 4 c = .5
    assert found_steps(blocks, (4,), one)[0, 0] == pytest.approx(3 * 1.5 + 2)
    assert found_steps(blocks, (4,), one, (4,))[0, 0] == pytest.approx(3 * 1.5 + 2 * 2.0)
    # A draft of 2 behind it: v(2) = 1.25, 2 c = .25 (c is interpolated, the same at each gamma here).
    assert found_steps(blocks, (4,), one, (2,))[0, 0] == pytest.approx(3 * 1.5 + 2 * 1.5)
    many = StepCosts(2.0, {4: 1.0}, {4: 3.0}, batch_size=8, context=0)
    assert found_steps(blocks, (4,), many)[0, 0] == pytest.approx(5 * 1.5)
    assert found_steps(blocks, (4,), many, (4,))[0, 0] == pytest.approx(5 * 2.0)
    assert found_steps(blocks, (4,), many, (2,))[0, 0] == pytest.approx(5 * (1.5 + 0.25))


def test_lookup_is_tuned_to_its_text():
    # One token in common with what stood before, always wrongly; nine in a row are copied faithfully.
    copied = list(range(10, 19))
    says = [1, *copied, 2, 1, 30, 31, *copied, 40, 1, 41, *copied, 2]
    text = HeldoutResponse("a", "x", [0], says, [0.0] * len(says))
    for costs in (given_costs(1.0, 0.1, 1.2), given_costs(1.0, 0.1, 2.5)):
        tuned = tuned_lookup([text], costs)
        # The slow twin: each size and gamma decoded block by block.
        speeds = {}
        for sizes in NGRAM_SIZES:
            for gamma in range(1, 17):
                kept_T, place, steps = kept_by_lookup(text, gamma, *sizes), 0, 0.0
                while place < len(says):
                    steps += 1.0 if kept_T[place] < 0 else costs.verify_ratio(gamma)
                    place += max(kept_T[place], 0) + 1
                speeds[(*sizes, gamma)] = len(says) / steps
        assert tuned.speed_up == pytest.approx(max(speeds.values()))
        assert speeds[(*tuned.sizes, tuned.gamma)] == pytest.approx(tuned.speed_up)
    assert tuned.sizes[1] > 1, "a wrong proposal costs 1.5 steps there: only surer matches pay"


def test_before_a_good_draft_only_sure_matches_take_its_place():
    texts = live_texts(None, SAMPLED, 0, prompts=[6] * 12)
    costs = given_costs(1.0, 0.02)
    scores = score_tokens(TARGET, texts, SAMPLED)  # the target as its own draft: always accepted
    alone, together = (
        tuned_lookup(texts, costs),
        tuned_lookup(texts, costs, drafted=texts_of(scores, Rule.named("sample"))),
    )
    assert together.sizes[1] > alone.sizes[1]
    assert together.speed_up > alone.speed_up
    kept = [kept_by_lookup(text, 16, *together.sizes) for text in texts]
    gammas, then_gammas = (together.gamma,), (together.then_gamma,)
    blocks = found_blocks(kept, gammas, texts_of(scores, Rule.named("sample")), then_gammas)
    tokens = sum(len(text.response_ids) for text in texts)
    assert together.tau == pytest.approx(tokens / blocks.calls_NK.sum())
    assert together.speed_up == pytest.approx(tokens / found_steps(blocks, gammas, costs, then_gammas).sum())
