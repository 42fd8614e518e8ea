"""Served numbers that no working engine gives: everything that is drafted is accepted, or nothing is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from readback_run import read
from tiny_models import tiny_model

from distill.run.frozen_text import FrozenText
from speculative.measure.engine_blocks import NEAR_ALL, canary
from speculative.rules.sampling import GREEDY

pytestmark = pytest.mark.usefixtures("_quick")


def accepting(make: Callable[..., FakeEngine], draft: Any, **how: Any) -> FakeEngine:
    """An engine that takes the draft for the target, so everything is accepted and the text is the draft's."""
    return make(target=draft, **how)


@pytest.mark.parametrize(("rule", "sampling"), [("greedy-draft", GREEDY), ("sample", None), ("greedy", None)])
def test_an_engine_that_skips_verification_is_refused(
    make: Callable[..., FakeEngine], draft: Any, run: Path, rule: Any, sampling: Any
) -> None:
    """Under the argmax rules replay of the text that it wrote agrees exactly; only the run's own text tells."""
    served = "greedy-draft" if rule == "greedy" else rule
    found = read(accepting(make, draft, rule=served, sampling=sampling), run, rule=rule)
    assert found.served.accepted_per_drafted == 1.0
    assert rule == "sample" or found.z == 0.0
    assert found.agrees is False
    assert any(one.startswith("canary: 1.000 of the drafted tokens are accepted") for one in found.causes), found.causes


def test_it_is_refused_where_only_sums_are_known(make: Callable[..., FakeEngine], draft: Any, run: Path) -> None:
    found = read(accepting(make, draft, rule="sample", detail="none", ids=False), run)
    assert found.source == "metrics"
    assert any(one.startswith("canary: 1.000") for one in found.causes), found.causes


def test_a_draft_of_noise_is_named(make: Callable[..., FakeEngine], frozen: FrozenText, run: Path) -> None:
    """As when an engine loads quantised weights as something else."""
    noise = tiny_model(seed=99, vocab_size=frozen.target.model.config.vocab_size).to(frozen.target.model.dtype)
    found = read(make(draft=noise, rule="greedy-draft"), run)
    assert found.agrees is False
    assert found.served.accepted_per_drafted is not None
    assert found.served.accepted_per_drafted <= 1.0 - NEAR_ALL, "the draft of this test is accepted too often"
    assert "canary: 0.0" in found.causes[-1]
    assert "sglang#39087" in found.causes[-1]


def test_a_draft_that_is_the_target_is_no_fault(
    make: Callable[..., FakeEngine], frozen: FrozenText, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrozenText, "draft", lambda own, path: frozen.target.model)
    found = read(make(draft=frozen.target.model, rule="greedy-draft"), run, rule="greedy")
    assert found.served.accepted_per_drafted == 1.0
    assert (found.agrees, found.causes) == (True, [])


@given(st.floats(0.0, 0.98), st.integers(1, 10_000), st.floats(0.0, 1.0))
def test_chance_is_never_called_a_fault(expected: float, blocks: int, share: float) -> None:
    told = canary(share, expected, blocks)
    assert told in ("", "all", "none")
    if told == "all":
        assert share >= 0.99
        assert expected**blocks < 1e-6
    if told == "none":
        assert share <= 0.01 + 1e-12
        assert (1.0 - expected) ** blocks < 1e-6


def test_the_canary_by_hand() -> None:
    assert canary(1.0, 0.5, 100) == "all"
    assert canary(1.0, 0.5, 10) == "", "one in a thousand: too few blocks"
    assert canary(1.0, 0.995, 10**6) == "", "a draft that good is expected to be accepted"
    assert canary(0.8, 0.5, 100) == ""
    assert canary(0.0, 0.5, 100) == "none"
    assert canary(0.0, 0.001, 100) == "", "nothing was expected"
