"""Durations in words: every unit, a plain number as milliseconds, and one line naming the option for anything else."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from distill.commands.probe.plan import parse_seconds
from speculative.errors import UserError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("25ms", 0.025),
        ("0.025s", 0.025),
        ("3us", 3e-6),
        ("3\u00b5s", 3e-6),
        ("3\u03bcs", 3e-6),
        ("40ns", 4e-8),
        ("25", 0.025),
        (" 2.5 MS ", 0.0025),
        (".5s", 0.5),
        ("1e-3s", 0.001),
        ("2.s", 2.0),
    ],
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parse_seconds(text, "--t-target") == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    ["", "fast", "25 minutes", "25m", "ms", "3,5ms", "25ms 3", "nan", "inf", "1e", "0x10ms", "--t", "\u0663ms\u0663"],
)
def test_anything_else_is_refused_by_the_options_name(text: str) -> None:
    said = refused(parse_seconds, text, "--t-draft")
    assert said.startswith("--t-draft ")
    assert "25ms" in said


@pytest.mark.parametrize("text", ["0", "0ms", "-3ms", "-1", "1e400s"])
def test_a_time_is_above_zero_and_finite(text: str) -> None:
    with pytest.raises(UserError, match=r"^--t-target .*above 0 and finite"):
        parse_seconds(text, "--t-target")


@given(st.floats(1e-9, 1e6), st.sampled_from([("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("", 1e-3)]))
def test_what_is_written_is_read_back(number: float, unit: tuple[str, float]) -> None:
    word, factor = unit
    assert math.isclose(parse_seconds(f"{number!r}{word}", "--t"), number * factor, rel_tol=1e-12)
