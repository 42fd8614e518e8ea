"""judge.load: a verdict told what happens under load, from the very pair."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distill.config.load import load_config
from distill.models.carving.layers import carve
from distill.models.target import Target
from distill.run.responses import decode_settings
from distill.verdict import evidence as evidence_module
from distill.verdict import judging_setup
from distill.verdict import scored_drafts as drafts_module
from distill.verdict import timing as timing_module
from distill.verdict.decoding import NamedDraft
from distill.verdict.evidence import Loads, gather, time_at_loads
from distill.verdict.judging_setup import JudgingSetup
from distill.verdict.scored_drafts import score_and_time
from distill.verdict.sentence import within
from distill.verdict.verdict import verdict_of
from speculative.decode import decode
from speculative.drafters.draft import Draft
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.measure.baseline_replay import tuned_lookup
from speculative.measure.measured import DRAFT, LOOKUP, LOOKUP_DRAFT, PAST, TARGET
from speculative.measure.timing import Sample
from speculative.rules.rule import Rule

LIVE = ["token-tree", "early-exit", "lookahead"]


@pytest.fixture(scope="module")
def judged(tiny_config: Path):
    """(target, scored, evidence with judge.load 1 and 3 and every way that replay cannot predict)."""
    limits = "judge.latency_ms={first_token: 100000, per_token: 50000}"
    config = load_config(
        tiny_config,
        ["judge.load=[3, 1]", f"judge.ways={LIVE}", "judge.speed_prompts=8", limits],
    )
    target = Target(config.target, torch.device("cpu"))
    prompts = [(f"key{index}", [5 + index, 9, 11 + index]) for index in range(8)]
    settings = decode_settings(config.serving, config.seed, target)
    with target.loaded() as model:
        responses, _ = decode(model, None, prompts, settings)
    heldout = [
        HeldoutResponse(one.key, "code", one.prompt_ids, one.response_ids, one.log_target_probs) for one in responses
    ]
    asked = JudgingSetup(config.judge, settings.under(Rule.named("sample"), 2), {Rule.named("sample"): heldout}, 100)
    scored = score_and_time(asked, model, [NamedDraft(DRAFT, DRAFT, 0, Draft(carve(model, (0, -1))))])
    return model, scored, gather(asked, model, scored)


def test_every_way_has_a_row_at_every_load(judged) -> None:
    _, _, evidence = judged
    found = verdict_of(evidence, checkpoints=[evidence.judged[DRAFT]], self_checks={})
    assert found.concurrencies == [1, 3]
    for concurrency in (1, 3):
        rows = [one for one in found.measured if one.concurrency == concurrency and one.speed_up is not None]
        assert [one.way for one in rows] == [TARGET, DRAFT, LOOKUP, LOOKUP_DRAFT, *LIVE]
        alone = rows[0]
        for row in rows[1:]:
            assert (row.gamma or 0) >= 1
            assert row.speed_up_ci is not None
            assert row.speed_up_ci[0] <= row.speed_up <= row.speed_up_ci[1]
            assert row.tokens_per_second == pytest.approx(row.speed_up * alone.tokens_per_second)
            assert row.how["tau"] == ("live" if row.way in LIVE else "replay")
            assert 1.0 <= row.tau <= row.gamma + 1
            assert (row.alpha is None) == (row.way != DRAFT)
        assert found.run[str(concurrency)] in [one.way for one in rows]
        clocked = [one for one in rows if one.first_token_ms]
        assert {one.way for one in clocked} == {TARGET, DRAFT, found.run[str(concurrency)]}
        for row in clocked:
            assert row.how["first_token_ms"] == row.how["per_token_ms"] == row.how["stages_ms"] == "timed"
            for waits in (row.first_token_ms, row.per_token_ms):
                assert list(waits) == ["p50", "p90", "p99"]
                assert 0.0 < waits["p50"] <= waits["p90"] <= waits["p99"]
            assert {"prefill", "verify", "host"} <= set(row.stages_ms)
            assert row.way == TARGET or "draft" in row.stages_ms
    assert any(fact.startswith("At 3 requests, ") for fact in found.facts)
    assert found.latency_loads == {TARGET: 3, DRAFT: 3}
    assert found.facts[-1] == (
        "Within 100000 ms to the first token and 50000 ms per token (p90), the largest measured load is 3 for the target alone and "
        "3 with the draft: the draft does not change it."
    )
    assert found.roofline is not None
    assert found.roofline.target_fixed_seconds > 0.0
    assert found.plain_wins_from is None or found.plain_wins_from >= 1
    assert type(found).model_validate(found.record()) == found


def sampled(target, ways, requests, settings, **options):
    """Every block of every way takes two plain steps; what has a tree or looks up before a draft does not fit memory."""
    refused = {way.name: UserError("no room") for way in ways if way.tree or way.name == LOOKUP_DRAFT}
    blocks = {way.name: 1 for way in ways if way.name not in refused}
    samples = {name: {str(n): Sample(0.0, 2.0 * count, 1.0, 1) for n in range(6)} for name, count in blocks.items()}
    return samples | {TARGET: {str(n): Sample(0.0, 1.0, 1.0, 1) for n in range(6)}}, refused


def test_ways_are_tuned_at_the_costs_of_the_load(judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A speed-up is the tokens of the held-out text over the blocks that replay expects at that gamma, at the blocks' time."""
    target, scored, evidence = judged
    texts_of_lookup = []

    def tuned(texts, costs, gammas, drafted=None):
        if drafted is None:
            texts_of_lookup.append((texts, costs.batch_size))
        return tuned_lookup(texts, costs, gammas, drafted)

    monkeypatch.setattr(timing_module, "sample_ways", sampled)
    monkeypatch.setattr(drafts_module, "tuned_lookup", tuned)
    monkeypatch.setattr(judging_setup, "CROSS_FIT_BELOW", 0)
    history = evidence.setup.heldout[:2]
    (timing,) = time_at_loads(replace(evidence.setup, history=history), target, scored, evidence.timing).timings
    assert texts_of_lookup == [(history, 3)]
    assert [way.name for way in timing.ways] == [DRAFT, LOOKUP, PAST, "early-exit", "lookahead"]
    assert timing.warnings == (
        "lookup+draft at judge.load 3 was not measured: no room",
        "token-tree at judge.load 3 was not measured: no room",
    )
    row = next(one for one in timing.rows({}) if one.way == DRAFT)
    assert row.speed_up == pytest.approx(evidence.judged[DRAFT].replay[row.gamma] / 2.0)


