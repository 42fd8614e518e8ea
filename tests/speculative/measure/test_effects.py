"""Paired effects: against their parts, on drafts that are equal, few prompts, many looks, and by simulation."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from speculative.measure.effects import (
    CallEffects,
    Detectable,
    Effects,
    Gain,
    fewest_prompts,
    paired_effects,
    paired_gains,
    rough_detectable,
    too_few,
    words,
)
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import TokenScores
from speculative.rules.rule import Rule


def scores_of(texts=40, shift=0.0, seed=0):
    """Responses of one target scored by a draft; `shift` makes the same draft better in places."""
    rng = np.random.default_rng(seed)
    scores = []
    for _ in range(texts):
        length = int(rng.integers(10, 60))
        log_target = np.log(rng.uniform(0.1, 1, length))
        hardness = rng.normal(0.8, 0.4)
        log_draft = np.minimum(log_target - np.abs(rng.normal(size=length)) * hardness + shift * rng.random(), -1e-3)
        scores.append(TokenScores(log_draft, log_target, rng.random(length) < 0.7, np.zeros(length, int)))
    return scores


BASELINE, BETTER = scores_of(), scores_of(shift=0.2)
KEYS = [f"prompt {index // 2}" for index in range(40)]


def effects_of_sums(keys, tokens, ours, baseline, looks=1):
    """Of (accepted tokens, blocks) of each draft."""
    accepted, blocks = zip(ours, baseline, strict=True)
    return Effects(**paired_gains(keys, tokens, {"alpha": accepted, "tau": blocks}, looks))


@pytest.mark.parametrize("rule", ["sample", "block", "greedy-draft"])
def test_effects_are_differences_on_the_same_text(rule):
    ours = list(BETTER)
    ours[0] = replace(ours[0], matches=np.ones(len(ours[0]), dtype=bool))
    found = paired_effects(ours, BASELINE, KEYS, rule=Rule.named(rule), gamma=4)
    alphas = [
        np.concatenate([text.accept_probs(Rule.named(rule)) for text in side]).mean() for side in (ours, BASELINE)
    ]
    tokens = sum(map(len, ours))
    taus = [tokens / expected_blocks_of(side, Rule.named(rule), (4,)).sum() for side in (ours, BASELINE)]
    assert found.alpha.gain == pytest.approx(alphas[0] - alphas[1])
    assert found.tau.gain == pytest.approx(taus[0] - taus[1])
    for effect in (found.alpha, found.tau):
        assert effect.ci[0] <= effect.gain <= effect.ci[1]
    assert (found.prompts, found.tokens, found.prompts_for_half) == (20, tokens, 80)
    json.dumps(found.record(), allow_nan=False)


def test_a_gain_is_a_gain_a_loss_its_mirror_and_nothing_is_nothing():
    gain, loss = (
        paired_effects(*pair, KEYS, rule=Rule.named("sample"), gamma=4)
        for pair in ((BETTER, BASELINE), (BASELINE, BETTER))
    )
    assert (gain.certain, loss.certain) == ("gain", "loss")
    assert gain.alpha.gain == pytest.approx(-loss.alpha.gain)
    assert gain.speed_up is None
    same = paired_effects(BASELINE, BASELINE, KEYS, rule=Rule.named("sample"), gamma=4, looks=7)
    assert same.alpha == same.tau == Gain(gain=0.0, ci=(0.0, 0.0))
    assert same.certain == "none"
    assert same.minimal_detectable == Detectable(alpha=None, tau=None)
    assert words(same).endswith("all 20 prompts agree")


def test_alpha_and_tau_are_each_certain_by_themselves():
    """More is accepted, evenly; blocks of some prompts get longer and of others shorter."""
    tokens, accepted = np.full(20, 50.0), np.full(20, 30.0)
    blocks = np.where(np.arange(20) % 2, 20.0, 24.0)
    found = effects_of_sums(range(20), tokens, (accepted + 1, blocks[::-1]), (accepted, blocks))
    assert (found.certain, found.certain_tau) == ("gain", "none")
    back = effects_of_sums(range(20), tokens, (accepted, blocks + 1), (accepted, blocks))
    assert (back.certain, back.certain_tau) == ("none", "loss")


def test_a_shuffled_baseline_shows_no_gain():
    """Each response's two drafts change places by a coin: whatever is left is noise."""
    certain = []
    for seed in range(20):
        swapped = np.random.default_rng(seed).random(20) < 0.5
        sides = [
            [pair[int(swapped[index // 2]) ^ side] for index, pair in enumerate(zip(BETTER, BASELINE, strict=True))]
            for side in (0, 1)
        ]
        certain.append(paired_effects(*sides, KEYS, rule=Rule.named("sample"), gamma=3).certain)
    # 5 % each: more than four of twenty happen once in 400.
    assert sum(found != "none" for found in certain) <= 4


def test_more_looks_ask_for_more():
    once, many = (
        paired_effects(BETTER, BASELINE, KEYS, rule=Rule.named("sample"), gamma=4, looks=looks) for looks in (1, 20)
    )
    assert many.corrected_confidence == pytest.approx(0.9975)
    assert many.alpha.ci[0] < once.alpha.ci[0] < once.alpha.ci[1] < many.alpha.ci[1]
    assert many.minimal_detectable.alpha > once.minimal_detectable.alpha
    assert "best of 20 judged drafts" in words(many)
    assert "Bonferroni over 20 looks" in many.method
    assert "judged drafts" not in words(once)


def test_too_few_prompts_are_certain_of_nothing():
    """Three prompts agree on the sign one time in four by luck, and no bootstrap of them can reach 0."""
    few = paired_effects(BETTER[:6], BASELINE[:6], KEYS[:6], rule=Rule.named("sample"), gamma=4)
    assert few.alpha.ci[0] > 0
    assert few.certain == "none"
    assert few.tau.ci[0] > 0
    assert few.certain_tau == "none"
    assert words(few).endswith("; 3 prompts are too few to be certain; give at least 6")
    # A difference that would have been seen is not promised: none would be.
    assert few.minimal_detectable == Detectable(alpha=None, tau=None)
    looks = paired_effects(BETTER[:16], BASELINE[:16], KEYS[:16], rule=Rule.named("sample"), gamma=4, looks=20)
    assert (looks.prompts, looks.fewest_prompts, looks.certain_tau) == (8, 10, "none")
    assert too_few(1) == "1 prompt is too few to be certain; give at least 6"
    assert (too_few(6), too_few(10, 0.9975)) == (None, None)
    assert [fewest_prompts(confidence) for confidence in (0.5, 0.95, 0.9975)] == [2, 6, 10]
    one = paired_effects(BETTER[:2], BASELINE[:2], KEYS[:2], rule=Rule.named("sample"), gamma=4)
    assert one.alpha.ci == (one.alpha.gain,) * 2
    assert one.minimal_detectable == Detectable(alpha=None, tau=None)
    assert one.certain == "none"
    with pytest.raises(ValueError, match="same text"):
        paired_effects(BETTER, BASELINE[1:], KEYS, rule=Rule.named("sample"), gamma=4)
    with pytest.raises(ValueError, match="looks"):
        paired_effects(BETTER, BASELINE, KEYS, rule=Rule.named("sample"), gamma=4, looks=0)
    with pytest.raises(ValueError, match="no response has a token"):
        paired_effects([], [], [], rule=Rule.named("sample"), gamma=4)


def pool_of_pairs(prompts=5000, gain=0.02, seed=0):
    """Prompts as sums: tokens, accepted and blocks of two drafts; correlated, of very different lengths."""
    rng = np.random.default_rng(seed)
    tokens = np.minimum(96, rng.geometric(1 / 60, prompts)).astype(float)
    rate = rng.beta(6, 2.5, prompts)
    better = np.clip(rate + rng.normal(gain, 0.06, prompts), 0.02, 0.99)
    sides = [(tokens * own, 1 + tokens / (1 + 2.5 * own)) for own in (better, rate)]
    return tokens, sides


def draw(pool, rows):
    tokens, sides = pool
    return tokens[rows], *((accepted[rows], blocks[rows]) for accepted, blocks in sides)


def test_paired_intervals_cover_the_truth_and_the_detectable_difference_is_detected():
    """200 held-out sets of 40 prompts out of a pool whose own value is the truth."""
    rng, covered, detected = np.random.default_rng(1), [], []
    null_pool = pool_of_pairs()
    truth = effects_of_sums(range(5000), *draw(null_pool, np.arange(5000)))
    detectable = []
    for _ in range(200):
        found = effects_of_sums(range(40), *draw(null_pool, rng.integers(0, 5000, 40)))
        detectable.append(found.minimal_detectable.alpha)
        covered.append(
            [own.ci[0] <= true.gain <= own.ci[1] for own, true in ((found.alpha, truth.alpha), (found.tau, truth.tau))]
        )
    # 95 % with a standard error of 1.5 points.
    assert (np.mean(covered, 0) >= 0.90).all()
    assert (np.mean(covered, 0) <= 0.99).all()
    # A pool whose true gain is what 40 prompts said they can see is seen in about 80 % of draws (standard error 2.8).
    assert np.std(detectable) < 0.2 * np.mean(detectable)
    visible = pool_of_pairs(gain=float(np.mean(detectable)), seed=2)
    for _ in range(200):
        detected.append(effects_of_sums(range(40), *draw(visible, rng.integers(0, 5000, 40))).certain == "gain")
    assert 0.68 <= np.mean(detected) <= 0.9


def test_a_single_draft_bounds_what_a_pair_will_see():
    accept_probs = [text.accept_probs(Rule.named("sample")) for text in BASELINE]
    bound = rough_detectable(accept_probs, KEYS)
    own = paired_effects(BETTER, BASELINE, KEYS, rule=Rule.named("sample"), gamma=4).minimal_detectable.alpha
    assert own < bound
    # sqrt(2) standard errors of alpha by brute force over resampled prompts, times z of both ends.
    sums = np.array(
        [
            [sum(accept_probs[row].sum() for row in rows), sum(len(accept_probs[row]) for row in rows)]
            for rows in np.arange(40).reshape(20, 2)
        ]
    )
    drawn = np.array([sums[rows].sum(0) for rows in np.random.default_rng(0).integers(0, 20, (4000, 20))])
    error = np.std(drawn[:, 0] / drawn[:, 1]) * np.sqrt(20 / 19)
    assert bound == pytest.approx((stats.norm.ppf(0.975) + stats.norm.ppf(0.8)) * 2**0.5 * error, rel=0.06)
    assert rough_detectable(accept_probs[:2], KEYS[:2]) is None
    # Five prompts would see nothing, six may.
    assert rough_detectable(accept_probs[:10], KEYS[:10]) is None
    assert rough_detectable(accept_probs[:12], KEYS[:12]) > bound


def test_gains_without_alpha_are_those_with_it():
    rng = np.random.default_rng(1)
    tokens, accepted = rng.integers(20, 60, 20), rng.uniform(5, 20, 20)
    blocks, faster = rng.uniform(10, 20, 20), rng.uniform(8, 16, 20)
    known = effects_of_sums(range(20), tokens, (accepted, faster), (accepted, blocks), looks=3)
    pairs = {"tau": (faster, blocks), "speed_up": (faster * 1.6, blocks * 1.6)}
    found = CallEffects(**paired_gains(range(20), tokens, pairs, looks=3))
    assert found.minimal_detectable.alpha is None
    for key in ("gain", "ci"):
        assert getattr(found.tau, key) == pytest.approx(getattr(known.tau, key))
        # At one price the speed-up is tau, scaled.
        assert getattr(found.speed_up, key) == pytest.approx(np.array(getattr(known.tau, key)) / 1.6)
    dearer = paired_gains(range(20), tokens, pairs | {"speed_up": (faster * 2.5, blocks * 1.4)})["speed_up"]
    assert dearer.gain == pytest.approx(tokens.sum() / (faster.sum() * 2.5) - tokens.sum() / (blocks.sum() * 1.4))
    same = ("confidence", "looks", "corrected_confidence", "method", "prompts", "tokens", "certain_tau")
    assert [getattr(found, key) for key in same] == [getattr(known, key) for key in same]
    assert found.minimal_detectable.tau == pytest.approx(known.minimal_detectable.tau)
    assert paired_gains(range(20), tokens, {"tau": (faster, blocks)})["speed_up"] is None
    with pytest.raises(ValueError, match="no response has a token"):
        paired_gains([], np.zeros(0), {"tau": (np.zeros(0), np.zeros(0))})
