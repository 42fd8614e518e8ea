"""judge.load: a verdict told what happens under load, from the very pair."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distill.config.load import load_config
from distill.models.carving import carve
from distill.models.target import Target
from distill.run.responses import decode_settings
from distill.verdict import load
from distill.verdict.evidence import BEST, Contestant, gather, line_up
from distill.verdict.load import under_load
from distill.verdict.verdict import verdict_of
from speculative.decode import decode
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse


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
    assert found.roofline is not None
    assert found.roofline.target_fixed_seconds > 0.0
    assert found.plain_wins_from is None or found.plain_wins_from >= 1
    assert found.warnings == verdict.warnings
    written = found.record()
    assert {"load", "plain_wins_from", "roofline"} <= set(written)
    assert type(found).model_validate(written) == found


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
