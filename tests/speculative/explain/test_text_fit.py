"""The fit of a served text: its tests against slow twins, on text that is the target's and on text that is not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Response
from speculative.explain.text_fit import text_fit
from speculative.rules.sampling import GREEDY, SamplingSettings, logits_to_probs

SETTINGS = SamplingSettings(0.8, 0, 0.95, 0.0)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_model(vocab_size=60, seed=3)


def texts_at(target: Any, sampling: SamplingSettings, count: int = 24, seed: int = 1) -> list[Response]:
    settings = DecodeSettings(sampling, max_tokens=24, seed=seed)
    prompts = [(f"{number}", [1 + number % 50, 1 + number // 50, 3]) for number in range(count)]
    return decode(target, None, prompts, settings)[0]


def test_expected_log_probabilities_are_minus_the_entropies(target: Any) -> None:
    texts = texts_at(target, SETTINGS, 3)
    found = text_fit(target, texts, SETTINGS)
    said, expected = [], []
    for text in texts:
        ids = [*text.prompt_ids, *text.response_ids]
        with torch.no_grad():
            logits = target(torch.tensor([ids])).logits[0].double()
        for place in range(len(text.prompt_ids), len(ids)):
            probs = logits_to_probs(logits[place - 1 : place], SETTINGS)[0]
            said.append(math.log(float(probs[ids[place]])))
            expected.append(sum(float(p) * math.log(float(p)) for p in probs if p > 0))
    assert found.log_prob == pytest.approx(np.mean(said), rel=1e-4)
    assert found.expected == pytest.approx(np.mean(expected), rel=1e-4)
    assert np.concatenate(found.log_target_probs) == pytest.approx(said, rel=1e-3)
    assert (found.tokens, found.impossible) == (72, 0)


def test_the_targets_own_text_passes_at_about_its_level(target: Any) -> None:
    texts = texts_at(target, SETTINGS, 480)
    values = [text_fit(target, texts[start : start + 24], SETTINGS).p for start in range(0, 480, 24)]
    assert min(values) > 1e-3
    # Two tests share each p, corrected: none is too often small.
    assert sum(value < 0.2 for value in values) <= 9


@pytest.mark.parametrize(
    "sampling", [SamplingSettings(1.6), SamplingSettings(0.3), GREEDY, SamplingSettings(0.8, 3)], ids=str
)
def test_other_settings_are_distinguished_and_found(target: Any, sampling: SamplingSettings) -> None:
    texts = texts_at(target, sampling)
    found = text_fit(target, texts, SETTINGS)
    assert not found.same
    assert sampling.greedy or text_fit(target, texts, sampling).same


def test_tokens_that_the_target_cannot_say_are_counted_and_few_of_them_forgiven(target: Any) -> None:
    texts = texts_at(target, SETTINGS, 40)
    cut = replace(SETTINGS, top_k=20)
    found = text_fit(target, texts, cut)
    assert found.impossible > 0
    rng = np.random.default_rng(0)
    garbage = [
        Response(text.key, text.prompt_ids, response_ids=rng.integers(0, 60, len(text.response_ids)).tolist())
        for text in texts
    ]
    assert text_fit(target, garbage, SETTINGS).p < 1e-9
