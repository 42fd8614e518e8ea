"""The verdict's words and outcomes follow from its numbers, and from nothing else."""

import json
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from tiny_models import tiny_model

from distill.config.sections import JudgeConfig
from distill.run.verdict_record import LOOKUP, PAST, TOGETHER, Judgement, Outcome, PairedGain, Verdict
from distill.verdict.contest import Contest, Entrant
from distill.verdict.evidence import Contestant, Evidence
from distill.verdict.sentence import conclude
from distill.verdict.verdict import looks_of, verdict_of
from speculative.decoder.responses import DecodeSettings, Response
from speculative.drafters.draft import Draft
from speculative.evaluate import HeldoutResponse
from speculative.explain.ceilings import advice
from speculative.measure.cost import StepCosts
from speculative.measure.intervals import ratio_interval
from speculative.measure.race import ALONE, Lap, Speed, Standings
from speculative.measure.token_scores import TokenScores

GAMMA = 4
DRAFT = Draft(tiny_model())
CHEAP = StepCosts(0.010, {1: 0.001, 4: 0.004, 8: 0.008}, {1: 0.011, 4: 0.012, 8: 0.014}, 1, 64)
DEAR = StepCosts(0.010, {1: 0.006, 4: 0.024, 8: 0.048}, {1: 0.011, 4: 0.013, 8: 0.016}, 1, 64)


def judgement(**changes):
    return Judgement.model_validate({"alpha": 0.5, "tau": 1.0} | changes)


def scores_of(alphas_NT):
    """Scores whose acceptance probabilities under rule sample are these."""
    return [
        TokenScores(
            np.log(np.maximum(own, 1e-12)), np.zeros(len(own)), np.zeros(len(own), bool), np.zeros(len(own), np.int64),
            own, np.tile(np.eye(10)[5], (len(own), 1)),
        )
        for own in alphas_NT
    ]  # fmt: skip


