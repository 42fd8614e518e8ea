"""The verdict's words and outcomes follow from its numbers, and from nothing else."""

import html
import json
from dataclasses import replace
from typing import get_args

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from tiny_training import tiny_tokenizer, write_target

from distill.config.sections import JudgeConfig
from distill.export.export import export_draft
from distill.export.facts import RunFacts
from distill.report.page import render_page
from distill.report.section import say
from distill.report.view import OUTCOMES, View
from distill.run.verdict_record import Outcome, Verdict
from distill.verdict.conclusion import findings_of
from distill.verdict.decoding import NamedDraft
from distill.verdict.evidence import Evidence, Loads
from distill.verdict.judging_setup import JudgingSetup
from distill.verdict.sentence import headline_of, order
from distill.verdict.timing import Timing
from distill.verdict.verdict import training_row, verdict_of
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft
from speculative.evaluate import HeldoutResponse, Judgement
from speculative.explain.ceilings import advice
from speculative.measure import measured
from speculative.measure.cost import StepCosts
from speculative.measure.intervals import ratio_interval
from speculative.measure.measured import (
    BY_BLOCK,
    DRAFT,
    LOOKUP,
    LOOKUP_DRAFT,
    PAST,
    SERVED,
    TARGET,
    UNDISTILLED,
    Predicted,
    Way,
)
from speculative.measure.timing import Sample, SpeedEstimates
from speculative.measure.token_scores import TokenScores
from speculative.rules.rule import Rule

GAMMA = 4
MODEL = Draft(tiny_model())
CHEAP = StepCosts(0.010, {1: 0.001, 4: 0.004, 8: 0.008}, {1: 0.011, 4: 0.012, 8: 0.014}, 1, 64)
DEAR = StepCosts(0.010, {1: 0.006, 4: 0.024, 8: 0.048}, {1: 0.011, 4: 0.013, 8: 0.016}, 1, 64)


def judgement(**changes):
    return Judgement.model_validate({"alpha": 0.5, "tau": 1.0} | changes)


def scores_of(alphas_NT):
    """Scores whose acceptance probabilities under rule sample are these."""
    return [
        TokenScores(
            np.log(np.maximum(own, 1e-12)),
            np.zeros(len(own)),
            np.zeros(len(own), bool),
            np.zeros(len(own), np.int64),
        )
        for own in alphas_NT
    ]


