"""The change of the expected calibration error: against `calibration` on much text, and its interval by simulation."""

import numpy as np
import pytest
from simulation import trials

from speculative.evaluate import HeldoutResponse
from speculative.explain import calibration_change as module
from speculative.explain.calibration import calibration
from speculative.explain.calibration_change import Scored, calibration_change
from speculative.measure.token_scores import TokenScores


def side(rng: np.random.Generator, prompts: int, overconfident: float) -> Scored:
    """Responses of 30 tokens; each prompt has its own acceptance, on average `overconfident` below the confidence."""
    texts, scores = [], []
    for number in range(prompts):
        confidence = rng.beta(2, 2, 30)
        matches = rng.random(30) < np.clip(confidence - overconfident + 0.15 * rng.standard_normal(), 0, 1)
        texts.append(HeldoutResponse(f"r{number}", "a", [number], [1] * 30, [0.0] * 30))
        scores.append(TokenScores(np.zeros(30), np.zeros(30), matches, np.zeros(30, dtype=int), confidence))
    return texts, scores


def test_on_much_text_the_errors_are_those_of_the_reliability_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESAMPLES", 100)
    rng = np.random.default_rng(0)
    now, judged = side(rng, 3000, 0.15), side(rng, 3000, 0.05)
    found = calibration_change(now, judged, "greedy")
    # 90,000 tokens: what noise adds to a bin is below 0.002.
    assert found.now == pytest.approx(calibration(*now, "greedy").expected_error, abs=0.003)
    assert found.judged == pytest.approx(calibration(*judged, "greedy").expected_error, abs=0.003)
    assert found.change == found.now - found.judged
    assert 0 < found.ci[0] < found.change < found.ci[1]


def test_about_half_of_what_noise_adds_is_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESAMPLES", 2)  # only for the interval
    rng = np.random.default_rng(1)
    pairs = [side(rng, 30, 0.0) for _ in range(60)]
    raw = [calibration(*one, "greedy").expected_error or 0.0 for one in pairs]
    found = [calibration_change(one, pairs[0], "greedy").now for one in pairs]
    truth = calibration(*side(rng, 3000, 0.0), "greedy").expected_error
    assert truth is not None
    assert np.mean(raw) > truth + 0.02
    assert -0.01 < np.mean(found) - truth < 0.6 * (np.mean(raw) - truth)


@pytest.mark.simulation
@pytest.mark.parametrize(
    ("prompts", "before", "after"), [(40, 0.0, 0.0), (40, 0.1, 0.1), (20, 0.1, 0.1), (40, 0.0, 0.15)]
)
def test_the_interval_covers_the_true_change(
    prompts: int, before: float, after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It covers in 92 to 97 % of the simulations (in full 1,000), not in exactly 95: the distance has a corner at zero."""
    rng, count = np.random.default_rng(2), trials(30, 1000)
    with monkeypatch.context() as without_interval:
        without_interval.setattr(module, "_RESAMPLES", 2)
        many = calibration_change(side(rng, 2000, after), side(rng, 2000, before), "greedy").change
    covered = 0
    for _ in range(count):
        found = calibration_change(side(rng, prompts, after), side(rng, 60, before), "greedy")
        covered += found.ci[0] <= many <= found.ci[1]
    assert covered / count >= 0.91 - 3 * np.sqrt(0.09 * 0.91 / count)


def test_one_prompt_shows_no_spread() -> None:
    rng = np.random.default_rng(3)
    with pytest.raises(ValueError, match="1 prompts: at least 2"):
        calibration_change(side(rng, 1, 0.0), side(rng, 9, 0.0), "greedy")
