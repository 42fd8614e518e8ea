"""bench/slice_prior.py: its price of a request, and that it would see a domain that matters."""

import numpy as np
import pytest
from bench_modules import bench

from speculative.drafters.gamma import FixedGamma

slices = bench("slice_prior")


def test_a_request_costs_its_blocks() -> None:
    coins = np.array([True, True, False, True, True, True, False])
    assert [slices.accepted_at(coins, place, 3) for place in (0, 3, 5)] == [2, 3, 1]
    assert slices.accepted_at(coins, 0, 0) == 0
    # Blocks of 2: tokens 0-2, 3-5 and 6, each a target step and two tokens; plain decoding is a step a token.
    requests = [("a", coins), ("b", coins)]
    assert slices.steps_of(FixedGamma(2), requests, [1, 0], 1, 0.2) == pytest.approx([3 * (1 + 2 * 0.25)] * 2)
    assert slices.steps_of(FixedGamma(0), requests, [1, 0], 1, 0.2) == pytest.approx([7.0, 7.0])
    # Two at once share the time of their blocks, which have two rows more to verify.
    assert slices.steps_of(FixedGamma(2), requests, [1, 0], 2, 0.2) == pytest.approx([3 * (1 + 2 * 0.3) / 2] * 2)
    assert slices.steps_of(FixedGamma(8), requests, [0, 1], 1, 0.2, {"a": 2, "b": 0}.__getitem__) == pytest.approx(
        [3 * (1 + 2 * 0.25), 7.0]
    )


def test_a_domain_that_matters_is_seen_and_one_that_does_not_changes_nothing() -> None:
    """Short requests that are always accepted, and ones that never are: acceptance so far learns too late."""
    generator = np.random.default_rng(1)
    apart = {"a": [np.full(12, 0.97)] * 40, "b": [np.full(12, 0.03)] * 40}
    ways = slices.compare(apart, 0.15, 1, 1)["ways"]
    for name in (slices.BY_DOMAIN, slices.SLICE, slices.KNOWN):
        assert ways[name]["over_fixed"][1] > 1.02, name
        assert ways[name]["over_adaptive"][1] > 1.0, name
    texts = [generator.uniform(0.4, 1.0, 30) for _ in range(40)]
    alike = slices.compare({"a": texts[:20], "b": texts[20:]}, 0.15, 1, 1)["ways"]
    assert alike[slices.SLICE]["over_adaptive"][0] == pytest.approx(1.0, abs=0.03)
