"""The bench that judges one draft again and again writes what it promises, and counts right."""

import json
from pathlib import Path

import pytest
from bench_modules import bench


def test_judged_twice(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = bench("verdict")
    judge, judged = module.evaluate, []
    # Once for real: a judgement takes seconds.
    monkeypatch.setattr(
        module, "evaluate", lambda *asked: judged.append(judged[0] if judged else judge(*asked)) or judged[0]
    )
    module.main(run=tiny_run, times=2, out=tmp_path / "verdict.json")
    assert len(judged) == 2
    found = json.loads((tmp_path / "verdict.json").read_text())
    assert len(found["rows"]) == found["summary"]["judgements"] == 2
    assert sum(found["summary"]["outcomes"].values()) == 2
    assert found["summary"]["predicted_over_timed"] == 2 * [
        found["rows"][0]["predicted"] / found["rows"][0]["speed_up"]
    ]
    assert {"prompt-lookup", "lookup+draft"} <= set(found["rows"][0]["ways"])


def test_spread_and_coverage_by_hand() -> None:
    rows = [
        {
            "outcome": "pays_off",
            "speed_up": speed,
            "speed_up_ci": ends,
            "target_step_seconds": 0.01,
            "c": 0.1,
            "v": {3: 1.2},
            "gamma": 4,
            "run": "draft",
        }
        for speed, ends in ((1.4, (1.3, 1.45)), (1.6, (1.55, 1.7)), (1.5, (1.4, 1.6)))
    ]
    found = bench("verdict").summary(rows)
    assert (found["mean"], found["inside"], found["runs"]) == (pytest.approx(1.5), 1, {"draft": 3})
    assert found["spread"]["speed_up"] == pytest.approx(0.1 / 1.5)
    assert found["half_width"] == pytest.approx((0.075 + 0.075 + 0.1) / 3 / 1.5)
