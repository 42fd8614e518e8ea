"""judge.load: a verdict told what happens under load, from the very pair."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from distill.config.load import load_config
from distill.models.carving import carve
from distill.models.target import Target
from distill.run.responses import decode_settings
from distill.run.verdict_record import LOOKUP, TOGETHER, LoadRival
from distill.verdict import contest, load
from distill.verdict.evidence import BEST, Contestant, gather, line_up
from distill.verdict.load import under_load
from distill.verdict.verdict import verdict_of
from speculative.decode import decode
from speculative.drafters.cascade import Cascade
from speculative.drafters.draft import Draft
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.lookup import PromptLookup
from speculative.drafters.retrieval import Retrieval
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.measure.full_batch import DRAFTED, FOUND, PLAIN, FullBatch, kind_shares
from speculative.measure.load import LoadedSpeed
from speculative.measure.rival_replay import (
    cascade_blocks,
    certain_blocks,
    kept_by_lookup,
    kept_by_retrieval,
    tuned_lookup,
)


@pytest.fixture(scope="module")
def judged(tiny_config: Path):
    """(target, evidence with judge.load 1 and 3, its verdict)."""
    config = load_config(tiny_config, ["judge.load=[3, 1]"])
    target = Target(config.target, torch.device("cpu"))
    prompts = [(f"key{index}", [5 + index, 9, 11 + index]) for index in range(8)]
    settings = decode_settings(config.serving, config.seed, target)
    responses, _ = decode(target.model, None, prompts, settings)
    frozen = [
        HeldoutResponse(one.key, "code", one.prompt_ids, one.response_ids, one.log_target_probs) for one in responses
    ]
    best = Contestant(BEST, BEST, BEST, 0, Draft(carve(target.model, (0, -1))))
    settings = settings.under("sample", 2)
    field = line_up(config.judge, settings, target.model, [best], {"sample": frozen}, 100)
    evidence = gather(config.judge, settings, target, field, {"sample": frozen})
    return target, evidence, verdict_of(evidence, checkpoints=[evidence.judged[BEST]], self_checks={})


def test_every_load_has_its_row(judged) -> None:
    target, evidence, verdict = judged
    found = under_load(verdict, evidence, target)
    assert [row.concurrency for row in found.load] == [1, 3]
    for row in found.load:
        assert row.gamma >= 1
        assert row.predicted > 0.0
        assert row.speed_up_ci is not None
        assert row.speed_up_ci[0] <= row.speed_up <= row.speed_up_ci[1]
        assert row.tokens_per_second == pytest.approx(row.speed_up * row.plain_tokens_per_second)
        assert [one.name for one in row.rivals] == [LOOKUP, TOGETHER]
        assert [one.then_gamma is None for one in row.rivals] == [True, False]
        for one in row.rivals:
            assert one.speed_up_ci is not None
            assert one.speed_up_ci[0] <= one.speed_up <= one.speed_up_ci[1]
    assert found.roofline is not None
    assert found.roofline.target_fixed_seconds > 0.0
    assert found.plain_wins_from is None or found.plain_wins_from >= 1
    assert found.warnings == verdict.warnings
    written = found.record()
    assert {"load", "plain_wins_from", "roofline"} <= set(written)
    assert type(found).model_validate(written) == found


def test_what_is_timed_at_a_load_is_what_is_counted(judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every speed-up is the tokens of the held-out text over the very blocks of that drafter, at the blocks' time."""
    target, evidence, verdict = judged
    timed, asked = [], []

    def scripted(target, drafter, texts, settings, rows):
        timed.append((rows, settings.gamma, drafter()))
        kinds = {
            ModelDrafter: [DRAFTED] * 3,
            PromptLookup: [PLAIN, FOUND, FOUND],
            Retrieval: [PLAIN, FOUND, FOUND],
            Cascade: [FOUND, DRAFTED, FOUND | DRAFTED],
        }
        return FullBatch(np.ones((4, 3)), np.array([[1.0, 2.0, 4.0]] * 4), np.array([kinds[type(timed[-1][2])]] * 4))

    def tuned(texts, costs, gammas):
        asked.append((texts, costs.batch_size, max(gammas)))
        return tuned_lookup(texts, costs, gammas)

    monkeypatch.setattr(load, "full_batch_seconds", scripted)
    monkeypatch.setattr(contest, "tuned_lookup", tuned)
    evidence = replace(evidence, history=evidence.frozen[:2])
    found = under_load(verdict, evidence, target)
    assert asked == [(evidence.frozen[:2], rows, asked[0][2]) for rows in (1, 3)]
    kinds = [(rows, type(drafter)) for rows, _, drafter in timed]
    assert kinds == [(rows, kind) for rows in (1, 3) for kind in (ModelDrafter, PromptLookup, Retrieval, Cascade)]
    for row, four in zip(found.load, (timed[:4], timed[4:]), strict=True):
        assert [row.gamma, *(one.gamma for one in row.rivals)] == [gamma for _, gamma, _ in four]
        assert row.speed_up == pytest.approx(verdict.replay[row.gamma] / 2.0)
        lookup, retrieval, cascade = (one for _, _, one in four[1:])
        alone, past, both = row.rivals
        assert alone.ngrams == (lookup.max_ngram, lookup.min_ngram)
        assert both.ngrams == (cascade.first.max_ngram, cascade.first.min_ngram)
        assert both.then_gamma == cascade.then_gamma
        assert past.ngrams is None
        assert [one.tuned_on for one in row.rivals] == ["training prompts", *["the judged prompts, by replay"] * 2]
        # What nobody draws is certain: the blocks of live decoding are those that were counted.
        tokens, calls, with_proposal = decoded_with(target, evidence, alone, PromptLookup(*alone.ngrams))
        share = kind_shares(with_proposal / calls, row.concurrency, drafts=False)
        assert alone.speed_up == pytest.approx(tokens / calls / (share[PLAIN] * 1.0 + share[FOUND] * 3.0))
        kept = [kept_by_retrieval(text, past.gamma, retrieval.datastore) for text in evidence.frozen]
        blocks = certain_blocks(kept, (past.gamma,))
        looked, plain = float(blocks.found_NK.sum()), float(blocks.others_NK.sum())
        assert looked > 0
        share = kind_shares(looked / (looked + plain), row.concurrency, drafts=False)
        time = share[PLAIN] * 1.0 + share[FOUND] * 3.0
        assert past.speed_up == pytest.approx(tokens / (looked + plain) / time)
        laws = [kept_by_lookup(text, both.gamma, *both.ngrams) for text in evidence.frozen]
        scores = evidence.own_scores(BEST)
        blocks = cascade_blocks(laws, scores, "sample", (both.gamma,), (both.then_gamma,))
        looked, drafted = float(blocks.found_NK.sum()), float(blocks.others_NK.sum())
        share = kind_shares(looked / (looked + drafted), row.concurrency, drafts=True)
        time = share[FOUND] * 1.0 + share[DRAFTED] * 2.0 + share[FOUND | DRAFTED] * 4.0
        assert both.speed_up == pytest.approx(sum(map(len, scores)) / (looked + drafted) / time)


