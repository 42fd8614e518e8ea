"""Ceilings of drafting and the baseline that costs nothing, against direct computation and live decoding; the decision."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import perturbed, prompts_of, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.engine.models import evaluating
from speculative.evaluate import HeldoutResponse
from speculative.explain import ceilings
from speculative.measure import replay
from speculative.measure.baseline_replay import NGRAM_SIZES, tuned_lookup
from speculative.measure.cost import StepCosts, best_gamma, given_costs
from speculative.measure.measured import Measured
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings, logits_to_probs

VOCAB = 8  # Small, so that texts repeat themselves and lookup has something to find.
TARGET = tiny_model(vocab_size=VOCAB)
CHEAP = given_costs(1.0, 0.1)
WARM = SamplingSettings(0.7, top_k=5)
ROW = Measured("d", "sample")


def texts_of(sampling: SamplingSettings, count: int = 6, tokens: int = 40) -> list[HeldoutResponse]:
    settings = DecodeSettings(sampling, 0, Rule.named("greedy" if sampling.greedy else "sample"), tokens)
    prompts = prompts_of([5 + index for index in range(count)], vocab_size=VOCAB)
    responses, _ = decode(TARGET, None, prompts, settings)
    return [HeldoutResponse(one.key, "x", one.prompt_ids, one.response_ids, one.log_target_probs) for one in responses]


def test_lookup_outlook_of_text_that_repeats_and_of_text_that_does_not():
    loop = [HeldoutResponse("a", "x", [1, 2, 3], [1, 2, 3] * 10, [0.0] * 30)]
    found, _, hits = ceilings.lookup_outlook(loop, ["a"], range(1, 17), CHEAP, ROW)
    assert found.speed_up > 5
    assert hits > 0.9
    assert found.ngrams in NGRAM_SIZES
    fresh = [HeldoutResponse("a", "x", [100], list(range(30)), [0.0] * 30)]
    nothing, proposes, hits = ceilings.lookup_outlook(fresh, ["a"], range(1, 17), CHEAP, ROW)
    assert (nothing.gamma, nothing.speed_up, proposes, hits) == (0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("sampling", [SamplingSettings(1.0), WARM])
def test_peaks_are_the_largest_probability_at_the_serving_settings(sampling):
    texts = texts_of(sampling, count=3)
    for text, peaks in zip(texts, ceilings.target_peaks(TARGET, texts, sampling), strict=True):
        with evaluating(TARGET):
            logits_TV = TARGET(input_ids=torch.tensor([[*text.prompt_ids, *text.response_ids]])).logits[0]
        probs_TV = logits_to_probs(logits_TV[len(text.prompt_ids) - 1 : -1], sampling)
        np.testing.assert_allclose(peaks.peaks, probs_TV.amax(-1).numpy(), atol=1e-5)  # batched against alone, float32
        np.testing.assert_array_equal(peaks.matches, probs_TV.argmax(-1).numpy() == np.array(text.response_ids))


@pytest.mark.parametrize("rule", ["sample", "greedy-draft", "block"])
def test_a_parallel_draft_whose_every_offset_is_as_good_has_the_outlook_of_one_token_by_token(rule):
    """Tables that repeat each token's own number at every offset are another way to write the same draft."""
    texts = texts_of(WARM)
    plain = score_tokens(perturbed(TARGET, 0.03), texts, WARM)

    def table(values_T: np.ndarray, behind: float) -> np.ndarray:
        rows = [[values_T[i + j] if i + j < len(values_T) else behind for j in range(8)] for i in range(len(values_T))]
        return np.array(rows)

    both = []
    for own in plain:
        parts = {"log_draft_probs": 0.0, "log_target_probs": 0.0, "matches": True, "choice_ids": 0}
        both.append(
            replace(own, by_start=replace(own, **{name: table(getattr(own, name), of) for name, of in parts.items()}))
        )
    peaks, keys = ceilings.target_peaks(TARGET, texts, WARM), [text.prompt for text in texts]
    costs, row = given_costs(1.0, 0.1, max_gamma=8), Measured("d", rule)
    expected, found = (ceilings.draft_outlook(of, peaks, keys, costs, row, 1.0, texts) for of in (plain, both))
    for one, like in zip(found.rows, expected.rows, strict=True):
        assert (one.way, one.gamma) == (like.way, like.gamma)
        assert (one.tau, one.speed_up) == (pytest.approx(like.tau), pytest.approx(like.speed_up)), one.way
    assert found.distilled.speed_up > found.now.speed_up
    assert found.decision == expected.decision


