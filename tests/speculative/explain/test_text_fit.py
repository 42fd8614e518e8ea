"""The fit of a served text: its tests against slow twins, on text that is the target's and on text that is not."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special
from tiny_models import perturbed, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Response
from speculative.engine.arithmetic import computing_as
from speculative.explain.text_fit import CERTAIN, TILTS, evidence_of, parting, text_fit
from speculative.measure.self_checks import SelfCheckError
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


def texts_of_engine(target: Any, inputs: str, sampling: SamplingSettings, count: int, seed: int = 0) -> list[Response]:
    """Text of a model that computes so, by whole forwards."""
    generator = torch.Generator().manual_seed(seed)
    ids_RT = torch.tensor([[1 + number % 50, 1 + number // 50, 3] for number in range(count)])
    start = ids_RT.shape[1]
    with torch.no_grad(), computing_as(target, inputs):
        for _ in range(24):
            probs_RV = logits_to_probs(target(ids_RT).logits[:, -1], sampling)
            ids_RT = torch.cat([ids_RT, torch.multinomial(probs_RV, 1, generator=generator)], 1)
    return [Response(str(row), ids[:start], response_ids=ids[start:]) for row, ids in enumerate(ids_RT.tolist())]


def test_the_arithmetic_of_the_engine_is_no_other_text(target: Any) -> None:
    """Tokens at the edge of the nucleus are the engine's own. Another model's text is refused under the same arithmetic."""
    inputs = "8 bits by 256"
    texts = texts_of_engine(target, inputs, SETTINGS, 900)
    exact, allowed = text_fit(target, texts, SETTINGS), text_fit(target, texts, SETTINGS, inputs)
    assert exact.impossible == allowed.impossible > 0
    assert not exact.same
    assert allowed.same
    assert exact.log_prob == allowed.log_prob
    assert allowed.expected < exact.expected
    other = texts_of_engine(perturbed(target, 0.03), inputs, SETTINGS, 900)
    assert not text_fit(target, other, SETTINGS, inputs).same


def test_greedy_texts_part_where_the_arithmetic_moves_logits_past_each_other(target: Any) -> None:
    exact = texts_of_engine(target, "", GREEDY, 200)
    partings = []
    for one, served in zip(exact, texts_of_engine(target, "8 bits by 32", GREEDY, 200), strict=True):
        if one.response_ids != served.response_ids:
            partings.append(parting(target, one, served, "8 bits by 32"))
    assert len(partings) > 5
    assert max(gap / moved for gap, moved in partings) < 3
    faults = 0
    for one, served in zip(exact, texts_of_engine(perturbed(target, 0.03), "8 bits by 32", GREEDY, 200), strict=True):
        if one.response_ids != served.response_ids:
            with contextlib.suppress(SelfCheckError):
                parting(target, one, served, "8 bits by 32")
                continue
            faults += 1
    assert faults > 20
    shorter = Response("0", exact[0].prompt_ids, response_ids=exact[0].response_ids[:9])
    with pytest.raises(SelfCheckError, match="ends after 9 tokens, plain greedy text after 24"):
        parting(target, exact[0], shorter, "8 bits by 32")


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


@pytest.mark.parametrize("sampling", [SamplingSettings(), SETTINGS, SamplingSettings(1.3, 7)], ids=str)
def test_evidence_has_the_mean_one_over_all_texts_of_the_target(sampling: SamplingSettings) -> None:
    """By enumeration: an e-value, whatever the text's length, so a text has evidence above 1 / level with at most that probability."""
    target = tiny_model(vocab_size=12, seed=3)
    texts = [Response("k", [1, 4], response_ids=list(ids)) for ids in itertools.product(range(12), repeat=3)]
    found = evidence_of(target, texts, sampling)
    probs = np.exp([text.log_target_probs.sum() for text in found])
    # What the settings exclude has IMPOSSIBLE in place of minus infinity, so it counts for nothing.
    means_S = probs @ np.exp([text.tilted_S for text in found])
    assert probs.sum() == pytest.approx(1, abs=1e-4)
    assert means_S == pytest.approx(1, abs=1e-2 if sampling.truncates else 1e-5)
    assert probs @ np.exp([text.against for text in found]) == pytest.approx(1, abs=1e-2)


def test_evidence_finds_another_model_and_temperature_but_not_the_target(target: Any) -> None:
    other = tiny_model(vocab_size=60, seed=4)
    for writer, sampling, certain in (
        (target, SETTINGS, False),
        (other, SETTINGS, True),
        (target, SamplingSettings(0.2), True),
    ):
        texts = texts_at(writer, sampling, 24)
        found = evidence_of(target, texts, SETTINGS)
        pooled = special.logsumexp(sum(text.tilted_S for text in found)) - math.log(len(TILTS))
        assert (pooled > CERTAIN) == certain
        assert all(text.against < CERTAIN for text in found) or certain


def test_evidence_at_temperature_zero_counts_other_tokens(target: Any) -> None:
    own, other = (texts_at(model, GREEDY, 6) for model in (target, tiny_model(vocab_size=60, seed=4)))
    assert [text.against for text in evidence_of(target, own, GREEDY)] == [0.0] * 6
    assert all(text.against > CERTAIN for text in evidence_of(target, other, GREEDY))
