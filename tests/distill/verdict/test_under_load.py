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
from distill.verdict import load
from distill.verdict.evidence import BEST, Contestant, gather, line_up
from distill.verdict.load import under_load
from distill.verdict.verdict import verdict_of
from speculative.decode import decode
from speculative.decoder.responses import Response
from speculative.drafters.cascade import Cascade
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.lookup import PromptLookup
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.measure.load import LoadedSpeed


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
    best = Contestant(BEST, BEST, BEST, 0, carve(target.model, (0, -1)))
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
    """Every rival's speed-up is the tokens of the held-out text over its own blocks there, at the blocks' time."""
    target, evidence, verdict = judged
    timed = []

    def scripted(target, drafter, texts, settings, rows):
        timed.append((rows, settings.gamma, drafter()))
        blocks = np.array([[2.0, 2.0, 5.0]] * 4)  # median 2, mean 3
        return np.ones((4, 3)), blocks

    monkeypatch.setattr(load, "full_batch_seconds", scripted)
    found = under_load(verdict, evidence, target)
    kinds = [(rows, type(drafter)) for rows, _, drafter in timed]
    assert kinds == [(rows, kind) for rows in (1, 3) for kind in (ModelDrafter, PromptLookup, Cascade)]
    for row, three in zip(found.load, (timed[:3], timed[3:]), strict=True):
        assert [row.gamma, *(one.gamma for one in row.rivals)] == [gamma for _, gamma, _ in three]
        assert row.speed_up == pytest.approx(verdict.replay[row.gamma] / 2.0)
        lookup = three[1][2]
        assert row.rivals[0].ngrams == (lookup.max_ngram, lookup.min_ngram)
        tokens = calls = 0
        for one in decoded_with(target, evidence, row.rivals[0]):
            tokens, calls = tokens + len(one.response_ids), calls + one.blocks
        assert row.rivals[0].speed_up == pytest.approx(tokens / calls / 3.0)
        best = max((row, *row.rivals), key=lambda one: one.speed_up)
        certain = best.speed_up_ci[0] > 1.0
        assert row.run == ((getattr(best, "name", BEST)) if certain else "target")


def decoded_with(target: Target, evidence, rival) -> list[Response]:
    """The held-out responses once more, by the lookup of a row."""
    prompts = [(text.key, text.prompt_ids) for text in evidence.frozen]
    settings = evidence.settings.under(evidence.settings.rule, rival.gamma)
    return decode(target.model, PromptLookup(*rival.ngrams), prompts, settings)[0]


@pytest.mark.parametrize(
    ("draft", "lookup", "run"),
    [
        ((1.5, (1.2, 1.8)), (1.3, (1.1, 1.5)), BEST),
        ((1.5, (0.9, 1.8)), (1.3, (1.1, 1.5)), LOOKUP),
        ((0.9, (0.8, 1.1)), (0.8, (0.7, 0.9)), "target"),
        ((1.5, None), (1.3, None), None),
    ],
    ids=["the fastest", "only who is certain", "nobody", "too few prompts"],
)
def test_what_to_run_at_a_load(draft, lookup, run) -> None:
    rival = LoadRival(name=LOOKUP, gamma=3, ngrams=(3, 1), speed_up=lookup[0], speed_up_ci=lookup[1])
    assert load._to_run(LoadedSpeed(*draft, 100.0, 100.0 * draft[0]), [rival]) == run


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