def test_what_is_hopeless_of_a_token_need_not_be_of_a_block():
    assert ceilings.hopeless_because(given_costs(1.0, 0.8)) == "cost_ratio"
    assert ceilings.hopeless_because(given_costs(1.0, 0.8, parallel=True)) is None
    dear = given_costs(1.0, 7.0, max_gamma=8, parallel=True)
    assert ceilings.hopeless_because(dear) == "perfect_draft"
    assert ceilings.advice(dear)[1].startswith("at c = 7.00 of a block even")


def test_greedy_text_is_all_the_targets_argmax():
    for peaks in ceilings.target_peaks(TARGET, texts_of(GREEDY), GREEDY):
        assert peaks.matches.all()
        assert (peaks.peaks == 1.0).all()


def test_the_greedy_ceiling_is_an_unbiased_bound():
    sampling = SamplingSettings(1.0)
    texts = texts_of(sampling, count=12, tokens=60)
    peaks = ceilings.target_peaks(TARGET, texts, sampling)
    scores = score_tokens(perturbed(TARGET, 0.1), texts, sampling)
    row = Measured("d", "greedy-draft")
    found = ceilings.draft_outlook(scores, peaks, [text.key for text in texts], CHEAP, row)
    # Both estimate E[max prob]; the gap is the coins of 720 tokens: standard deviation under .5 / sqrt(720) = .019.
    matches = float(np.concatenate([one.matches for one in peaks]).mean())
    assert found.ceiling.alpha == pytest.approx(matches, abs=4 * 0.019)
    assert found.now.alpha < found.ceiling.alpha


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.2, 1))
def test_a_better_start_never_ends_worse_and_no_one_passes_the_ceiling(one, other, ceiling):
    low, high = sorted((one * ceiling, other * ceiling))
    ends = [start + ceilings.closed_share(start, ceiling) * (ceiling - start) for start in (low, high)]
    assert ends[0] <= ends[1] + 1e-9
    assert all(0 <= ceilings.closed_share(start, ceiling) <= 1 for start in (low, high))
    assert ends[1] <= ceiling + 1e-9


# (start, end) that the constants were fitted to, within two and a half residuals (.11 of the gap each).
@pytest.mark.parametrize(
    ("start", "end"), [(0.211, 0.668), (0.371, 0.688), (0.502, 0.827), (0.759, 0.818), (0.774, 0.801), (0.8129, 0.8126)]
)
def test_reachable_is_near_what_was_reached(start, end):
    assert start + ceilings.closed_share(start) * (1 - start) == pytest.approx(end, abs=2.5 * 0.11 * (1 - start))


def test_block_closes_the_same_share_of_what_is_missing():
    assert ceilings.partly_closed_tau(3.0, 4, 2.0, 3.5) == pytest.approx(4.0)
    assert ceilings.partly_closed_tau(5.0, 4, 5.0, 5.0) == 5.0


@given(st.floats(0.601, 5), st.floats(1, 3))
def test_a_cost_ratio_over_six_tenths_is_hopeless_whatever_the_verify_call(c, v):
    assert ceilings.hopeless_because(given_costs(1.0, c, v)) == "cost_ratio"
    assert ceilings.decide(given_costs(1.0, c, v), 1.3, 1.4, 1.0) == "hopeless"


