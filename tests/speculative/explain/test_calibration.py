"""Reliability curves against enumeration of the vocabulary, and the confidence stop against a simulated decoder."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import perturbed, prompts_of, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.evaluate import HeldoutResponse
from speculative.explain.calibration import calibration, stop_below
from speculative.measure.intervals import ratio_interval
from speculative.measure.token_scores import TokenScores, score_tokens
from speculative.rules.sampling import SamplingSettings, logits_to_probs
from speculative.rules.verify import draft_settings_for

BINS = 10


def texts_of(lengths, prompt_of=lambda index: index):
    return [
        HeldoutResponse(f"r{index}", "a", [prompt_of(index)], [1] * length, [0.0] * length)
        for index, length in enumerate(lengths)
    ]


def greedy_scores(choice_probs, matches):
    choice_probs, matches = np.array(choice_probs, dtype=float), np.array(matches, dtype=bool)
    zeros = np.zeros(len(matches))
    return TokenScores(zeros, zeros, matches, zeros.astype(int), choice_probs)


def mass_in_bins(draft_probs_TV):
    mass_TC = np.zeros((len(draft_probs_TV), BINS))
    for place, probs_V in enumerate(draft_probs_TV):
        np.add.at(mass_TC[place], np.minimum((probs_V * BINS).astype(int), BINS - 1), probs_V)
    return mass_TC


def sampled_scores(draft_probs_TV, target_probs_TV, ids):
    rows = np.arange(len(ids))
    with np.errstate(divide="ignore"):
        log_draft, log_target = np.log(draft_probs_TV[rows, ids]), np.log(target_probs_TV[rows, ids])
    choices = draft_probs_TV.argmax(-1)
    return TokenScores(
        log_draft, log_target, choices == ids, choices, draft_probs_TV.max(-1), mass_in_bins(draft_probs_TV)
    )


def enumerated(draft_probs_TV, target_probs_TV):
    """(drafted, accepted, sum of probabilities) (C,) by bin, over every token the draft could propose: the slow twin."""
    drafted, accepted, confidence = np.zeros(BINS), np.zeros(BINS), np.zeros(BINS)
    for draft_V, target_V in zip(draft_probs_TV, target_probs_TV, strict=True):
        for draft, target in zip(draft_V, target_V, strict=True):
            if draft > 0:
                place = min(int(draft * BINS), BINS - 1)
                drafted[place] += draft
                accepted[place] += draft * min(1.0, target / draft)
                confidence[place] += draft * draft
    return drafted, accepted, confidence


@given(st.integers(0, 2**20), st.floats(0.1, 3.0))
@settings(max_examples=40)
def test_importance_weights_equal_enumeration(seed, sharpness):
    """Text in which every token stands as often as the target says it: the two sides of the identity are equal."""
    rng = np.random.default_rng(seed)
    counts_V = rng.multinomial(40, rng.dirichlet(np.ones(6)))
    target_V = counts_V / counts_V.sum()
    draft_V = rng.dirichlet(np.full(6, sharpness))
    ids = np.repeat(np.arange(6), counts_V)
    draft_TV, target_TV = np.tile(draft_V, (len(ids), 1)), np.tile(target_V, (len(ids), 1))
    found = calibration(texts_of([len(ids)]), [sampled_scores(draft_TV, target_TV, ids)], "sample")
    drafted, accepted, confidence = enumerated([draft_V], [target_V])
    filled = np.flatnonzero(drafted)
    assert [one.low for one in found.bins] == (filled / BINS).tolist()
    for place, one in zip(filled, found.bins, strict=True):
        assert one.weight == pytest.approx(drafted[place])
        assert one.accepted == pytest.approx(accepted[place] / drafted[place], abs=1e-9)
        assert one.ci is None
        mean = confidence[place] / drafted[place]
        # Exact where a bin has room for one token. Where the mass tells how many there are, they differ by a bin's width
        # at most, so that their probability-weighted mean is within .05 ** 2 / .3 of the plain one.
        assert one.confidence == pytest.approx(mean, abs=1e-9 if place >= 5 else 0.01 if place >= 3 else 0.1)
        assert one.low - 1e-9 <= one.confidence <= one.high + 1e-9


@pytest.mark.parametrize("rule", ["sample", "sample-untruncated"])
def test_tiny_models_against_their_full_distributions(rule):
    sampling = SamplingSettings(0.7, top_k=20)
    drafted = draft_settings_for(rule, sampling)
    target = tiny_model()
    draft = perturbed(target, 0.05)
    texts, _ = decode(target, None, prompts_of([5] * 50), DecodeSettings(sampling, max_tokens=40), batch_size=50)
    held = [HeldoutResponse(one.key, "a", one.prompt_ids, one.response_ids, one.log_target_probs) for one in texts]
    found = calibration(held, score_tokens(draft, held, sampling, confidence=drafted), rule)
    probs = {"draft": [], "target": []}
    for text in held:
        for name, model in (("draft", draft), ("target", target)):
            with torch.no_grad():
                logits = model(torch.tensor([text.prompt_ids + text.response_ids])).logits[0, 4:-1]
            own = drafted if name == "draft" else sampling
            probs[name].append(logits_to_probs(logits, own).double().numpy())
    drafted, accepted, confidence = enumerated(*(np.concatenate(probs[name]) for name in ("draft", "target")))
    assert len(found.bins) == np.count_nonzero(drafted) >= 8
    assert sum(one.ci is not None for one in found.bins) >= 8
    for one in found.bins:
        place = round(one.low * BINS)
        assert one.weight == pytest.approx(drafted[place] / drafted.sum(), rel=1e-3)  # float32 at bin edges
        if one.ci is None:  # of one prompt
            continue
        # 2000 tokens of text stand for the target: 1.5 times the width of a 95 % interval is six standard errors.
        width = one.ci[1] - one.ci[0]
        assert width > 0
        assert abs(one.accepted - accepted[place] / drafted[place]) < 1.5 * width + 1e-3
        assert one.confidence == pytest.approx(confidence[place] / drafted[place], abs=0.02 if place else 0.05)
    error = sum(one.weight * abs(one.accepted - one.confidence) for one in found.bins)
    assert found.expected_error == pytest.approx(error)


def test_greedy_bins_equal_counts_by_hand_and_intervals_are_over_prompts():
    own = [greedy_scores([0.15, 0.95, 1.0], [0, 1, 0]), greedy_scores([0.12, 0.97], [1, 1]), greedy_scores([0.18], [0])]
    texts = texts_of([3, 2, 1], prompt_of=lambda index: index // 2)
    found = calibration(texts, own, "greedy", name="served")
    assert (found.rule, found.name, found.stop_below) == ("greedy", "served", None)
    low, high = found.bins
    assert (low.low, low.high, high.low, high.high) == (0.1, 0.2, 0.9, 1.0)
    assert (low.weight, high.weight) == (0.5, 0.5)
    assert (low.accepted, high.accepted) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert (low.confidence, high.confidence) == (pytest.approx(0.15), pytest.approx(2.92 / 3))
    assert low.ci == pytest.approx(list(ratio_interval(np.array([1.0, 0.0]), np.array([2.0, 1.0]))))
    assert high.ci is None  # One prompt.
    assert found.words.startswith("67 % of the tokens drafted with probability 0.9-1.0 are accepted; ")


def two_moods(seed=0, texts=40, length=400):
    """A greedy draft that is either sure (and right at 0.95) or not (right at 0.15)."""
    rng = np.random.default_rng(seed)
    sure = [rng.random(length) < 0.6 for _ in range(texts)]
    return [greedy_scores(np.where(own, 0.95, 0.15), rng.random(length) < np.where(own, 0.95, 0.15)) for own in sure]


def simulated_speed_up(scores, gamma, threshold, c, dv):
    """Tokens per target step of a greedy decoder along the text whose blocks end behind an unsure drafted token."""
    tokens, steps = 0, 0.0
    for own in scores:
        place, end = 0, len(own)
        while place < end:
            drafted, accepted, alive = 0, 0, True
            while drafted < gamma and place + drafted < end:
                alive = alive and bool(own.matches[place + drafted])
                accepted += alive
                drafted += 1
                # Behind a wrong token the draft goes on by its own text: as sure as anywhere.
                if own.choice_probs[place + drafted - 1] < threshold:
                    break
            tokens += accepted + 1
            steps += 1.0 + drafted * (c + dv)
            place += accepted + 1
    return tokens / steps


def test_the_threshold_beats_no_stop_and_a_stop_everywhere():
    scores, gamma, c, dv = two_moods(), 5, 0.15, 0.05
    without = simulated_speed_up(scores, gamma, 0.0, c, dv)
    threshold, words = stop_below(scores, "greedy-draft", speed_up=without, cost_ratio=c, verify_slope=dv)
    assert threshold == 0.2
    assert "below 0.2" in words
    with_stop = simulated_speed_up(scores, gamma, threshold, c, dv)
    assert with_stop > 1.02 * without
    assert with_stop > 1.02 * simulated_speed_up(scores, gamma, 0.99, c, dv)


def test_a_further_token_of_a_parallel_draft_costs_the_verify_call_alone_and_is_kept_as_its_second_offset_is():
    dear = {"speed_up": 1.01, "cost_ratio": 0.9, "verify_slope": 0.1, "parallel": True}
    scores = two_moods(texts=5)
    behind = [np.append(own.matches[1:], True) for own in scores]
    alike, wrong = (
        [
            replace(own, by_start=replace(own, matches=np.stack((own.matches, second), 1)))
            for own, second in zip(scores, seconds, strict=True)
        ]
        for seconds in (behind, [np.zeros_like(second) for second in behind])
    )
    stopped = stop_below(scores, "greedy-draft", **(dear | {"cost_ratio": 0.0, "parallel": False}))
    assert stop_below(alike, "greedy-draft", **dear)[0] == stopped[0] is not None
    assert stop_below(wrong, "greedy-draft", **dear)[0] is None


@pytest.mark.parametrize("speed_up", [1.0, 0.4])
def test_a_pair_that_pays_nowhere_is_told_so_and_held_to_plain_decoding(speed_up):
    """A target step without a draft gives one token, so a slow pair does not make drafted tokens cheap."""
    scores = two_moods(texts=5)
    dear = {"speed_up": speed_up, "verify_slope": 0.05}
    assert stop_below(scores, "greedy-draft", cost_ratio=0.95, **dear) == (
        None,
        "at c = 0.95 no gamma makes this draft pay, and no confidence stop does: decode without it",
    )
    threshold, words = stop_below(scores, "greedy-draft", cost_ratio=0.4, **dear)
    assert threshold == stop_below(scores, "greedy-draft", speed_up=1.001, cost_ratio=0.4, verify_slope=0.05)[0] > 0
    assert words.startswith("at c = 0.40 no gamma makes this draft pay; stopping after a token of probability below ")
    threshold, words = stop_below(scores, "greedy-draft", cost_ratio=0.001, speed_up=speed_up, verify_slope=0.0)
    assert threshold == 0.0
    assert words.endswith("no confidence stop does: decode without it")


def test_bins_of_a_few_tokens_are_passed_over():
    # The lowest bin fails each time, but in three tokens.
    few = [greedy_scores([0.05, 0.95, 0.95], [0, 1, 1])] * 3
    many = [greedy_scores([0.35] * 20, [1] * 20), greedy_scores([0.95] * 20, [1] * 20)]
    assert stop_below([*few, *many, *many], "greedy", speed_up=1.0, cost_ratio=0.3, verify_slope=0.0)[0] == 0.0
    threshold, words = stop_below(few, "greedy", speed_up=1.0, cost_ratio=0.3, verify_slope=0.0)
    assert (threshold, words) == (0.0, "there is too little text to advise a confidence stop: leave it off")
    assert stop_below([*few * 7, *many * 2], "greedy", speed_up=1.0, cost_ratio=0.3, verify_slope=0.0)[0] == 0.1


def test_a_bin_without_a_failure_is_not_taken_for_certain():
    scores = [greedy_scores([0.95, 0.05], [1, 0]) for _ in range(4)]
    low, high = calibration(texts_of([2] * 4), scores, "greedy").bins
    # Four prompts: 0.025 ** (1 / 4) = 0.398 (Clopper-Pearson).
    assert high.ci == (pytest.approx(0.025**0.25), 1.0)
    assert low.ci == (0.0, pytest.approx(1 - 0.025**0.25))


def test_what_a_further_token_brings_is_measured_after_the_bin():
    # Behind the unsure token nothing is right, behind the sure one everything is: 0.5 and 1 are their own acceptances.
    scores = [greedy_scores([0.55, 0.95, 0.95, 0.55, 0.95, 0.95], [1, 0, 1, 0, 1, 1])] * 10
    # Pairs (0.55, then): 1 * 0 and 0 * 1; (0.95, then): 0 * 1, 1 * 0, 1 * 1.
    for cost, expected in ((0.32, 0.6), (0.34, None)):
        found, _ = stop_below(scores, "greedy", speed_up=1.0, cost_ratio=cost, verify_slope=0.0)
        assert found == expected
    # The price is speed_up * (cost_ratio + verify_slope), however it is made up.
    assert stop_below(scores, "greedy", speed_up=2.0, cost_ratio=0.1, verify_slope=0.06)[0] == 0.6
    assert stop_below(scores, "greedy", speed_up=2.0, cost_ratio=0.1, verify_slope=0.07)[0] is None


def test_a_sampled_draft_is_judged_by_the_mass_it_would_draft():
    """Importance weights: equal to counting drafted pairs when every token stands as often as the target says it."""
    draft_V, target_V = np.array([0.72, 0.28]), np.array([0.4, 0.6])
    ids = np.array([0] * 4 + [1] * 6)
    pairs = [
        sampled_scores(np.tile(draft_V, (2, 1)), np.tile(target_V, (2, 1)), np.array([one, two]))
        for one in ids
        for two in ids
    ]
    alpha = np.minimum(draft_V, target_V).sum()
    # Behind bin 0.2-0.3: accepted for sure (target above draft), then alpha; behind 0.7-0.8: 0.4 / 0.72, then alpha.
    for price, expected in ((alpha * 0.4 / 0.72 - 0.01, 0.0), (alpha - 0.01, 0.0), (alpha + 0.01, None)):
        assert stop_below(pairs, "sample", speed_up=1.0, cost_ratio=price, verify_slope=0.0)[0] == expected


def test_scores_without_confidence_are_refused_and_nothing_is_no_curve():
    bare = TokenScores(np.zeros(1), np.zeros(1), np.ones(1, dtype=bool), np.zeros(1, dtype=int), np.ones(1))
    with pytest.raises(ValueError, match="confidence=settings"):
        calibration(texts_of([1]), [bare], "sample")
    with pytest.raises(ValueError, match="confidence=settings"):
        stop_below([bare], "block", speed_up=1.0, cost_ratio=0.1, verify_slope=0.0)
    empty = greedy_scores([], [])
    found = calibration(texts_of([0]), [empty], "greedy")
    assert (found.bins, found.expected_error, found.words) == ([], 0.0, "nothing was drafted")
    assert stop_below([empty], "greedy", speed_up=1.0, cost_ratio=0.1, verify_slope=0.0)[0] == 0.0