def timing_of(setup, ratios, concurrency=1):
    """A timing in which every way, half a block a token, decodes as many times as fast as the target on each prompt."""
    texts = setup.heldout
    tokens, blocks_N = len(texts[0].response_ids), setup.tokens_N / 2
    samples = {TARGET: {}}
    for name, of_prompts in ratios.items():
        for index, ratio in enumerate(of_prompts):
            samples[TARGET][str(index)] = Sample(0.0, 0.01 * tokens, tokens, tokens)
            samples.setdefault(name, {})[str(index)] = Sample(0.0, 0.01 * tokens / ratio, tokens, tokens // 2)
    ways = tuple(
        Way(
            name,
            None,
            GAMMA,
            Predicted(blocks_N),
            ngrams=(3, 2) if name in (LOOKUP, LOOKUP_DRAFT) else None,
            then_way=DRAFT,
        )
        for name in samples
        if name != TARGET
    )
    estimates = SpeedEstimates(samples, setup.keys, setup.tokens_N, {one.name: blocks_N for one in ways}, 6)
    return Timing(setup, concurrency, ways, samples, estimates, frozenset({DRAFT, LOOKUP_DRAFT}))


def evidence_of(
    gain, ratios, costs=CHEAP, prompts=40, tokens=30, baseline=True, seed=0, served=None, free=None, looks=1, load=None
):
    """A pair whose draft accepts `gain` more than its baseline, and decodes at these ratios to the target alone."""
    rng = np.random.default_rng(seed)
    before = rng.uniform(0.2, 0.8, (prompts, tokens))
    after = np.clip(before + gain + rng.normal(0, 0.02, before.shape), 0.0, 1.0)
    texts = [HeldoutResponse(f"key{i}", "code", [i + 1], [1] * tokens, [0.0] * tokens) for i in range(prompts)]
    names = [*([UNDISTILLED] if baseline else []), *([SERVED] if served is not None else []), DRAFT]
    scores = {UNDISTILLED: scores_of(before), DRAFT: scores_of(after)}
    if served is not None:
        scores[SERVED] = scores_of(np.clip(after - served, 0.0, 1.0))
    tree = {
        "step": 3,
        "alpha": 0.5,
        "alpha_ci": [0.4, 0.6],
        "tau": 2.0,
        "tau_ci": [1.9, 2.1],
        "accepted_per_drafted": 0.3,
        "survival": [0.5, 0.3, 0.2, 0.1],
        "prompts": prompts,
        "tokens": prompts * tokens,
        "warnings": [],
        "domains": {"code": {"alpha": 0.5, "tau": 2.0, "prompts": prompts, "tokens": prompts * tokens}},
        "replay": {gamma: 1.0 + 0.2 * min(gamma, 6) for gamma in range(33)},
    }
    setup = JudgingSetup(
        JudgeConfig(),
        DecodeSettings(rule=Rule.named("sample"), gamma=GAMMA),
        {Rule.named("sample"): texts},
        looks=looks,
    )
    timing = None if ratios is None else timing_of(setup, dict.fromkeys(names, ratios) | (free or {}))
    return Evidence(
        setup=setup,
        drafts=tuple(NamedDraft(name, name, 0, MODEL) for name in names),
        scores={Rule.named("sample"): {name: scores[name] for name in names}},
        judged=dict.fromkeys(names, Judgement.model_validate(tree)),
        timing=timing,
        loads=Loads((timing_of(setup, load, 8),) if load else ()),
        costs=dict.fromkeys(names, costs) if ratios is not None else {},
    )


def verdict(evidence):
    return verdict_of(evidence, checkpoints=[judgement()] * (evidence.setup.looks + 1), self_checks={})


# In steps of the target: harmonic means of 1.44, .72 and 1.03.
FAST, SLOW, EVEN = [1.4, 1.5, 1.6, 1.3, 1.5, 1.4], [0.7, 0.8, 0.75, 0.8, 0.7, 0.6], [0.8, 1.2, 1.0, 0.9, 1.1, 1.3]


@pytest.mark.parametrize(
    ("gain", "ratios", "outcome", "pays", "headline", "fact"),
    [
        (0.1, FAST, "pays_off", True, "Run the draft: 1.44x [", "The draft pays off: 1.44x ["),
        (0.1, SLOW, "no_speed", False, "Run the target alone: nothing", "The draft does not pay off here: "),
        (0.1, EVEN, "no_speed", False, "Run the target alone: nothing", "The draft does not certainly pay off here: "),
        (0.0, FAST, "no_measurable_gain", True, "Run ", "No measurable gain: "),
        (0.0, SLOW, "no_measurable_gain", False, "Run the target alone", "No measurable gain: "),
        (-0.1, FAST, "loss", True, "Run ", "The draft got worse: "),
        (
            0.1,
            None,
            "not_timed",
            None,
            "Not timed: the draft has tau 2.00 at gamma 4 by replay",
            "Distilling raised alpha by 0.1",
        ),
        (0.0, None, "no_measurable_gain", None, "Not timed: ", "No measurable gain: "),
    ],
)
def test_outcome_headline_and_facts(gain, ratios, outcome, pays, headline, fact):
    free = {UNDISTILLED: [ratio / 2 for ratio in ratios]} if ratios else None
    found = verdict(evidence_of(gain, ratios, free=free))
    assert (found.outcome, found.pays) == (outcome, pays)
    assert outcome in get_args(Outcome)
    assert found.headline.startswith(headline), found.headline
    assert any(line.startswith(fact) for line in found.facts), found.facts
    assert len(found.headline.split()) <= 25
    assert all("\n" not in line and len(line.split()) <= 40 for line in found.facts)
    assert Verdict.model_validate(json.loads(json.dumps(found.record()))) == found


def test_alpha_on_learned_text_stands_beside_held_out_alpha() -> None:
    """A model on its own text has alpha 1. The sentence is there if learned text is certainly better."""
    model = MODEL.model
    prompts = [(str(number), [number + 1]) for number in range(12)]
    learned = decode(model, None, prompts, DecodeSettings(max_tokens=12))[0]
    setup = replace(evidence_of(0.1, None).setup, history=learned)
    row = training_row(setup, NamedDraft(DRAFT, "", 0, Draft(model)))
    assert row is not None
    assert (row.text, row.prompts, row.tokens) == ("training", 12, sum(len(one.response_ids) for one in learned))
    assert row.alpha == pytest.approx(1.0, abs=1e-4), "its own text, recomputed in float32"
    assert training_row(evidence_of(0.1, None).setup, NamedDraft(DRAFT, "", 0, Draft(model))) is None

    evidence = evidence_of(0.1, None)
    found = verdict_of(evidence, checkpoints=[judgement()] * 2, self_checks={}, learned=row)
    fact = next(fact for fact in found.facts if "learned" in fact)
    assert fact.startswith(
        "On responses that it learned, alpha is 1.000, on held-out ones 0.500: more prompts would help"
    )
    assert "`understudy sweep configs/sweeps/prompts.yaml`" in fact
    assert row in found.measured
    even = replace(row, alpha=0.61, alpha_ci=(0.6, 0.62))
    assert "learned" not in str(verdict_of(evidence, checkpoints=[judgement()] * 2, self_checks={}, learned=even).facts)


def test_alpha_on_learned_text_is_the_share_that_the_draft_would_have_had_accepted() -> None:
    """Of another model than the one that wrote it: min(1, draft / target) at each token, computed here from both models' own logits."""
    writer, model = MODEL.model, tiny_model(seed=3)
    learned = decode(writer, None, [(str(number), [number + 1]) for number in range(6)], DecodeSettings(max_tokens=8))[
        0
    ]
    row = training_row(replace(evidence_of(0.1, None).setup, history=learned), NamedDraft(DRAFT, "", 0, Draft(model)))
    accepted = []
    for text in learned:
        ids = torch.tensor([[*text.prompt_ids, *text.response_ids]])
        with torch.no_grad():
            draft, target = (one(ids).logits[0, len(text.prompt_ids) - 1 : -1].softmax(-1) for one in (model, writer))
        said = ids[0, len(text.prompt_ids) :, None]
        accepted.append((draft.gather(1, said) / target.gather(1, said)).clamp_max(1.0))
    assert row is not None
    # The decoder computes the writer's probabilities with other products than one call on the whole text.
    assert row.alpha == pytest.approx(float(torch.cat(accepted).mean()), abs=1e-4)
    assert 0.0 < row.alpha < 0.9


def headlines():
    """(outcome, headline) of a verdict with each outcome, and of a run of each way, also with few prompts."""
    free = {UNDISTILLED: jittered(FAST, 0.6), LOOKUP: jittered(FAST, 0.8), LOOKUP_DRAFT: jittered(FAST, 1.2)}
    better = free | {PAST: jittered(FAST, 1.5)}
    cases = [(0.1, FAST, None), (0.1, FAST, free), (0.1, FAST, better), (0.1, SLOW, None), (0.0, SLOW, None)]
    cases += [(-0.1, FAST, None), (0.1, None, None), (0.1, [1.5, 1.4], None)]
    for gain, ratios, others in cases:
        found = verdict(evidence_of(gain, ratios, free=others))
        yield found.outcome, found.headline
    setup = evidence_of(0.1, FAST).setup
    others = (measured.BY_TOKEN, "token-tree", "early-exit", "lookahead")
    for way in (UNDISTILLED, SERVED, DRAFT, BY_BLOCK, LOOKUP, PAST, LOOKUP_DRAFT, *others):
        yield None, headline_of(timing_of(setup, {way: FAST}), way)


def test_the_headline_of_every_outcome_has_at_most_25_words():
    found = list(headlines())
    assert {outcome for outcome, _ in found} == {*get_args(Outcome), None}
    assert [headline for _, headline in found if len(headline.split()) > 25 or not headline.endswith(".")] == []


def test_a_gain_that_one_look_shows_is_not_certain_after_fifty_looks():
    once, often = verdict(evidence_of(0.0018, FAST)), verdict(evidence_of(0.0018, FAST, looks=50))
    assert once.outcome == "pays_off"
    assert often.outcome == "no_measurable_gain"
    width = [found.gain.alpha.ci[1] - found.gain.alpha.ci[0] for found in (once, often)]
    assert width[1] > 1.3 * width[0]
    assert often.gain.looks == 50


def test_no_measurable_gain_says_what_would_have_been_seen():
    found = verdict(evidence_of(0.0, FAST))
    seen = found.gain.minimal_detectable.alpha
    assert seen > 0
    assert f"{seen:.3f} would have been detected with 80 % probability" in " ".join(found.facts)


@pytest.mark.parametrize("gain", [0.1, 0.0, -0.1])
def test_a_hopeless_pair_is_called_so_whatever_was_learnt(gain):
    advised = advice(DEAR)
    assert advised is not None
    assert advised[1][1:] in verdict(evidence_of(gain, SLOW, DEAR)).facts[-1]
    assert advice(CHEAP) is None
    assert "shallower" not in " ".join(verdict(evidence_of(gain, SLOW, CHEAP)).facts)


def test_few_timed_prompts_are_never_certain():
    for count in (1, 2, 3, 5):
        found = verdict(evidence_of(0.1, [1.5] * count))
        assert (found.outcome, found.pays, found.to_run()) == ("no_speed", False, TARGET), count
        assert found.row(DRAFT).speed_up_ci is None
        assert "too few prompts" in found.headline


def test_few_held_out_prompts_are_never_certain_and_do_not_claim_to_have_seen():
    found = verdict(evidence_of(0.2, FAST, prompts=4))
    assert found.outcome == "no_measurable_gain"
    told = " ".join(found.facts)
    assert "4 prompts are too few to be certain: use at least 6" in told
    assert "would have been detected" not in told


@pytest.mark.parametrize(
    ("ahead", "word"),
    [(0.1, "is certainly higher"), (-0.1, "is certainly lower"), (0.0, "is not certainly different")],
)
def test_the_served_draft_has_its_line(ahead, word):
    found = verdict(evidence_of(0.1, FAST, served=ahead))
    assert any(line.startswith(f"Compared with the served draft, alpha {word}: ") for line in found.facts)
    assert found.against_served.alpha.gain == pytest.approx(ahead, abs=0.02)
    assert found.judged(SERVED).tau == 2.0


def test_a_best_checkpoint_that_is_the_baseline_itself_is_called_so():
    evidence = evidence_of(0.1, FAST)
    evidence.scores[Rule.named("sample")][DRAFT] = evidence.scores[Rule.named("sample")][UNDISTILLED]
    found = verdict(evidence)
    assert found.outcome == "no_measurable_gain"
    assert "no checkpoint is better" in " ".join(found.facts)
    assert (found.gain.alpha.gain, found.gain.alpha.ci) == (0.0, (0.0, 0.0))


def test_one_draft_without_a_baseline():
    found = verdict(evidence_of(0.1, FAST, baseline=False))
    assert (found.outcome, found.gain, found.judged(UNDISTILLED)) == ("pays_off", None, None)
    assert [one.way for one in found.drafts] == [DRAFT]
    assert verdict(evidence_of(0.1, SLOW, baseline=False)).outcome == "no_speed"


def jittered(ratios, factor):
    """As many prompts at a multiple of these ratios, their noise shared: drafts on one prompt slow down together."""
    return [factor * ratio for ratio in ratios]


@pytest.mark.parametrize(
    ("gain", "lookup", "lookup_draft", "outcome", "run", "headline"),
    [
        (0.1, 1.5, 1.2, "baseline_better", LOOKUP, "Run prompt lookup: 2.17x ["),
        (0.0, 1.5, 1.2, "baseline_better", LOOKUP, "Run prompt lookup"),
        (-0.1, 1.5, 1.2, "baseline_better", LOOKUP, "Run prompt lookup"),
        (0.1, 0.8, 1.2, "best_with_lookup", LOOKUP_DRAFT, "Run lookup + draft: 1.73x ["),
        (0.1, 1.3, 1.6, "best_with_lookup", LOOKUP_DRAFT, "Run lookup + draft"),
        (0.1, 0.8, 1.01, "pays_off", DRAFT, "Run the draft: 1.44x ["),
        (0.1, 0.8, 0.9, "pays_off", DRAFT, "Run the draft"),
        (0.0, 0.8, 1.2, "no_measurable_gain", LOOKUP_DRAFT, "Run lookup + draft"),
    ],
)
def test_what_needs_no_training_has_its_say(gain, lookup, lookup_draft, outcome, run, headline):
    free = {
        UNDISTILLED: jittered(FAST, 0.6),
        LOOKUP: jittered(FAST, lookup),
        PAST: jittered(FAST, 0.5),
        LOOKUP_DRAFT: jittered(FAST, lookup_draft),
    }
    found = verdict(evidence_of(gain, FAST, free=free))
    assert (found.outcome, found.to_run()) == (outcome, run)
    assert found.headline.startswith(headline), found.headline
    draft, alone = found.row(DRAFT), found.row(TARGET)
    assert found.row(LOOKUP).speed_up == pytest.approx(lookup * draft.speed_up)
    for row in found.measured:
        if row.speed_up is not None:
            assert row.tokens_per_second / alone.tokens_per_second == pytest.approx(row.speed_up)
            assert row.how["speed_up"] == "timed"


def test_a_lookup_as_fast_as_the_draft_is_reported():
    noisy = [1.9, 1.1, 1.7, 1.2, 1.6, 1.3]
    free = {UNDISTILLED: jittered(FAST, 0.6), LOOKUP: noisy, LOOKUP_DRAFT: jittered(FAST, 0.9)}
    found = verdict(evidence_of(0.1, FAST, free=free))
    assert found.outcome in ("pays_off", "no_speed")
    assert any(
        line.startswith("Prompt lookup") and "not certainly different from the draft" in line for line in found.facts
    )


@pytest.mark.parametrize("looks", [1, 5, 50, 5000])
@pytest.mark.parametrize("factor", [0.7, 0.95, 1.0, 1.05, 1.2])
@pytest.mark.parametrize("lookup_draft", [0.9, 1.04, 1.3])
def test_nothing_is_run_whose_corrected_interval_does_not_lie_above_one(looks, factor, lookup_draft):
    ratios = jittered(EVEN, factor)
    free = {UNDISTILLED: jittered(EVEN, 0.9), LOOKUP: jittered(EVEN, 0.98), LOOKUP_DRAFT: jittered(EVEN, lookup_draft)}
    found = verdict(evidence_of(0.1, ratios, free=free, looks=looks, load={DRAFT: FAST, LOOKUP: ratios}))
    assert set(found.run) == {"1", "8"}
    assert found.concurrencies == [1, 8]
    check_agrees(found)


def check_agrees(found):
    """What to run, whether the draft pays, the outcome, headline and facts say what the rows' intervals say."""
    for concurrency, way in found.run.items():
        assert way == TARGET or found.row(way, int(concurrency)).speed_up_ci[0] > 1.0
    draft, run = found.row(DRAFT), found.to_run()
    assert (
        found.pays == (draft.speed_up_ci[0] > 1.0) == any(line.startswith("The draft pays off") for line in found.facts)
    )
    assert found.pays or run != DRAFT
    assert found.outcome != "pays_off" or found.pays
    assert found.outcome != "no_speed" or not found.pays
    assert found.outcome != "best_with_lookup" or run == LOOKUP_DRAFT
    assert found.outcome != "baseline_better" or run in (LOOKUP, PAST)
    row = found.row(run)
    said = "" if run == TARGET else f" {row.speed_up:.2f}x [{row.speed_up_ci[0]:.2f}, {row.speed_up_ci[1]:.2f}]"
    assert found.headline.startswith(f"{order(run)[0].upper()}{order(run)[1:]}:{said}")


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    looks=st.integers(1, 2000),
    draft=st.lists(st.floats(0.7, 1.6), min_size=6, max_size=12),
    lookup=st.floats(0.7, 1.4),
    lookup_draft=st.floats(0.7, 1.4),
    gain=st.sampled_from([-0.1, 0.0, 0.1]),
)
def test_a_verdict_never_contradicts_itself(looks, draft, lookup, lookup_draft, gain):
    free = {
        UNDISTILLED: jittered(draft, 0.9),
        LOOKUP: jittered(draft[::-1], lookup),
        LOOKUP_DRAFT: jittered(draft, lookup_draft),
    }
    check_agrees(verdict(evidence_of(gain, draft, free=free, looks=looks)))