def contest_of(ratios, texts, free=None):
    """A contest in which drafts and rivals, half a block a token, decode as many times as fast as the target on each prompt."""
    tokens = len(texts[0].response_ids)
    blocks_N = np.full(len(texts), tokens / 2)
    laps = {ALONE: {}}
    for name, of_prompts in (ratios | (free or {})).items():
        for index, ratio in enumerate(of_prompts):
            response = Response("", [], response_ids=[1] * tokens, blocks=tokens)
            laps[ALONE][str(index)] = [Lap(0.0, 0.01 * tokens, response)]
            half = Response("", [], response_ids=[1] * tokens, blocks=tokens // 2)
            laps.setdefault(name, {})[str(index)] = [Lap(0.0, 0.01 * tokens / ratio, half)]
    entrants = tuple(Entrant(name, name, GAMMA, blocks_N, None) for name in laps if name != ALONE)
    tokens_N = np.full(len(texts), tokens)
    standings = Standings(laps, range(len(texts)), tokens_N, {one.name: one.blocks_N for one in entrants}, 6)
    return Contest(entrants, laps, standings)


def evidence_of(gain, ratios, costs=CHEAP, prompts=40, tokens=30, baseline=True, seed=0, served=None, free=None):
    """A pair whose draft accepts `gain` more than its baseline, and decodes at these ratios to the target alone."""
    rng = np.random.default_rng(seed)
    before = rng.uniform(0.2, 0.8, (prompts, tokens))
    after = np.clip(before + gain + rng.normal(0, 0.02, before.shape), 0.0, 1.0)
    texts = [HeldoutResponse(f"key{i}", "code", [i + 1], [1] * tokens, [0.0] * tokens) for i in range(prompts)]
    names = [*(["baseline"] if baseline else []), *(["served"] if served is not None else []), "best"]
    scores = {"baseline": scores_of(before), "best": scores_of(after)}
    if served is not None:
        scores["served"] = scores_of(np.clip(after - served, 0.0, 1.0))
    tree = {
        "step": 3, "alpha": 0.5, "alpha_ci": [0.4, 0.6], "tau": 2.0, "tau_ci": [1.9, 2.1], "accepted_per_drafted": 0.3,
        "survival": [0.5, 0.3, 0.2, 0.1], "prompts": prompts, "tokens": prompts * tokens, "domains": {}, "warnings": [],
        "replay": {gamma: 1.0 + 0.2 * min(gamma, 6) for gamma in range(33)},
    }  # fmt: skip
    record = Judgement.model_validate(tree)
    return Evidence(
        judge=JudgeConfig(),
        settings=DecodeSettings(rule="sample", gamma=GAMMA),
        contestants=tuple(Contestant(name, {"best": "my-draft"}.get(name, name), name, 0, DRAFT) for name in names),
        texts={"sample": texts},
        scores={"sample": {name: scores[name] for name in names}},
        judged=dict.fromkeys(names, record),
        contest=contest_of(dict.fromkeys(names, ratios), texts, free) if ratios is not None else None,
        costs=dict.fromkeys(names, costs) if ratios is not None else None,
    )


def verdict(evidence, looks=1):
    return verdict_of(evidence, checkpoints=[judgement()] * (looks + 1), self_checks={})


# In steps of the target: harmonic means of 1.44, .72 and 1.03.
FAST, SLOW, EVEN = [1.4, 1.5, 1.6, 1.3, 1.5, 1.4], [0.7, 0.8, 0.75, 0.8, 0.7, 0.6], [0.8, 1.2, 1.0, 0.9, 1.1, 1.3]


@pytest.mark.parametrize(
    ("gain", "ratios", "outcome", "pays", "start"),
    [
        (0.1, FAST, "pays_off", True, "It pays off: the distilled draft decodes 1.44x"),
        (0.1, SLOW, "no_speed", False, "It does not pay off here: "),
        (0.1, EVEN, "no_speed", False, "Not certain to pay off here: "),
        (0.0, FAST, "no_measurable_gain", True, "No measurable gain: "),
        (0.0, SLOW, "no_measurable_gain", False, "No measurable gain: "),
        (-0.1, FAST, "loss", True, "It got worse: "),
        (0.1, None, "not_timed", None, "Whether it pays was not measured"),
        (0.0, None, "no_measurable_gain", None, "No measurable gain: "),
    ],
)
def test_outcome_and_sentence(gain, ratios, outcome, pays, start):
    found = verdict(evidence_of(gain, ratios))
    assert (found.outcome, found.pays_off) == (outcome, pays)
    assert outcome in get_args(Outcome)
    assert found.sentence.startswith(start), found.sentence
    assert found.sentence.count("\n") == 0
    assert set(found.record()) <= set(Verdict.model_fields)
    assert Verdict.model_validate(json.loads(json.dumps(found.record()))) == found


def test_a_gain_that_one_look_shows_is_not_certain_after_fifty_looks():
    evidence = evidence_of(0.0018, FAST)
    once, often = verdict(evidence), verdict(evidence, looks=50)
    assert once.outcome == "pays_off"
    assert often.outcome == "no_measurable_gain"
    width = [ci[1] - ci[0] for ci in (once.paired.ci, often.paired.ci)]
    assert width[1] > 1.3 * width[0]
    assert often.effects.looks == 50


def test_no_measurable_gain_says_what_would_have_been_seen():
    found = verdict(evidence_of(0.0, FAST))
    seen = found.effects.minimal_detectable.alpha
    assert seen > 0
    assert f"{seen:.3f} would have been seen with 80 % probability" in found.sentence


@pytest.mark.parametrize("gain", [0.1, 0.0, -0.1])
def test_a_hopeless_pair_is_called_so_whatever_was_learnt(gain):
    advised = advice(DEAR)
    assert advised is not None
    assert advised[1] in verdict(evidence_of(gain, SLOW, DEAR)).sentence
    assert advice(CHEAP) is None
    assert "shallower" not in verdict(evidence_of(gain, SLOW, CHEAP)).sentence


def test_few_timed_prompts_are_never_certain():
    for count in (1, 2, 3, 5):
        found = verdict(evidence_of(0.1, [1.5] * count))
        assert (found.outcome, found.pays_off) == ("no_speed", False), count
        assert found.speed_up_ci["best"] is None
        assert "too few prompts" in found.sentence


def test_few_held_out_prompts_are_never_certain_and_do_not_claim_to_have_seen():
    found = verdict(evidence_of(0.2, FAST, prompts=4))
    assert found.outcome == "no_measurable_gain"
    assert "4 prompts are too few to be certain, give at least 6" in found.sentence
    assert "would have been seen" not in found.sentence


@pytest.mark.parametrize(
    ("ahead", "word"),
    [(0.1, "accepts more than"), (-0.1, "accepts less than"), (0.0, "is not to be told in alpha from")],
)
def test_the_served_draft_is_named_in_the_sentence(ahead, word):
    found = verdict(evidence_of(0.1, FAST, served=ahead))
    assert f"it {word} the draft served today" in found.sentence
    assert "alpha, predicted speed-up" in found.sentence
    assert found.against_served.alpha.gain == pytest.approx(ahead, abs=0.02)
    assert found.served.tau == 2.0


def test_drafts_of_other_shapes_are_priced_at_their_own_times():
    evidence = evidence_of(0.0, FAST)
    evidence.costs["baseline"] = DEAR
    evidence.scores["sample"]["best"] = evidence.scores["sample"]["baseline"]
    gain = verdict(evidence).effects.speed_up.gain
    assert gain > 0.3, "the same acceptance at a sixth of the price"


def test_averaged_weights_are_a_second_look():
    plain, averaged = judgement(), judgement(score_ema=1.0)
    assert looks_of([plain]) == looks_of([plain, plain]) == 1
    assert looks_of([averaged, averaged, plain]) == 3


def test_lists_by_response_stay_with_the_checkpoints():
    sums = {"accept_sums": [1.0], "tokens": [1]}
    record = judgement(step=0, per_response=sums, greedy={"alpha": 0.5, "per_response": sums})
    found = verdict_of(evidence_of(0.1, FAST), checkpoints=[record], self_checks={})
    assert found.checkpoints == [judgement(step=0, greedy={"alpha": 0.5})]
    assert record.per_response is not None


def test_a_best_checkpoint_that_is_the_baseline_itself_is_called_so():
    evidence = evidence_of(0.1, FAST)
    scores = evidence.scores["sample"]["baseline"]
    evidence.scores["sample"]["best"] = scores
    found = verdict(evidence)
    assert found.outcome == "no_measurable_gain"
    assert "no checkpoint is better than the undistilled baseline" in found.sentence
    assert found.paired == PairedGain(alpha_gain=0.0, ci=(0.0, 0.0))


def test_one_draft_without_a_baseline():
    found = verdict(evidence_of(0.1, FAST, baseline=False))
    assert found.outcome == "pays_off"
    assert found.sentence.startswith("It pays off: my-draft decodes 1.44x")
    assert (found.baseline, found.paired, found.effects) == (None, None, None)
    assert verdict(evidence_of(0.1, SLOW, baseline=False)).outcome == "no_speed"


def test_pays_off_needs_the_whole_interval_above_one():
    evidence = evidence_of(0.1, FAST)
    for low, pays in ((0.99, False), (1.01, True)):
        speeds = {"best": Speed(50.0, 1.05, (low, 1.2), 1.05, 6)}
        assert conclude(evidence, None, speeds)[1] is pays


def jittered(ratios, factor):
    """As many prompts at a multiple of these ratios, their noise shared: drafts on one prompt slow down together."""
    return [factor * ratio for ratio in ratios]


@pytest.mark.parametrize(
    ("gain", "lookup", "together", "outcome", "run", "start"),
    [
        (0.1, 1.5, 1.2, "rival_better", LOOKUP, "Prompt lookup alone is better: without any training it decodes 2.17x"),
        (0.0, 1.5, 1.2, "rival_better", LOOKUP, "Prompt lookup alone is better"),
        (-0.1, 1.5, 1.2, "rival_better", LOOKUP, "Prompt lookup alone is better"),
        (0.1, 0.8, 1.2, "best_together", TOGETHER, "Best together: prompt lookup before the draft decodes 1.73x"),
        (0.1, 1.3, 1.6, "best_together", TOGETHER, "Best together"),
        (0.1, 0.8, 1.01, "pays_off", "best", "It pays off: the distilled draft decodes 1.44x"),
        (0.1, 0.8, 0.9, "pays_off", "best", "It pays off"),
        (0.0, 0.8, 1.2, "no_measurable_gain", TOGETHER, "No measurable gain"),
    ],
)
def test_the_rivals_have_their_say(gain, lookup, together, outcome, run, start):
    free = {LOOKUP: jittered(FAST, lookup), PAST: jittered(FAST, 0.5), TOGETHER: jittered(FAST, together)}
    found = verdict(evidence_of(gain, FAST, free=free))
    assert (found.outcome, found.run) == (outcome, run)
    assert found.sentence.startswith(start), found.sentence
    rivals = {rival.name: rival for rival in found.rivals}
    assert list(rivals) == [LOOKUP, PAST, TOGETHER]
    assert rivals[LOOKUP].speed_up == pytest.approx(lookup * found.speed_up["best"])
    assert rivals[LOOKUP].draft_over_it == pytest.approx(1 / lookup)
    for rival in found.rivals:
        assert rival.tokens_per_second / found.target_tokens_per_second == pytest.approx(rival.speed_up)


def test_a_lookup_that_cannot_be_told_from_the_draft_is_said_so():
    noisy = [1.9, 1.1, 1.7, 1.2, 1.6, 1.3]
    found = verdict(evidence_of(0.1, FAST, free={LOOKUP: noisy, TOGETHER: jittered(FAST, 0.9)}))
    assert found.outcome == "pays_off"
    assert "the two cannot be told apart" in found.sentence
    assert found.rivals[0].draft_over_it_ci[0] < 1 < found.rivals[0].draft_over_it_ci[1]


def test_the_columns_of_the_verdict_agree_and_the_median_stands_beside():
    found = verdict(evidence_of(0.1, FAST))
    assert found.best.tokens_per_second / found.target_tokens_per_second == pytest.approx(found.speed_up["best"])
    assert found.speed_up["best"] == pytest.approx(6 / sum(1 / ratio for ratio in FAST))
    assert found.speed_up_median["best"] == pytest.approx(1.45)
    assert found.best.speed_gamma == GAMMA


def test_a_draft_picked_from_many_has_wider_intervals_of_its_own():
    evidence = evidence_of(0.1, FAST)
    once, often = verdict(evidence), verdict(evidence, looks=20)
    assert once.best.alpha_ci == (0.4, 0.6)
    own = [one.accept_probs("sample") for one in evidence.own_scores("best")]
    sums, tokens = np.array([probs.sum() for probs in own]), np.array([len(probs) for probs in own])
    wide = ratio_interval(sums, tokens, 1 - 0.05 / 20)
    assert often.best.alpha_ci == wide
    assert wide[0] < sums.sum() / tokens.sum() < wide[1]
    assert often.baseline.alpha_ci == (0.4, 0.6)
    widths = [found.speed_up_ci["best"][1] - found.speed_up_ci["best"][0] for found in (once, often)]
    assert widths[1] > 1.5 * widths[0]


def test_a_target_that_loops_is_called_looping_and_ordinary_text_is_not():
    evidence = evidence_of(0.1, FAST)  # Every response is one token, again and again.
    looping = verdict(evidence)
    assert looping.repetition.looping == pytest.approx(29 / 30, abs=0.001)
    assert looping.repetition.by_domain["code"].tokens == looping.tokens
    assert looping.warnings == [looping.repetition.warning]
    assert "97 % of the target's tokens repeat" in looping.warnings[0]
    rng = np.random.default_rng(0)
    fresh = [
        HeldoutResponse(text.key, text.domain, text.prompt_ids, rng.integers(0, 99, 30).tolist(), [0.0] * 30)
        for text in evidence.frozen
    ]
    found = verdict(replace(evidence, texts={"sample": fresh}))
    assert (found.repetition.looping, found.repetition.warning, found.warnings) == (0.0, None, [])
