"""judge.load: a verdict told what happens under load, from the very pair."""

from dataclasses import replace
from pathlib import Path

import numpy as np
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
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.lookup import PromptLookup
from speculative.drafters.lookup_draft import LookupDraft
from speculative.drafters.past_responses import PastResponses
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.measure.baseline_replay import (
    found_blocks,
    kept_by_lookup,
    kept_by_past_responses,
    tuned_lookup,
)
from speculative.measure.load import DRAFTED, FOUND, PLAIN, FullBatch, kind_shares
from speculative.measure.measured import (
    DRAFT,
    LOOKUP,
    LOOKUP_DRAFT,
    PAST,
    TARGET,
)
from speculative.measure.replay import texts_of
from speculative.rules.rule import Rule

LIVE = ["token-tree", "early-exit", "lookahead"]


@pytest.fixture(scope="module")
def judged(tiny_config: Path):
    """(target, scored, evidence with judge.load 1 and 3 and every way that replay has no law for)."""
    limits = "judge.latency_ms={first_token: 100000, per_token: 50000}"
    config = load_config(
        tiny_config,
        ["judge.load=[3, 1]", f"judge.ways={LIVE}", "judge.speed_prompts=8", limits],
    )
    target = Target(config.target, torch.device("cpu"))
    prompts = [(f"key{index}", [5 + index, 9, 11 + index]) for index in range(8)]
    settings = decode_settings(config.serving, config.seed, target)
    responses, _ = decode(target.model, None, prompts, settings)
    frozen = [
        HeldoutResponse(one.key, "code", one.prompt_ids, one.response_ids, one.log_target_probs) for one in responses
    ]
    asked = JudgingSetup(config.judge, settings.under(Rule.named("sample"), 2), {Rule.named("sample"): frozen}, 100)
    scored = score_and_time(asked, target.model, [NamedDraft(DRAFT, DRAFT, 0, Draft(carve(target.model, (0, -1))))])
    return target, scored, gather(asked, target, scored)


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


