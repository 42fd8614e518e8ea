"""A steady block is one launch: nothing is sent to the device, the host waits at most once, and hardly anything runs beside the graph."""

from dataclasses import replace
from typing import Any

import pytest
from bench_modules import bench

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def counting() -> Any:
    module = bench("gpu_model")
    return module, module.small_pair()


@pytest.mark.parametrize(
    ("way", "batch"), [("greedy", 1), ("sample", 1), ("greedy", 4), ("sample", 4), ("nucleus", 4), ("block", 4)]
)
def test_a_steady_block_is_one_launch(counting: Any, way: str, batch: int) -> None:
    """With rows recycled: there are twice as many prompts as rows."""
    module, models = counting
    rule, sampling = dict(zip(("greedy", "sample", "nucleus", "block"), module.WAYS, strict=True))[way]
    settings = replace(module.settings_of(rule, sampling, 5), max_tokens=40)
    counts = module.count_blocks(*models, settings, batch, "graph")
    assert (counts.launches, counts.uploads) == (1, 0)
    assert counts.waits <= 1
    assert counts.kernels_outside <= 3


def test_a_block_that_asks_for_more_is_seen(counting: Any) -> None:
    """Without graphs there is no launch of one, and kernels, copies and waits are those of the calls."""
    module, models = counting
    settings = replace(module.settings_of(*module.WAYS[0], 2), max_tokens=24)
    counts = module.count_blocks(*models, settings, 2, "eager")
    assert (counts.launches, counts.kernels_in_graphs) == (0, 0)
    assert counts.kernels_outside > 3 * 56  # 2 draft steps and a verify call of one layer each
