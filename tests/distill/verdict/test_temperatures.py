"""Acceptance at other temperatures: each row is what decoding and scoring at it by hand give."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from distill.config.load import load_config
from distill.config.sections import JudgeConfig
from distill.models.carving.layers import carve
from distill.models.target import Target
from distill.run.responses import decode_settings
from distill.verdict.decoding import Candidate
from distill.verdict.evidence import Evidence
from distill.verdict.question import Question
from distill.verdict.temperatures import PROMPTS, temperature_rows
from speculative.decode import decode
from speculative.drafters.draft import Draft
from speculative.evaluate import HeldoutResponse
from speculative.measure.cost import StepCosts
from speculative.measure.measured import DRAFT
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import score_tokens
from speculative.rules.sampling import GREEDY, SamplingSettings

COSTS = StepCosts(1.0, {1: 0.1, 4: 0.4}, {1: 1.1, 4: 1.2}, 1, 64)


def evidence_of(tiny_config: Path, temperatures: tuple[float, ...], draft=None, costs=COSTS, prompts: int = 5):
    config = load_config(tiny_config)
    target = Target(config.target, torch.device("cpu"))
    own = target.model if draft == "target" else carve(target.model, (0, -1))
    settings = replace(decode_settings(config.serving, config.seed, target).under("sample", 3), eos_ids=())
    texts = [HeldoutResponse(f"key{place}", "code", [5 + place, 9], [7, 8], [0.0, 0.0]) for place in range(prompts)]
    return target, Evidence(
        question=Question(JudgeConfig(temperatures=temperatures), settings, {"sample": [*texts, texts[0]]}),
        candidates=(Candidate(DRAFT, "mine", 0, Draft(own)),),
        scores={},
        judged={},
        costs={} if costs is None else {DRAFT: costs},
    )


def test_each_row_is_decoded_and_scored_at_its_temperature(tiny_config: Path) -> None:
    target, evidence = evidence_of(tiny_config, (1.0, 0.0, 0.3, 1.0))
    rows = temperature_rows(evidence, target)
    assert [(row.temperature, row.curve.rule) for row in rows] == [(0.0, "greedy"), (0.3, "sample"), (1.0, "sample")]
    prompts = [(text.key, text.prompt_ids) for text in evidence.question.frozen[:5]]
    for row in rows:
        curve = row.curve
        sampling = GREEDY if row.temperature == 0 else SamplingSettings(row.temperature)
        settings = replace(evidence.question.settings, sampling=sampling, rule=curve.rule, gamma=0)
        responses, _ = decode(target.model, None, prompts, settings)
        scores = score_tokens(evidence.best.draft.model, responses, sampling)
        accepted = np.concatenate([own.accept_probs(curve.rule) for own in scores])
        assert curve.alpha == pytest.approx(accepted.mean(), abs=1e-5)  # float32, other batches
        calls = expected_blocks_of(scores, curve.rule, (3,)).sum()
        assert (curve.prompts, curve.tokens) == (5, len(accepted))
        assert curve.tau[3] == pytest.approx(len(accepted) / calls, abs=1e-4)
        assert curve.alpha_ci[0] <= curve.alpha <= curve.alpha_ci[1]
        assert [speed is None for speed in curve.predicted_speed_up] == [gamma > 4 for gamma in curve.gammas]
        assert curve.predicted_speed_up[4] == pytest.approx(curve.tau[4] / (0.4 + 1.2))
        assert row.repetition.tokens == len(accepted)
    assert len({row.curve.alpha for row in rows}) == 3, "temperature matters"


def test_the_target_as_its_own_draft_has_alpha_one_at_every_temperature(tiny_config: Path) -> None:
    target, evidence = evidence_of(tiny_config, (0.0, 0.7), draft="target", costs=None)
    rows = temperature_rows(evidence, target)
    assert [row.curve.alpha for row in rows] == pytest.approx([1.0, 1.0], abs=1e-4)
    assert [row.curve.predicted_speed_up for row in rows] == [None] * 2


def test_not_asked_nothing_is_measured_and_asked_a_few_prompts_are(tiny_config: Path) -> None:
    target, evidence = evidence_of(tiny_config, ())
    assert temperature_rows(evidence, target) == []
    target, evidence = evidence_of(tiny_config, (0.0,), prompts=40)
    assert temperature_rows(evidence, target)[0].curve.prompts == PROMPTS