def test_what_is_timed_at_a_load_is_what_is_counted(judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every speed-up is the tokens of the held-out text over the very blocks of that drafter, at the blocks' time."""
    target, scored, evidence = judged
    timed, asked = [], []

    def scripted(target, drafter, texts, settings, rows):
        timed.append((rows, settings.gamma, drafter()))
        kinds = {
            ModelDrafter: [DRAFTED] * 3,
            PromptLookup: [PLAIN, FOUND, FOUND],
            PastResponses: [PLAIN, FOUND, FOUND],
            LookupDraft: [FOUND, DRAFTED, FOUND | DRAFTED],
        }
        return FullBatch(np.ones((4, 3)), np.array([[1.0, 2.0, 4.0]] * 4), np.array([kinds[type(timed[-1][2])]] * 4))

    def tuned(texts, costs, gammas, drafted=None):
        if drafted is None:
            asked.append((texts, costs.batch_size))
        return tuned_lookup(texts, costs, gammas, drafted)

    monkeypatch.setattr(timing_module, "full_batch_seconds", scripted)
    monkeypatch.setattr(drafts_module, "tuned_lookup", tuned)
    monkeypatch.setattr(judging_setup, "CROSS_FIT_BELOW", 0)
    frozen = evidence.setup.frozen
    with_history = replace(evidence.setup, history=frozen[:2])
    first = replace(evidence.timing, ways=tuple(one for one in evidence.timing.ways if one.blocks_N is not None))
    (held,) = time_at_loads(with_history, target.model, scored, first).timings
    assert asked == [(frozen[:2], 3)]
    assert [(rows, type(drafter)) for rows, _, drafter in timed] == [
        (3, kind) for kind in (ModelDrafter, PromptLookup, PastResponses, LookupDraft)
    ]
    rows = {one.way: one for one in held.rows(scored.scores[Rule.named("sample")])}
    assert [rows[name].gamma for name in (DRAFT, LOOKUP, PAST, LOOKUP_DRAFT)] == [gamma for _, gamma, _ in timed]
    assert rows[DRAFT].speed_up == pytest.approx(evidence.judged[DRAFT].replay[rows[DRAFT].gamma] / 2.0)
    lookup, past_responses, lookup_draft = (one for _, _, one in timed[1:])
    alone, past, both = rows[LOOKUP], rows[PAST], rows[LOOKUP_DRAFT]
    assert alone.ngrams == lookup.ngrams
    assert both.ngrams == lookup_draft.first.ngrams
    assert both.then_gamma == lookup_draft.then_gamma
    assert past.ngrams is None
    assert [one.tuned_on for one in (alone, past, both)] == ["training prompts", *["the judged prompts, by replay"] * 2]
    # What nobody draws is certain: the blocks of live decoding are those that were counted.
    tokens, calls, with_proposal = decoded_with(target, evidence, alone, PromptLookup(*alone.ngrams))
    share = kind_shares(with_proposal / calls, 3, drafts=False)
    assert alone.speed_up == pytest.approx(tokens / calls / (share[PLAIN] * 1.0 + share[FOUND] * 3.0))
    kept = [kept_by_past_responses(text, past.gamma, past_responses.index) for text in frozen]
    blocks = found_blocks(kept, (past.gamma,))
    looked, plain = float(blocks.found_NK.sum()), float(blocks.others_NK.sum())
    assert looked > 0
    share = kind_shares(looked / (looked + plain), 3, drafts=False)
    time = share[PLAIN] * 1.0 + share[FOUND] * 3.0
    assert past.speed_up == pytest.approx(tokens / (looked + plain) / time)
    laws = [kept_by_lookup(text, both.gamma, *both.ngrams) for text in frozen]
    scores = evidence.own_scores(DRAFT)
    blocks = found_blocks(laws, (both.gamma,), texts_of(scores, Rule.named("sample")), (both.then_gamma,))
    looked, drafted = float(blocks.found_NK.sum()), float(blocks.others_NK.sum())
    share = kind_shares(looked / (looked + drafted), 3, drafts=True)
    time = share[FOUND] * 1.0 + share[DRAFTED] * 2.0 + share[FOUND | DRAFTED] * 4.0
    assert both.speed_up == pytest.approx(sum(map(len, scores)) / (looked + drafted) / time)


def decoded_with(target: Target, evidence, row, drafter) -> tuple[int, int, int]:
    """(tokens, target calls, calls with a proposal) of the held-out responses, decoded once more."""
    prompts = [(text.key, text.prompt_ids) for text in evidence.setup.frozen]
    settings = evidence.setup.settings.under(evidence.setup.rule, row.gamma)
    responses = decode(target.model, drafter, prompts, settings)[0]
    with_proposal = sum(count > 0 for one in responses for count in one.drafted_counts)
    return sum(len(one.response_ids) for one in responses), sum(one.blocks for one in responses), with_proposal


def test_a_way_or_a_load_that_does_not_fit_memory_is_a_warning(judged, monkeypatch: pytest.MonkeyPatch) -> None:
    target, scored, evidence = judged

    def scripted(target, drafter, texts, settings, rows):
        if isinstance(drafter(), LookupDraft):
            raise UserError("no room")
        return FullBatch(np.ones((4, 3)), np.full((4, 3), 2.0), np.full((4, 3), DRAFTED))

    def full(target, draft, rows, *rest):
        raise UserError("needs more")

    monkeypatch.setattr(timing_module, "full_batch_seconds", scripted)
    found = time_at_loads(evidence.setup, target.model, scored, evidence.timing)
    assert [one.name for one in found.timings[0].ways] == [DRAFT, LOOKUP, *LIVE]
    assert found.warnings == ("lookup+draft at judge.load 3 was not measured: no room",)
    monkeypatch.setattr(timing_module, "clock", full)
    found = time_at_loads(evidence.setup, target.model, scored, evidence.timing)
    assert (len(found.timings), found.timings[0].clocked) == (1, {})
    assert found.warnings[-1] == "latency at 3 concurrent requests was not measured: needs more"
    monkeypatch.setattr(evidence_module, "check_memory", full)
    found = time_at_loads(evidence.setup, target.model, scored, evidence.timing)
    assert (found.timings, found.warnings) == ((), ("judge.load 3 was not measured: needs more",))


def test_the_sentence_on_limits_by_hand() -> None:
    limits = {"per_token": 30.0}
    says = "Within 30 ms per token (p90), the largest measured load is 4 for the target alone and"
    assert within(limits, {TARGET: 4, DRAFT: 8}) == [f"{says} 8 with the draft: the draft raises it."]
    assert within(limits, {TARGET: 4, DRAFT: None}) == [f"{says} 0 with the draft: the draft lowers it."]
    assert within({}, {}) == []


def test_nothing_is_timed_that_was_not_asked_for(judged, monkeypatch: pytest.MonkeyPatch) -> None:
    target, scored, evidence = judged
    monkeypatch.delattr(evidence_module, "measure_costs")
    silent = replace(evidence.setup, judge=evidence.setup.judge.model_copy(update={"load": ()}))
    assert time_at_loads(silent, target.model, scored, evidence.timing) == Loads()
