"""The gateway's load test runs small, and says what it promises."""

import json
from pathlib import Path

from bench_modules import bench


def test_the_load_test_loses_nothing_and_writes_what_it_promises(tmp_path: Path) -> None:
    out = tmp_path / "gateway.json"
    bench("gateway").main(out=out, streams=6, rounds=1, seconds=0.3, pace=0.01, events=8, text=True, stub=False)
    found = json.loads(out.read_text())
    assert {"median_added_ms", "p99_added_ms", "streams", "lost", "errors"} <= set(found)
    assert (found["streams"], found["lost"], found["doubled"], found["errors"]) == (6, 0, 0, 0)
    assert found["records"] == found["responses"] >= 6
    assert found["records_without_counts"] == 0