def test_a_load_that_does_not_fit_memory_is_a_warning(judged, monkeypatch: pytest.MonkeyPatch) -> None:
    target, scored, evidence = judged

    def full(*_, **__):
        raise UserError("needs more")

    monkeypatch.setattr(timing_module, "sample_ways", sampled)
    monkeypatch.setattr(timing_module, "clock", full)
    (timing,) = time_at_loads(evidence.setup, target, scored, evidence.timing).timings
    assert timing.clocked == {}
    assert timing.warnings[-1] == "latency at 3 concurrent requests was not measured: needs more"
    for module, name in ((timing_module, "sample_ways"), (evidence_module, "check_memory")):
        monkeypatch.setattr(module, name, full)
        found = time_at_loads(evidence.setup, target, scored, evidence.timing)
        assert (found.timings, found.warnings) == ((), ("judge.load 3 was not measured: needs more",))


def test_the_sentence_on_limits_by_hand() -> None:
    limits = {"per_token": 30.0}
    says = "Within 30 ms per token (p90), the largest measured load is 4 for the target alone and"
    assert within(limits, {TARGET: 4, DRAFT: 8}) == [f"{says} 8 with the draft: the draft raises it."]
    assert within(limits, {TARGET: 4, DRAFT: None}) == [f"{says} 0 with the draft: the draft lowers it."]
    assert within({}, {}) == []


def test_nothing_is_timed_that_was_not_asked_for(judged, monkeypatch: pytest.MonkeyPatch) -> None:
    target, scored, evidence = judged
    monkeypatch.delattr(evidence_module, "step_costs")
    silent = replace(evidence.setup, judge=evidence.setup.judge.model_copy(update={"load": ()}))
    assert time_at_loads(silent, target, scored, evidence.timing) == Loads()
