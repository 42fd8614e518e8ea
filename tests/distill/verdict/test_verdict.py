"""The verdict's words and outcomes follow from its numbers, and from nothing else."""

import json
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from distill.config.sections import JudgeConfig
from distill.run.verdict_record import Judgement, Outcome, PairedGain, Verdict
from distill.verdict.evidence import Contestant, Evidence
from distill.verdict.verdict import conclude, looks_of, verdict_of
from speculative.decoder.responses import DecodeSettings
from speculative.evaluate import HeldoutResponse
from speculative.explain.ceilings import advice
from speculative.measure.cost import StepCosts
from speculative.measure.token_scores import TokenScores

GAMMA = 4
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


def evidence_of(gain, ratios, costs=CHEAP, prompts=40, tokens=30, baseline=True, seed=0, served=None):
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
    speed = None
    if ratios is not None:
        speed = {name: {"tokens_per_second": 50.0, "ratios": ratios, "rates": ratios} for name in ("target", *names)}
    return Evidence(
        judge=JudgeConfig(),
        settings=DecodeSettings(rule="sample", gamma=GAMMA),
        contestants=tuple(Contestant(name, {"best": "my-draft"}.get(name, name), name, 0, None) for name in names),
        texts={"sample": texts},
        scores={"sample": {name: scores[name] for name in names}},
        judged=dict.fromkeys(names, record),
        speed=speed,
        costs=dict.fromkeys(names, costs) if ratios is not None else None,
    )


def verdict(evidence, looks=1):
    return verdict_of(evidence, checkpoints=[judgement()] * (looks + 1), self_checks={})


FAST, SLOW, EVEN = [1.4, 1.5, 1.6, 1.3, 1.5, 1.4], [0.7, 0.8, 0.75, 0.8, 0.7, 0.6], [0.8, 1.2, 1.0, 0.9, 1.1, 1.3]


@pytest.mark.parametrize(
    ("gain", "ratios", "outcome", "pays", "start"),
    [
        (0.1, FAST, "pays_off", True, "It pays off: the distilled draft decodes 1.45x"),
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
    assert set(found.record()) == set(Verdict.model_fields)
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
    assert found.sentence.startswith("It pays off: my-draft decodes 1.45x")
    assert (found.baseline, found.paired, found.effects) == (None, None, None)
    assert verdict(evidence_of(0.1, SLOW, baseline=False)).outcome == "no_speed"


def test_pays_off_needs_the_whole_interval_above_one():
    _, pays, _ = conclude(evidence_of(0.1, EVEN), None, {"best": (1.05, [0.99, 1.2])})
    assert pays is False
    _, pays, _ = conclude(evidence_of(0.1, EVEN), None, {"best": (1.05, [1.01, 1.2])})
    assert pays is True


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
