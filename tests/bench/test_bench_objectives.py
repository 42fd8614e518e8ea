"""The page of the studies says what their JSON says, and no more than that allows."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_modules import bench
from scipy import stats

from distill.config.run import DEFAULT_OBJECTIVE
from speculative.measure.effects import standard_errors

ROOT = Path(__file__).resolve().parents[2]


def result_of(gains: dict[str, list[float]], seeds: int = 3, error: float = 0.001) -> dict[str, Any]:
    """A study of three pairs under one rule; gains over `lk` by contestant, one a pair."""
    pairs, names = ["one", "two", "three"], ["lk", *gains]
    cells, paired = [], []
    for number, pair in enumerate(pairs):
        place = {"pair": pair, "rule": "sample", "temperature": 1.0}
        for name in names:
            gain = gains[name][number] if name in gains else 0.0
            for seed in range(seeds):
                numbers = {"alpha": 0.6 + gain / 10, "tau": 2.0 + gain + 1e-5 * seed}
                cells.append(place | {"objective": name, "seed": seed, "lr": 1e-3} | numbers)
        errors = {"seeds": list(range(seeds)), "prompts": 400, "alpha_error": error, "tau_error": error}
        paired += [place | {"objective": name} | errors for name in gains]
    tuning = [
        {"pair": pair, "objective": name, "lr": lr, "alpha": 0.5, "tau": 1.5 - abs(lr - 1e-3)}
        for pair in pairs
        for name in names
        for lr in (1e-3, 3e-3, 3.3e-4)
    ]
    return {
        "study": "objectives",
        "about": "",
        "reference": "lk",
        "contestants": {name: {} for name in names},
        "pairs": pairs,
        "seeds": list(range(seeds)),
        "served": [{"temperature": 1.0, "rules": ["sample"]}],
        "lr": [1e-3, 3e-3],
        "prompts": 400,
        "tune_prompts": 100,
        "tune_at": 1.0,
        "gamma": 3,
        "steps": 9,
        "batch_size": 8,
        "trained_tokens": [70, 90],
        "tuning": tuning,
        "untrained": [],
        "cells": cells,
        "paired": paired,
    }


@pytest.mark.parametrize(
    ("gains", "seeds", "winner"),
    [
        ({"tv": [0.1, 0.1, 0.1], "kl": [0.2, -0.1, 0.3]}, 3, "tv"),  # kl loses on a pair for certain
        ({"tv": [0.1, 0.1, 0.1], "kl": [0.2, 0.2, 0.0]}, 3, "kl"),
        ({"tv": [0.1, 0.0, 0.0]}, 3, "lk"),
        ({"tv": [0.001, 0.001, 0.001]}, 3, "lk"),
        ({"tv": [0.1, 0.1, 0.1]}, 1, "lk"),  # of one seed nobody is certain
    ],
)
def test_a_default_changes_only_where_the_study_is_certain(
    gains: dict[str, list[float]], seeds: int, winner: str
) -> None:
    result = result_of(gains, seeds)
    told = bench("objectives").chosen(result, bench("objectives").comparisons(result))
    assert told == {("sample", 1.0): {"objective": winner, "pairs": 3}}


def test_no_difference_is_said_where_it_is_true() -> None:
    result = result_of({"tv": [0.1, -0.1, 0.001]})
    rows = bench("objectives").comparisons(result)
    assert [row["tau"]["says"] for row in rows] == ["gain", "loss", "no difference"]
    assert [row["tau"]["gain"] for row in rows] == pytest.approx([0.1, -0.1, 0.001])
    text = bench("objectives").page([result], "figure.png")
    assert "| three | sample at T 1 | tv | 3 | +0.0001" in text
    assert "Finished: 18 of 18 cells." in text
    assert "| one | lk | 1.499 | **1.500** | 1.498 |" in text
    del result["cells"][-1], result["paired"][-1]
    assert "Finished: 17 of 18 cells, the rest is not in these tables." in bench("objectives").page(
        [result], "figure.png"
    )


def test_the_page_in_the_repository_is_that_of_its_results(tmp_path: Path) -> None:
    objectives = bench("objectives")
    objectives.main(study=None, results=ROOT / objectives.RESULTS, to=tmp_path / objectives.PAGE.name)
    assert (tmp_path / objectives.PAGE.name).read_text() == (ROOT / objectives.PAGE).read_text()
    for path in (ROOT / objectives.RESULTS).glob("*_cpu.json"):
        result = json.loads(path.read_text())
        if "paired" in result:
            keys = {"pair", "rule", "temperature", "objective", "seed", "lr", "alpha", "tau"}
            assert all(set(cell) == keys for cell in result["cells"])
            assert (ROOT / "bench" / "studies" / f"{result['study']}.yaml").exists()


def test_the_defaults_are_those_that_the_study_chose() -> None:
    result = json.loads((ROOT / bench("objectives").RESULTS / "objectives_cpu.json").read_text())
    told = bench("objectives").chosen(result, bench("objectives").comparisons(result))
    names = {"lk_hybrid_3": "lk_hybrid"}
    chosen: dict[str, set[str]] = {}
    for (rule, _), law in told.items():
        chosen.setdefault(rule, set()).add(names.get(law["objective"], law["objective"]))
    assert chosen == {rule: {str(DEFAULT_OBJECTIVE[rule])} for rule in ("sample", "greedy-draft", "greedy")}


def test_holm_by_hand() -> None:
    # Sorted .005 .01 .03 .04: times 4, 3, 2, 1, never falling.
    assert bench("effects").holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert bench("effects").holm([0.9, 0.8]) == [1.0, 1.0]
    assert bench("effects").holm([]) == []


def test_an_effect_over_seeds_by_hand() -> None:
    # Prompts .03^2, seeds (.01^2) / 2: .0095 in all; Welch's degrees of freedom.
    gains = [0.2 - math.sqrt(0.5) * 0.1, 0.2 + math.sqrt(0.5) * 0.1]
    found = bench("effects").seed_effect(gains, 0.03, 11)
    error, freedom = math.sqrt(0.0009 + 0.005), 0.0059**2 / (0.0009**2 / 10 + 0.005**2 / 1)
    half = stats.t.ppf(0.975, freedom) * error
    assert (found.low, found.high) == pytest.approx((0.2 - half, 0.2 + half))
    assert found.p_value == pytest.approx(2 * stats.t.cdf(-0.2 / error, freedom))
    alone = bench("effects").seed_effect([0.2], 0.1, 11)
    assert alone.p_value == pytest.approx(2 * stats.t.cdf(-2.0, 10))
    assert bench("effects").seed_effect([0.0], 0.0, 11).p_value == 1.0


def test_effects_say_a_difference_about_as_often_as_promised_when_there_is_none() -> None:
    random, effects = np.random.default_rng(0), bench("effects")
    says = []
    for _ in range(200):
        tokens = random.integers(20, 60, 80) * 3
        # Three seeds, each with a gain of its own that is not repeatable.
        sides = [[random.binomial(tokens // 3, random.normal(0.7, 0.01)) for _ in range(3)] for _ in range(2)]
        pooled = [np.sum(side, 0) for side in sides]
        error, _ = standard_errors(np.stack([tokens, *pooled, tokens, tokens], 1))
        gains = [float((a - b).sum() / tokens.sum() * 3) for a, b in zip(*sides, strict=True)]
        says.append(effects.seed_effect(gains, error, len(tokens)).p_value < 0.05)
    assert 0.01 <= np.mean(says) <= 0.07
