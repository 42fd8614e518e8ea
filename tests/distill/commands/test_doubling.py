"""What twice the prompts would give: the law, the coverage of its interval, and the sentence of a real sweep."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tiny_training import forget_accelerators, small_config, write_prompts

from data.responses.rendered import StoredPrompts
from data.responses.rendered import write_prompts as write_rendered
from distill import train
from distill.commands.sweep.doubling import Fit, forecast, forecasts, next_gain, numbers_of
from distill.commands.sweep.options import SweepOptions
from distill.commands.sweep.plan import plan
from distill.commands.sweep.sweep import run_sweep
from distill.config.layout import BEST_LINK, JUDGEMENT
from speculative.evaluate import Judgement
from speculative.measure.intervals import intervals_of_sums


@given(st.floats(0, 0.5), st.floats(0.001, 0.2), st.floats(0, 1))
def test_gains_that_shrink_by_one_factor_are_continued(first: float, gain: float, factor: float) -> None:
    alphas = first + gain * np.array([0.0, 1.0, 1.0 + factor])
    assert next_gain(alphas) == pytest.approx(gain * factor**2, abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_a_forecast_is_neither_a_loss_nor_more_than_the_last_gain(alphas: list[float]) -> None:
    assert 0.0 <= next_gain(np.array(alphas)) <= max(0.0, alphas[2] - alphas[1])


def drawn(rng: np.random.Generator, alphas: list[float], prompts: int) -> list[Fit]:
    """Fits whose alphas vary by prompt, mostly together, as those of runs on more and more of the same prompts do."""
    tokens_N, easy_N = rng.integers(20, 60, prompts), rng.normal(0.0, 0.12, prompts)
    sums = [tokens_N * np.clip(alpha + easy_N + rng.normal(0.0, 0.03, prompts), 0, 1) for alpha in alphas]
    return [
        Fit(250 << number, list(map(str, range(prompts))), np.stack((own, tokens_N), 1))
        for number, own in enumerate(sums)
    ]


@pytest.mark.parametrize("factor", [0.4, 0.7])
def test_the_interval_covers_what_the_law_gives(factor: float) -> None:
    rng, gain = np.random.default_rng(0), 0.08
    alphas, covered = [0.35, 0.35 + gain, 0.35 + gain * (1 + factor)], []
    for _ in range(150):
        sums_PC = np.concatenate([fit.sums_N2 for fit in drawn(rng, alphas, 100)], 1)
        ends = intervals_of_sums(sums_PC, numbers_of, resamples=500)
        truth = alphas[2] + gain * factor**2, gain * factor**2
        covered.append([low <= value <= high for value, (low, high) in zip(truth, ends, strict=True)])
    assert np.mean(covered, axis=0) == pytest.approx([0.95, 0.95], abs=0.05), "two and a half standard errors"


def test_the_sentence_has_the_gain_and_what_it_is_made_of() -> None:
    told = forecast(drawn(np.random.default_rng(1), [0.3, 0.36, 0.4], 400))
    assert told.startswith("Twice the prompts would give alpha 0.4")
    assert told.endswith(" on 250, 500, 1,000 prompts).")
    assert "hardly help: alpha 0." in forecast(drawn(np.random.default_rng(1), [0.3, 0.4, 0.36], 400))


def test_a_sweep_over_prompts_ends_in_a_forecast_and_shows_how_the_last_one_came_out(tmp_path: Path) -> None:
    (tmp_path / "heldout.jsonl").write_text("".join(f'{{"prompt": "class C{number}:"}}\n' for number in range(8)))
    paths = {"train": write_prompts(tmp_path / "train.jsonl", 40), "heldout": tmp_path / "heldout.jsonl"}
    sources = {side: [{"path": str(path), "prompt_column": "prompt"}] for side, path in paths.items()}
    base = small_config(tmp_path, data=sources)
    limits = {"data.train.0.limit": [4, 8, 16, 32]}
    fixed = {"train.steps": 0, "train.epochs": 1.0, "judge.every": 50, "judge.prompts": 8, "judge.live": "never"}
    path = tmp_path / "sweep.yaml"
    path.write_text(json.dumps({"base": str(base), "name": "more", "grid": limits, "overrides": fixed}))
    trials = plan(path)[1]
    for trial in trials:
        forget_accelerators()
        assert train.main([str(base), *trial.overrides]) == 0
    file = io.StringIO()
    run_sweep(SweepOptions(path), Console(file=file, width=200))
    told = json.loads((tmp_path / "more" / "sweep.json").read_text())["forecasts"]
    alphas = [Judgement.read(trial.config.folder / BEST_LINK / JUDGEMENT).alpha for trial in trials]
    fits = [Fit.read(trial.config.folder) for trial in trials]
    assert [fit.alpha for fit in fits] == pytest.approx(alphas)
    assert told == [f"{forecast(fits[:3])} 32 gave {alphas[3]:.3f}.", forecast(fits[1:])]
    assert all(sentence in file.getvalue() for sentence in told)

    heldout = trials[1].config.folder / "prompts" / "heldout.arrow"
    write_rendered(heldout, StoredPrompts(heldout)[::-1])
    assert list(forecasts(trials)) == [
        "No forecast for more prompts: the runs held out different ones; set data.heldout (a run's prompts/heldout.arrow will do)."
    ]
    assert list(forecasts(trials[2:])) == []
