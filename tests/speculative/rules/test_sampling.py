"""Logits to probabilities as transformers does it; inverse-transform sampling; position-keyed uniforms."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from speculative.rules import sampling
from speculative.rules.sampling import (
    SamplingSettings,
    block_uniforms,
    logits_to_probs,
    nucleus,
    nucleus_by_sorting,
    row_uniforms,
    sample_at,
    search,
)


@pytest.mark.parametrize(
    "settings",
    [
        SamplingSettings(1.0),
        SamplingSettings(0.6),
        SamplingSettings(1.3, top_k=7),
        SamplingSettings(1.0, top_p=0.8),
        SamplingSettings(0.7, min_p=0.1),
        SamplingSettings(0.8, top_k=20, top_p=0.9, min_p=0.05),
        SamplingSettings(1.0, top_k=1000, top_p=0.01),
    ],
)
def test_probabilities_equal_those_of_transformers_warpers(settings):
    logits = 3 * torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    logits[0, :] = 0.0  # every token ties
    warpers = LogitsProcessorList([TemperatureLogitsWarper(settings.temperature)])
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        warpers.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        warpers.append(MinPLogitsWarper(settings.min_p))
    expected = warpers(torch.zeros(64, 1, dtype=torch.int64), logits.clone()).softmax(-1)
    probs = logits_to_probs(logits, settings)
    assert torch.equal(probs > 0, expected > 0)
    torch.testing.assert_close(probs, expected)


def test_the_nucleus_is_sorted_for_only_where_sums_or_ties_decide(monkeypatch):
    sorted_rows = []

    def count(scores, top_p):
        sorted_rows.append(scores)
        return nucleus_by_sorting(scores, top_p)

    monkeypatch.setattr(sampling, "nucleus_by_sorting", count)
    logits = 3 * torch.randn(200, 1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(nucleus(logits, 0.9), nucleus_by_sorting(logits, 0.9))
    assert len(sorted_rows) <= 10
    sorted_rows.clear()
    # .5, .25, .125, .125: above the third stands .75 exactly, above the fourth .875, which ties with it.
    eighths = torch.tensor([4.0, 2.0, 1.0, 1.0]).log()
    assert torch.isfinite(nucleus(eighths, 0.6)).tolist() == [True, True, False, False]
    assert not sorted_rows
    assert torch.isfinite(nucleus(eighths, 0.8)).sum() == 3
    assert len(sorted_rows) == 1
    nucleus(eighths, 0.75)
    assert len(sorted_rows) == 2
    needs_gradient = logits.clone().requires_grad_()
    logits_to_probs(needs_gradient, SamplingSettings(top_p=0.9)).square().sum().backward()
    assert needs_gradient.grad is not None


def test_rows_searched_one_by_one_find_what_one_search_finds():
    generator = torch.Generator().manual_seed(0)
    probs = (3 * torch.randn(3, 5, 300, generator=generator)).softmax(-1)
    probs[0, 0, :7] = 0.0
    probs[0, 1] *= 1e-9  # not normalised
    probs[0, 2] = torch.nan
    points = torch.rand(3, 5, 4, generator=generator, dtype=torch.float64)
    points[1, :, 0], points[1, :, 1] = 0.0, 1.0 - 2.0**-53
    expected = search(probs.cumsum(-1, dtype=torch.float64), points)
    assert torch.equal(sample_at(probs, points), expected)
    assert torch.equal(sample_at(probs.double(), points.float()), search(probs.double().cumsum(-1), points.float()))
    assert sample_at(probs[:0], points[:0]).shape == (0, 5, 4)
    assert int(expected.max()) == 299


def test_row_uniforms_are_pinned():
    # A changed stream would silently change every stored response made with a seed.
    expected = torch.tensor([0.91768852, 0.76928816, 0.09297904], dtype=torch.float64)
    torch.testing.assert_close(row_uniforms(7, "prompt", 1)[0], expected, rtol=0, atol=1e-8)


def test_numbers_of_blocks_are_all_different_and_those_of_plain_decoding_the_first():
    """So a target that decodes alone says the same, whatever gamma the settings allow."""
    numbers = block_uniforms(7, "prompt", 30, 4, 5)
    assert numbers.shape == (30, 4, 5)
    assert len(numbers.unique()) == numbers.numel()
    assert torch.equal(numbers[:, 0, :3], row_uniforms(7, "prompt", 30))
    assert torch.equal(numbers[:9], block_uniforms(7, "prompt", 9, 4, 5)), "a longer budget begins with the shorter one"
