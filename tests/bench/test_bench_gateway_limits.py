"""The trials of the gateway's limits run one by one, and say what held."""

import json
from pathlib import Path

import pytest
import typer
from bench_modules import bench


def test_a_trial_writes_its_command_first_and_what_held(tmp_path: Path) -> None:
    out = tmp_path / "limits.json"
    with pytest.raises(typer.Exit) as ended:
        bench("gateway_limits").main(out=out, connections=10, clients=3, bodies=2, only="killed")
    found = json.loads(out.read_text())
    assert next(iter(found)) == "command"
    (trial,) = found["trials"]
    assert (ended.value.exit_code, found["holds"], trial["holds"], trial["lost"]) == (0, True, True, 0)
    assert 0 < trial["peak_mib"] == found["peak_mib"]
