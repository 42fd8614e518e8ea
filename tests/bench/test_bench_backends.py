"""The comparison of ways to compile a call: a backend that fails is a cell, and ours gives the model's own logits."""

from typing import Any

import pytest
from bench_modules import bench
from tiny_models import tiny_model


def test_each_way_is_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: Any = bench("backends")
    call_by = backends.call_by

    def some(way: str, *rest: Any) -> Any:
        if way == "torch.compile, OpenVINO":
            raise IndexError("list index out of range\nand more")
        return call_by(way, *rest)

    monkeypatch.setattr(backends, "WAYS", ("eager", "torch.compile, OpenVINO", "ours"))
    monkeypatch.setattr(backends, "call_by", some)
    eager, failed, ours = backends.measured(tiny_model().eval(), 3, 0.01)
    assert (eager["difference"], eager["milliseconds"] > 0) == (0, True)
    assert failed == {"way": "torch.compile, OpenVINO", "tokens": 3, "error": "IndexError: list index out of range"}
    assert ours["milliseconds"] > 0
    assert ours["difference"] < 1e-4  # sums run in another order