@given(st.floats(0.01, 0.6), st.floats(0.01, 0.6), st.floats(1, 3))
def test_a_cheaper_draft_is_never_more_hopeless(one, other, v):
    low, high = sorted((one, other))
    if ceilings.hopeless_because(given_costs(1.0, high, v)) is None:
        assert ceilings.hopeless_because(given_costs(1.0, low, v)) is None


def test_a_dear_verify_call_is_hopeless_too():
    assert ceilings.hopeless_because(given_costs(1.0, 0.1)) is None
    steep = StepCosts(1.0, {1: 0.3, 8: 2.4}, {1: 1.6, 8: 5.0}, batch_size=16, context=0)
    assert ceilings.hopeless_because(steep) == "perfect_draft"
    assert best_gamma(ceilings.perfect_taus(ceilings.ceiling_gammas(steep)), steep)[1] < ceilings.PERFECT_WORTH


@pytest.mark.parametrize(
    ("c", "v", "batch_size", "culprit", "said"),
    [
        (0.7, {5: 1.2}, None, "draft", "at c = 0.70 even a draft that is always accepted would give 1.30x: use a shallower draft"),
        (0.03, {1: 1.9, 5: 5.0}, 4, "verify", "at c = 0.03 and v(8) = 7.40 even a draft that is always accepted would give 1.18x"),
        (0.03, {1: 1.9, 5: 5.0}, 4, "verify", "a shallower draft cannot help: make verify calls cheaper (a smaller batch, "),
        (0.03, {1: 1.9, 5: 5.0}, 1, "verify", "a shallower draft cannot help: make verify calls cheaper (another kernel"),
        (0.3, {1: 1.6, 8: 5.0}, 16, "either", "use a shallower draft or make verify calls cheaper (a smaller batch, "),
        (0.7, {1: 2.0, 5: 6.0}, 1, "both", "would give no speed-up: use a shallower draft and make verify calls cheaper"),
        (0.25, {1: 4.0, 16: 4.0}, 1, "either", "even a draft that is accepted at alpha 0.9 would give 1.0"),
    ],
)  # fmt: skip
def test_advice_goes_by_what_costs_too_much(c, v, batch_size, culprit, said):
    """A shallower draft is no advice where the target's calls are too dear: free of charge it would be as hopeless."""
    costs = StepCosts(1.0, {1: c}, v, batch_size=batch_size or 0, context=0)
    assert ceilings.advice(costs)[0] == culprit
    assert said in ceilings.advice(costs)[1]
    assert ceilings.price_of("d", "sample", costs).advice == ceilings.advice(costs)[1]


@given(st.floats(0.001, 2), st.floats(1, 4), st.floats(0, 8))
def test_advice_is_there_where_the_pair_is_hopeless_and_following_it_helps(c, v, more):
    costs = StepCosts(1.0, {1: c}, {1: v, 8: v + more}, batch_size=2, context=0)
    advised = ceilings.advice(costs)
    assert (advised is None) == (ceilings.hopeless_because(costs) is None)
    if advised is not None:
        shallower = StepCosts(1.0, {1: 0.0}, costs.verify_seconds, batch_size=2, context=0)
        helps = ceilings.hopeless_because(shallower) is None
        assert helps == (advised[0] in ("draft", "either"))
        assert ("a shallower draft cannot help" in advised[1]) == (advised[0] == "verify")
        assert helps or advised[0] != "draft"


def test_few_measured_gammas_do_not_make_a_pair_hopeless():
    assert ceilings.hopeless_because(StepCosts(1.0, {1: 0.3}, {1: 1.1}, batch_size=1, context=0)) is None


@pytest.mark.parametrize(
    ("now", "reachable", "baseline", "word"),
    [
        (2.0, 2.05, 1.0, "no_headroom"),
        (2.0, 2.5, 1.0, "already_pays"),
        (2.0, 2.5, 2.2, "needs_distillation"),  # lookup gives more today
        (1.0, 1.4, 1.0, "needs_distillation"),
        (1.05, 1.3, 1.2, "needs_distillation"),
        (1.0, 1.02, 1.0, "out_of_reach"),
        (1.3, 1.6, 1.8, "out_of_reach"),
        (1.0, 1.0, 1.0, "out_of_reach"),
    ],
)
def test_the_decision_follows_from_the_numbers(now, reachable, baseline, word):
    assert ceilings.decide(CHEAP, now, reachable, baseline) == word


