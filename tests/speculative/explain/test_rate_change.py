"""The change of accepted per drafted: the formula by hand, its interval by simulation."""

import numpy as np
import pytest

from speculative.explain.rate_change import FEWEST_REQUESTS, rate_change

GAMMA = 4


def requests(rng: np.random.Generator, count: int, ease: float = 0.8, sums: int = 1) -> np.ndarray:
    """(2, count): accepted and drafted tokens of requests whose prompts differ, block by block; `sums`: of so many each."""
    blocks_N = rng.integers(10, 40, count * sums)
    ease_N = np.minimum(rng.beta(20 * ease, 20 * (1 - ease), count * sums), 1 - 1e-9)
    kept_NB = np.minimum(rng.geometric(np.repeat(1 - ease_N[:, None], 40, 1)) - 1, GAMMA)
    counts_2N = np.stack([(kept_NB * (np.arange(40) < blocks_N[:, None])).sum(1), blocks_N * GAMMA])
    return counts_2N.reshape(2, count, sums).sum(2)


def whole(judged_2P: np.ndarray) -> np.ndarray:
    return np.ones((1, judged_2P.shape[1]), dtype=bool)


def test_one_label_is_two_ratios_and_their_linearised_variances() -> None:
    rng = np.random.default_rng(0)
    later, judged = requests(rng, 30, 0.7), requests(rng, 50)
    found = rate_change(later, [0] * 30, judged, whole(judged))
    rates = [counts[0].sum() / counts[1].sum() for counts in (later, judged)]
    variances = []
    for counts, rate in zip((later, judged), rates, strict=True):
        squares = sum((kept - rate * tried) ** 2 for kept, tried in counts.T)
        variances.append(squares / counts[1].sum() ** 2 * counts.shape[1] / (counts.shape[1] - 1))
    assert (found.rate, found.baseline) == pytest.approx(rates)
    assert found.change == pytest.approx(rates[0] - rates[1])
    assert found.ci[1] - found.change == pytest.approx(1.959964 * sum(variances) ** 0.5)


def test_another_mix_of_labels_is_no_change() -> None:
    rng = np.random.default_rng(1)
    easy, hard = requests(rng, 200, 0.9), requests(rng, 200, 0.5)
    judged = np.concatenate([easy, hard], 1)
    members = np.repeat(np.eye(2, dtype=bool), 200, axis=1)
    later = np.concatenate([requests(rng, 20, 0.9), requests(rng, 180, 0.5)], 1)
    labels = [0] * 20 + [1] * 180
    found = rate_change(later, labels, judged, members)
    assert found.ci[0] < 0 < found.ci[1]
    assert rate_change(later, [0] * 200, judged, whole(judged)).ci[1] < 0
    # Two labels that are compared with the same requests have one baseline, with one error.
    once = rate_change(later, [0] * 200, judged, whole(judged))
    twice = rate_change(later, labels, judged, np.ones((2, 400), dtype=bool))
    assert twice.baseline == pytest.approx(once.baseline)


@pytest.mark.parametrize(
    ("count", "sums", "least"),
    # Three standard errors of 300; a single line of an engine's log borrows the spread of the judged requests.
    [(40, 1, 0.912), (3, 1, 0.912), (40, 6, 0.912), (1, 60, 0.912)],
)
def test_the_interval_holds_what_it_says(count: int, sums: int, least: float) -> None:
    rng, hits = np.random.default_rng(18), 0
    for _ in range(300):
        judged = requests(rng, 60)
        low, high = rate_change(requests(rng, count, sums=sums), [0] * count, judged, whole(judged), sums=sums > 1).ci
        hits += low <= 0 <= high
    assert least <= hits / 300


def test_what_says_nothing_is_refused() -> None:
    few = requests(np.random.default_rng(0), FEWEST_REQUESTS - 1)
    with pytest.raises(ValueError, match="8 judged"):
        rate_change(few, [0] * few.shape[1], few, whole(few))
