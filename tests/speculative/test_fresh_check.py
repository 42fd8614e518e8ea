"""New responses against stored ones: z by simulation, with a pair of laws that agree and one that does not."""

import numpy as np
import pytest

from speculative.evaluate import fresh_check

PROMPTS = 32


def sums(rng: np.random.Generator, rates_P: np.ndarray) -> np.ndarray:
    """(accepted, tokens) (P, 2) of one response each: some prompts are easier than others, and lengths differ."""
    tokens_P = rng.integers(5, 60, len(rates_P))
    return np.stack((rng.binomial(tokens_P, rates_P), tokens_P), 1).astype(float)


def checks(change: float, repeats: int):
    rng = np.random.default_rng(0)
    for _ in range(repeats):
        rates_P = rng.uniform(0.5, 0.8, PROMPTS)
        yield fresh_check(sums(rng, rates_P + change), sums(rng, rates_P))


def test_z_is_of_standard_size_where_nothing_has_changed() -> None:
    found = list(checks(0.0, 2000))
    assert np.std([one.z for one in found]) == pytest.approx(1.0, abs=0.08)
    assert np.mean([one.z for one in found]) == pytest.approx(0.0, abs=0.08)
    assert np.mean([one.agrees for one in found]) > 0.998


def test_a_changed_target_is_found_by_32_prompts() -> None:
    found = list(checks(-0.2, 100))
    assert np.mean([one.agrees for one in found]) < 0.05
    assert np.mean([one.z for one in found]) < -4.0


def test_equal_responses_and_few_prompts_by_hand() -> None:
    same = np.array([[3.0, 4.0], [5.0, 9.0]])
    assert fresh_check(same, same).z == 0.0
    found = fresh_check(np.array([[0.0, 100.0], [1.0, 100.0]]), np.array([[99.0, 100.0], [98.0, 100.0]]))
    assert (found.prompts, found.tokens, found.alpha, found.stored_alpha) == (2, 200, 0.005, 0.985)
    assert found.z < -4.0
    assert found.agrees, "two prompts prove nothing"