# Times the target: certain at one look (1.04 to 1.22), not after fifty (.92 to 1.38).
THIN = [0.78 * ratio for ratio in FAST]


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(
    ("ratios", "free", "once", "outcome_once", "often", "outcome_often"),
    [
        (THIN, {}, DRAFT, "pays_off", TARGET, "no_speed"),
        (SLOW, {LOOKUP_DRAFT: THIN}, LOOKUP_DRAFT, "best_with_lookup", TARGET, "no_speed"),
        (
            FAST,
            {LOOKUP: [a * b for a, b in zip(THIN, FAST, strict=True)]},
            LOOKUP,
            "baseline_better",
            LOOKUP,
            "pays_off",
        ),
    ],
)
def test_what_only_the_uncorrected_interval_shows_is_claimed_nowhere(
    ratios, free, once, outcome_once, often, outcome_often, tmp_path
):
    write_target(tmp_path / "target")
    for looks, run, outcome in ((1, once, outcome_once), (50, often, outcome_often)):
        evidence = evidence_of(
            0.1, ratios, free={UNDISTILLED: jittered(EVEN, 0.8)} | free, looks=looks, load={DRAFT: ratios} | free
        )
        found = verdict(evidence)
        assert (found.run, found.outcome) == ({"1": run, "8": run}, outcome)
        assert found.pays is (found.row(DRAFT).speed_up_ci[0] > 1.0)
        assert found.headline.startswith(f"R{order(run)[1:]}: ")
        assert found.facts[0].startswith("The draft pays off") == found.pays
        assert any(line.startswith(f"At 8 requests, {order(run)}") for line in found.facts)
        apart = not any("not certainly different from the draft" in line for line in found.facts)
        assert apart == (run != LOOKUP or outcome == "baseline_better")

        result = findings_of(evidence, found, tiny_tokenizer(), kind="run", name="a", seen=None)
        view = View(result)
        warning = " ".join(say("before_serving", view.verdict, view.draft.step))
        assert ("is faster and needs no training" in warning) == (outcome == "baseline_better")
        assert ("prompt lookup before it" in warning) == (outcome == "best_with_lookup")
        assert ("not certainly faster than the target alone" in warning) == (not found.pays)
        page = html.unescape(render_page(result))
        assert found.headline in page
        assert OUTCOMES[outcome] in page
        assert all(words == OUTCOMES[outcome] or words not in page for words in OUTCOMES.values())

        facts = RunFacts(tmp_path / "target", str(tmp_path / "target"), found)
        to = export_draft(facts, tmp_path / f"export-{looks}").path
        card, serving = (to / "README.md").read_text(), (to / "SERVING.md").read_text()
        assert found.headline in card
        assert found.headline in serving
        assert f"Fastest configuration by number of concurrent requests: 1: {run}, 8: {run}." in serving
        marked = [line for line in card.splitlines() if "run this" in line]
        assert [line.split("** ")[0] for line in marked] == [f"| **{run}"]
        assert "with the draft was not" not in card + serving + page, "lookup before it may be faster all the same"
        assert ("No certain gain" in card) == ("No certain gain" in serving) == (not found.pays)


