"""The engine's clock: the costs of an engine whose costs are known are found from the times of its streams alone."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.measure.engine_costs import EngineCosts, Stream, busiest, ratios_of, served_seconds, step_costs

SECONDS = st.floats(1e-4, 1e-1)
LOADS, GAMMAS = (1, 4, 16), (0, 1, 3, 6)


def block_seconds(load: int, gamma: int, engine: tuple[float, ...], parallel: bool = False) -> float:
    """An engine whose target call, draft call and work of each drafted block cost what `engine` says."""
    fixed, per_token, draft, extra = engine
    calls = min(1, gamma) if parallel else gamma
    return fixed + per_token * load * (gamma + 1) + calls * draft + (extra if gamma else 0.0)


def served(load: int, block: float, prefill: float, blocks: int, count: int = 60) -> list[Stream]:
    """Responses of about so many blocks, from an engine that reads each new prompt in a step of the others."""
    rng, waiting, now = np.random.default_rng(0), count, 0.0
    running, ended = list[tuple[float, int, list[float]]](), list[Stream]()
    while running or waiting:
        arrived = min(waiting, load - len(running))
        running += [(now, int(rng.integers(blocks - 2, blocks + 3)), []) for _ in range(arrived)]
        waiting, now = waiting - arrived, now + block + prefill * arrived
        for _, _, seconds in running:
            seconds.append(now)
        ended += [Stream(sent, seconds, most) for sent, most, seconds in running if len(seconds) > most]
        running = [one for one in running if len(one[2]) <= one[1]]
    return sorted(ended, key=lambda one: one.sent)


@given(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), st.floats(0.0, 2.0))
@settings(max_examples=25, deadline=None)
def test_known_costs_are_recovered(engine: tuple[float, ...], prompt: float) -> None:
    """c and v are exact. prompt: what reading one adds to a step, in plain steps of one request."""
    seconds = {}
    for load, gamma in itertools.product(LOADS, GAMMAS):
        block, prefill = block_seconds(load, gamma, engine), prompt * block_seconds(1, 0, engine)
        streams = served(load, block, prefill, 40)
        assert busiest(streams) == load
        seconds[load, gamma], rest = served_seconds(streams, slice(load, -load))
        # Its own step, and the prompts that are read until it ends.
        assert rest == pytest.approx(block + load * prefill, rel=0.2)
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


@pytest.mark.parametrize("load", [1, 4, 16])
def test_other_acceptance_is_predicted(load: int) -> None:
    """Half as many blocks a response: the rest stays what it is, so times measured with one draft hold for another."""
    block, rest = served_seconds(served(load, 0.02, 0.01, 26, 400), slice(load, -load))
    assert block == pytest.approx(0.02)
    fewer = served(load, 0.02, 0.01, 13, 400)[load:-load]
    found = np.mean([one.seconds_C[-1] - one.sent for one in fewer])
    assert found == pytest.approx(rest + block * np.mean([one.blocks for one in fewer]), rel=0.01)


def test_a_chunk_for_each_token_of_a_block_is_a_block() -> None:
    burst = [0.01 * block + 1e-5 * token for block in range(20) for token in range(4)]
    block, rest = served_seconds([Stream(-0.03, burst, 19)], slice(1))
    assert block == pytest.approx(0.01)
    assert rest == pytest.approx(0.03, abs=1e-4)


def test_requests_that_do_not_overlap_are_not_counted_together() -> None:
    streams = [Stream(0.0, [1.0, 2.0], 3), Stream(0.0, [2.0, 4.0], 3), Stream(0.0, [3.0, 5.0], 3)]
    assert busiest(streams) == 2


@pytest.mark.parametrize(("shift", "unsteady"), [(1.0, []), (3.0, [4])])
def test_repeats_that_differ_by_more_than_a_block_are_reported(shift: float, unsteady: list[int]) -> None:
    """One of three repeats at load 4 has other plain steps."""
    engine = (1e-3, 1e-4, 2e-4, 0.0)
    seconds = {(load, gamma): block_seconds(load, gamma, engine) for load in (1, 4) for gamma in GAMMAS}
    costs, other = step_costs(seconds, False), step_costs(seconds | {(4, 0): shift * seconds[4, 0]}, False)
    ratios = {one.batch_size: ratios_of(one, each) for one, *each in zip(costs, costs, other, costs, strict=True)}
    assert EngineCosts(format=1, engine="e", device="d", flags=[], costs=costs, ratios=ratios).unsteady == unsteady