def decoded_with(target: Target, evidence, rival, drafter) -> tuple[int, int, int]:
    """(tokens, target calls, calls with a proposal) of the held-out responses, decoded once more."""
    prompts = [(text.key, text.prompt_ids) for text in evidence.frozen]
    settings = evidence.settings.under(evidence.settings.rule, rival.gamma)
    responses = decode(target.model, drafter, prompts, settings)[0]
    with_proposal = sum(count > 0 for one in responses for count in one.drafted_counts)
    return sum(len(one.response_ids) for one in responses), sum(one.blocks for one in responses), with_proposal


@pytest.mark.parametrize(
    ("draft", "lookup", "both", "run"),
    [
        ((1.5, (1.2, 1.8)), (1.3, (1.1, 1.5)), (1.4, (1.2, 1.6)), BEST),
        ((1.5, (0.9, 1.8)), (1.3, (1.1, 1.5)), (1.2, (1.1, 1.3)), LOOKUP),
        ((1.5, (1.2, 1.8)), (1.3, (1.29, 1.31)), (1.2, (1.1, 1.3)), BEST),
        ((1.3, (1.1, 1.5)), (1.4, (1.1, 1.5)), (1.41, (1.1, 1.5)), LOOKUP),
        ((1.3, (1.1, 1.5)), (1.4, (1.1, 1.5)), (1.6, (1.4, 1.8)), TOGETHER),
        ((0.9, (0.8, 1.1)), (0.8, (0.7, 0.9)), (1.2, (1.1, 1.3)), TOGETHER),
        ((0.9, (0.8, 1.1)), (0.8, (0.7, 0.9)), (1.0, (0.9, 1.1)), "target"),
        ((1.5, None), (1.3, None), (1.3, None), None),
    ],
)
def test_what_to_run_at_a_load(draft, lookup, both, run) -> None:
    rivals = [
        LoadRival(name=name, gamma=3, ngrams=(3, 1), tuned_on="", speed_up=speed, speed_up_ci=interval)
        for name, (speed, interval) in ((LOOKUP, lookup), (TOGETHER, both))
    ]
    assert load._to_run(LoadedSpeed(*draft, 100.0, 100.0 * draft[0]), rivals) == run


def test_a_rival_that_cannot_be_timed_leaves_the_others(judged, monkeypatch: pytest.MonkeyPatch) -> None:
    target, evidence, verdict = judged

    def scripted(target, drafter, texts, settings, rows):
        if isinstance(drafter(), Cascade):
            raise UserError("no room")
        return FullBatch(np.ones((4, 3)), np.full((4, 3), 2.0), np.full((4, 3), DRAFTED))

    monkeypatch.setattr(load, "full_batch_seconds", scripted)
    found = under_load(verdict, evidence, target)
    assert [[one.name for one in row.rivals] for row in found.load] == [[LOOKUP], [LOOKUP]]
    assert found.warnings[-1] == "lookup + draft at judge.load 3 was not measured: no room"


def test_a_load_without_memory_is_a_warning(judged, monkeypatch: pytest.MonkeyPatch) -> None:
    target, evidence, verdict = judged

    def full(target, draft, rows, *rest):
        if rows > 1:
            raise UserError("needs more")

    monkeypatch.setattr(load, "check_memory", full)
    found = under_load(verdict, evidence, target)
    assert [row.concurrency for row in found.load] == [1]
    assert found.warnings == [*verdict.warnings, "judge.load 3 was not measured: needs more"]


def test_nothing_is_timed_that_was_not_asked_for(judged, monkeypatch: pytest.MonkeyPatch) -> None:
    target, evidence, verdict = judged
    monkeypatch.delattr(load, "measure_costs")
    silent = evidence.judge.model_copy(update={"load": ()})
    assert under_load(verdict, replace(evidence, judge=silent), target) is verdict
    assert (verdict.load, verdict.plain_wins_from, verdict.roofline) == ([], None, None)