def test_a_load_is_a_line_and_has_rows_of_its_own():
    found = verdict(evidence_of(0.1, FAST, load={DRAFT: SLOW, LOOKUP: FAST}))
    assert found.run["8"] == LOOKUP
    assert any(line.startswith("At 8 requests, run prompt lookup: 1.44x [") for line in found.facts)
    assert found.row(DRAFT, 8).speed_up < 1 < found.row(DRAFT).speed_up


def test_a_draft_picked_from_many_has_wider_intervals_of_its_own():
    evidence = evidence_of(0.1, FAST)
    once, often = verdict(evidence), verdict(evidence_of(0.1, FAST, looks=20))
    assert once.judged(DRAFT).alpha_ci == (0.4, 0.6)
    own = [one.accept_probs(Rule.named("sample")) for one in evidence.own_scores(DRAFT)]
    sums, tokens = np.array([probs.sum() for probs in own]), np.array([len(probs) for probs in own])
    wide = ratio_interval(sums, tokens, 1 - 0.05 / 20)
    assert often.judged(DRAFT).alpha_ci == often.row(DRAFT).alpha_ci == wide
    assert often.judged(UNDISTILLED).alpha_ci == (0.4, 0.6)
    widths = [found.row(DRAFT).speed_up_ci[1] - found.row(DRAFT).speed_up_ci[0] for found in (once, often)]
    assert widths[1] > 1.5 * widths[0]
    assert once.row(UNDISTILLED).speed_up_ci == often.row(UNDISTILLED).speed_up_ci


def test_domains_are_rows_too():
    found = verdict(evidence_of(0.1, FAST))
    assert found.judged(DRAFT, "code").alpha == found.judged(DRAFT).alpha
    assert {row.text for row in found.measured} == {"held-out", "code"}


def test_a_target_that_loops_is_called_looping():
    looping = verdict(evidence_of(0.1, FAST))  # Every response is one token, again and again.
    assert looping.repetition.looping == pytest.approx(29 / 30, abs=0.001)
    assert looping.warnings == [looping.repetition.warning]
