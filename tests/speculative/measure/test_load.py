"""Speed over the load: the roofline against hand-computed lines, and the largest load within limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.measure.cost import StepCosts
from speculative.measure.load import LoadCurve, Roofline, StepLine, fit_line, fit_roofline
from speculative.measure.measured import DRAFT, TARGET, Measured, largest_load

# 10 ms fixed and 1 ms a token; the draft a tenth of both.
LINES = Roofline(StepLine(0.010, 0.001), StepLine(0.001, 0.0001))


def costs_at(load: int, gammas: tuple[int, ...] = (1, 4, 8)) -> StepCosts:
    """What a machine of exactly `LINES` would measure."""
    return StepCosts(
        LINES.target.seconds(load),
        {gamma: gamma * LINES.draft.seconds(load) for gamma in gammas},
        {gamma: LINES.target.seconds(load * (gamma + 1)) for gamma in gammas},
        batch_size=load,
        context=64,
    )


@pytest.mark.parametrize("loads", [(1,), (1, 4, 16)])
def test_the_roofline_that_made_the_costs_is_found_from_one_load_or_several(loads) -> None:
    found = fit_roofline([costs_at(load) for load in loads])
    assert (found.target.fixed, found.target.per_token) == pytest.approx((0.010, 0.001))
    assert found.target.free_tokens == pytest.approx(10.0)
    if len(loads) > 1:
        assert (found.draft.fixed, found.draft.per_token) == pytest.approx((0.001, 0.0001))
    for load in loads:
        assert found.draft.seconds(load) == pytest.approx(LINES.draft.seconds(load))


def test_a_line_never_falls_and_never_starts_below_nothing() -> None:
    falling, steep = fit_line((1, 2, 4), (4.0, 3.0, 2.0)), fit_line((1, 2, 4), (1.0, 3.0, 7.0))
    assert falling.per_token == 0.0
    assert falling.fixed > 0.0
    assert falling.free_tokens is None
    assert steep.fixed == 0.0
    assert steep.free_tokens == 0.0


def test_predicted_speed_up_by_hand() -> None:
    # Load 1: (11 ms * 3) / (4 * 1.1 + 15); load 90: (100 * 3) / (4 * 10 + 460).
    assert LINES.speed_up(1, 4, 3.0) == pytest.approx(33.0 / 19.4)
    assert LINES.speed_up(90, 4, 3.0) == pytest.approx(300.0 / 500.0)


def test_plain_decoding_wins_from_where_the_lines_say() -> None:
    # gamma 1 alone with tau 1.8: 1.8 (10 + n) > 1 + .1 n + 10 + 2 n while n < 7 / .3 = 23.3.
    curve = LoadCurve(LINES, {1: 1.8})
    assert curve.plain_wins_from() == 24
    assert curve.speed_up(23) > 1.0 > curve.speed_up(24)
    assert LoadCurve(LINES, {1: 1.05}).plain_wins_from() == 1
    assert LoadCurve(Roofline(StepLine(0.01, 0.0), StepLine(0.001, 0.0)), {1: 1.8}).plain_wins_from() is None


def test_more_tokens_a_block_at_a_small_load_fewer_at_a_large_one() -> None:
    taus = {gamma: (1 - 0.8 ** (gamma + 1)) / 0.2 for gamma in range(1, 17)}
    best = [LoadCurve(LINES, taus).best_gamma(load) for load in (1, 4, 16, 64)]
    assert best == sorted(best, reverse=True)
    assert best[0] > best[-1] == 1
    slow = {gamma: LINES.speed_up(4, gamma, tau) for gamma, tau in taus.items()}
    assert LoadCurve(LINES, taus).best_gamma(4) == min(
        gamma for gamma in taus if slow[gamma] * 1.03 >= max(slow.values())
    )


def test_what_was_measured_bends_the_curve() -> None:
    curve = LoadCurve(LINES, {1: 1.8}, {1: 1.0, 16: 0.9})
    assert curve.speed_up(1) == pytest.approx(curve.predicted(1, 1))
    assert curve.speed_up(16) == pytest.approx(0.9 * curve.predicted(16, 1))
    assert curve.speed_up(4) == pytest.approx(0.95 * curve.predicted(4, 1))  # half-way in log(load)
    assert curve.speed_up(64) == pytest.approx(0.9 * curve.predicted(64, 1))
    slow_twin = next(load for load in range(1, 100) if all(curve.speed_up(later) <= 1.0 for later in range(load, 4097)))
    assert curve.plain_wins_from() == slow_twin < 24


waits = st.dictionaries(
    st.sampled_from([1, 2, 4, 8]), st.tuples(st.floats(1, 100), st.none() | st.floats(1, 100)), max_size=4
)
limits = st.dictionaries(st.sampled_from(["first_token", "per_token"]), st.floats(1, 100), min_size=1)


@given(waits, limits, st.floats(0, 50))
def test_a_higher_limit_never_lowers_the_load(waits, limits, more) -> None:
    rows = [
        Measured(DRAFT, "sample", load, first_token_ms={"p90": first}, per_token_ms=later and {"p90": later})
        for load, (first, later) in waits.items()
    ]
    rows += [Measured(DRAFT, "sample"), Measured(TARGET, "sample", 64, first_token_ms={"p90": 0.0})]
    held = largest_load(rows, DRAFT, limits)
    assert held is None or held in waits
    for name in limits:
        raised = largest_load(rows, DRAFT, {**limits, name: limits[name] + more})
        assert (raised or 0) >= (held or 0)
    alone = largest_load(rows, DRAFT, {"first_token": limits.get("first_token", 1000.0)})
    assert (alone or 0) >= (held or 0), "a limit less"


def test_the_largest_load_by_hand() -> None:
    rows = [
        Measured(DRAFT, "sample", load, first_token_ms={"p90": first}, per_token_ms={"p90": later})
        for load, first, later in ((1, 40.0, 12.0), (4, 120.0, 25.0), (8, 290.0, 31.0))
    ]
    assert largest_load(rows, DRAFT, {"first_token": 300.0, "per_token": 30.0}) == 4
    assert largest_load(rows, DRAFT, {"first_token": 300.0}) == 8
    assert largest_load(rows, DRAFT, {"first_token": 39.0}) is None
    assert largest_load(rows, TARGET, {"first_token": 300.0}) is None
