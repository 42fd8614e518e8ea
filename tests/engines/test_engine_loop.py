"""The closed loop as a user starts it, in our own decoder and in a real vLLM: minutes each, so no part of `make test`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from loop.family import MARK

from distill.live.rollout.engine import marked

ROOT = Path(__file__).resolve().parents[2]
VLLM = pytest.param(
    "vllm", marks=pytest.mark.skipif(not (ROOT / ".venv-vllm" / "ready").exists(), reason="`make engines` builds vLLM")
)
pytestmark = [pytest.mark.loop, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("engine", ["stub", VLLM])
def test_the_loop_comes_round(tmp_path: Path, engine: str) -> None:
    words = ["--engine", engine, "--to", str(tmp_path / "loop"), "--fast"]
    done = subprocess.run(
        [sys.executable, "bench/closed_loop.py", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "loop" / "loop.json").read_text())
    assert (found["engine"], found["records_lost"], found["records_doubled"]) == (engine, 0, 0)
    assert found["acceptance"]["shifted"] < min(found["acceptance"]["before"], found["acceptance"]["after"])
    assert found["alarm_after_requests"] <= found["alarm_within"]
    assert [kill["what"] for kill in found["kills"]] == ["gateway", "engine", "trainer", "rollout"]
    assert [back["version"] for back in found["rolled_back"]] == ["v0003"]
    assert (tmp_path / "loop" / "loop.png").stat().st_size > 0
    assert not list(marked(MARK, str((tmp_path / "loop").resolve())))