@pytest.mark.parametrize(
    ("after_lookup", "word"),
    [((2.4, 2.5), "out_of_reach"), ((2.3, 2.6), "needs_distillation"), ((2.6, 2.9), "already_pays")],
)
def test_a_draft_after_the_baseline_is_worth_what_it_adds_to_it(after_lookup, word):
    assert ceilings.decide(CHEAP, 1.2, 1.6, 2.4) == "out_of_reach"
    assert ceilings.decide(CHEAP, 1.2, 1.6, 2.4, after_lookup) == word


def test_lookup_before_a_draft_is_the_cascade_and_distilling_adds_to_it():
    texts = texts_of(WARM, count=8)
    scores = score_tokens(perturbed(TARGET, 0.2), texts, WARM)
    peaks, keys = ceilings.target_peaks(TARGET, texts, WARM), [text.key for text in texts]
    now, distilled = ceilings.draft_outlook(scores, peaks, keys, CHEAP, ROW, 1.0, texts).after_lookup
    tuned = tuned_lookup(texts, CHEAP, range(1, 17), replay.texts_of(scores, Rule.named("sample")))
    assert (now.ngrams, now.gamma, now.then_gamma) == (
        tuned.sizes,
        tuned.gamma,
        tuned.then_gamma,
    )
    assert (now.tau, now.speed_up) == (pytest.approx(tuned.tau), pytest.approx(tuned.speed_up))
    assert now.speed_up_ci[0] < now.speed_up < now.speed_up_ci[1]
    assert distilled.speed_up > now.speed_up > 1.0
    assert ceilings.draft_outlook(scores, peaks, keys, CHEAP, ROW).after_lookup == ()


@pytest.mark.parametrize("rule", ["sample", "block"])
def test_the_target_as_its_own_draft_has_no_headroom(rule):
    sampling = SamplingSettings(1.0)
    texts = texts_of(sampling)
    peaks = ceilings.target_peaks(TARGET, texts, sampling)
    row = Measured("d", rule)
    found = ceilings.draft_outlook(score_tokens(TARGET, texts, sampling), peaks, list(range(6)), CHEAP, row)
    assert found.ceiling.alpha - found.now.alpha == pytest.approx(0, abs=1e-4)  # one pass against another, float32
    # Texts of 40 tokens end inside their last block: tau 8 instead of 9 at gamma 8 and the like.
    assert found.now.speed_up == pytest.approx(found.distilled.speed_up, rel=1e-3)
    assert found.decision == "no_headroom"


def test_an_outlook_adds_up():
    sampling = SamplingSettings(1.0)
    texts = texts_of(sampling, count=8)
    peaks, keys = ceilings.target_peaks(TARGET, texts, sampling), [text.key for text in texts]
    scores = score_tokens(perturbed(TARGET, 0.1), texts, sampling)
    for rule in ("sample", "greedy-draft", "block"):
        found = ceilings.draft_outlook(scores, peaks, keys, CHEAP, Measured("d", rule))
        now = found.now
        assert now.speed_up == pytest.approx(found.taus[now.gamma] / (0.1 * now.gamma + 1))
        assert now.speed_up == pytest.approx(max(tau / (0.1 * gamma + 1) for gamma, tau in found.taus.items()))
        assert now.speed_up_ci[0] < now.speed_up < now.speed_up_ci[1]
        assert now.speed_up <= found.distilled.speed_up <= found.ceiling.speed_up
        assert (found.ceiling.alpha == 1.0) == (rule != "greedy-draft")
        dear = given_costs(1.0, 0.4)
        assert ceilings.at_load(now, found.taus, dear).speed_up < now.speed_up
