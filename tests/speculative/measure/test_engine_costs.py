"""The engine's clock: the costs of an engine whose costs are known are found from the times of its streams alone."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from speculative.measure.engine_costs import EngineCosts, Stream, ratios_of, step_costs, wave_seconds

SECONDS = st.floats(1e-4, 1e-1)
LOADS, GAMMAS = (1, 4, 16), (0, 1, 3, 6)


def block_seconds(load: int, gamma: int, engine: tuple[float, ...], parallel: bool = False) -> float:
    """An engine whose target call, draft call and work of each drafted block cost what `engine` says."""
    fixed, per_token, draft, extra = engine
    calls = min(1, gamma) if parallel else gamma
    return fixed + per_token * load * (gamma + 1) + calls * draft + (extra if gamma else 0.0)


def wave(load: int, block: float, accepted: list[int], prefill: float) -> list[Stream]:
    """Requests that are prefilled one after another and then decoded together, `accepted` tokens in each block and one more."""
    ready = prefill * load
    return [
        Stream(
            [prefill * (row + 1), *(ready + block * (number + 1) for number in range(len(accepted)))],
            [1, *(one + 1 for one in accepted)], len(accepted),
        )
        for row in range(load)
    ]  # fmt: skip


@given(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), st.integers(0, 2**32 - 1), SECONDS)
@settings(max_examples=40, deadline=None)
def test_known_costs_are_recovered(engine: tuple[float, ...], seed: int, prefill: float) -> None:
    """c and v are exact, whatever was accepted: prefill and acceptance leave no trace."""
    rng = np.random.default_rng(seed)
    seconds = {
        (load, gamma): wave_seconds(wave(load, block_seconds(load, gamma, engine), rng.integers(0, gamma + 1, 9).tolist(), prefill))
        for load, gamma in itertools.product(LOADS, GAMMAS)
    }  # fmt: skip
    fixed, per_token, draft, extra = engine
    for costs in step_costs(seconds, parallel=False):
        load, step = costs.batch_size, fixed + per_token * costs.batch_size
        assert costs.target_seconds == pytest.approx(step)
        # The difference of two slopes, each near the block's time: rounding is relative to the block.
        assert costs.cost_ratio == pytest.approx(draft / step, abs=1e-6 * block_seconds(load, 6, engine) / step)
        for gamma in GAMMAS[1:]:
            verify = fixed + per_token * load * (gamma + 1) + extra
            assert costs.block_price(gamma) == pytest.approx(block_seconds(load, gamma, engine) / step)
            assert costs.verify_ratio(gamma) == pytest.approx(verify / step, rel=1e-4)


def test_a_block_in_one_pass_has_one_draft_call() -> None:
    engine = (0.01, 0.0001, 0.004, 0.0)
    seconds = {cell: block_seconds(*cell, engine, parallel=True) for cell in itertools.product(LOADS, GAMMAS)}
    for costs in step_costs(seconds, parallel=True):
        assert costs.cost_ratio * costs.target_seconds == pytest.approx(0.004)
        assert costs.block_price(3) == pytest.approx(seconds[costs.batch_size, 3] / costs.target_seconds)


def test_the_file_predicts_what_the_engine_would_do() -> None:
    """tau over the price of a block at each gamma; gamma 0 from where nothing pays."""
    engine = (0.01, 0.001, 0.002, 0.0)
    seconds = {cell: block_seconds(*cell, engine) for cell in itertools.product(LOADS, GAMMAS)}
    costs = step_costs(seconds, parallel=False)
    slower = step_costs({cell: 1.1 * one if cell[1] else one for cell, one in seconds.items()}, parallel=False)
    ratios = {one.batch_size: ratios_of(one, [one, other]) for one, other in zip(costs, slower, strict=True)}
    made = EngineCosts(format=1, engine="e", device="d", flags=[], costs=costs, ratios=ratios)
    made = EngineCosts.model_validate_json(made.model_dump_json())
    taus = {gamma: 1.0 + 0.6 * gamma for gamma in range(7)}
    rows = made.rows(taus, "sample")
    for row in rows:
        assert row.gamma is not None
        block = block_seconds(row.concurrency, row.gamma, engine)
        expected = taus[row.gamma] * seconds[row.concurrency, 0] / block
        assert row.speed_up == pytest.approx(expected)
        assert row.how["speed_up"] == "predicted (engine)"
        if row.gamma in GAMMAS[1:]:  # Between the measured gammas the price is interpolated, without an interval.
            assert row.speed_up_ci is not None
            assert row.speed_up_ci[0] < expected < row.speed_up_ci[1]
    runs = {row.concurrency: row.gamma for row in rows}
    assert runs[1]
    assert runs[16] == 0
    wins = made.plain_wins_from(taus)
    assert wins is not None
    assert 4 < wins <= 16


def test_requests_that_never_overlap_are_refused() -> None:
    streams = [Stream([1.0, 2.0], [1, 3], 3), Stream([3.0, 4.0], [1, 3], 3)]
    assert "--load 2: the engine does not decode so many requests at once" in refused(wave_seconds, streams)
