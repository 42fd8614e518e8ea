"""bench/respond_speed.py: what it counts as the rate of several offline processes, with a program in the place of vLLM's Python."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_modules import bench
from tiny_training import small_config

from data.responses.rendered import RenderedPrompt
from distill.config.load import load_config
from speculative.errors import UserError

program = bench("respond_speed")
STUB = """import json, pathlib, sys
asked, out, options = sys.argv[-3:]
if options == "broken":
    sys.exit(3)
asked = json.loads(pathlib.Path(asked).read_text())
pathlib.Path(out + ".ready").touch()
assert sys.stdin.readline() == "begin\\n"
lengths = [len(prompt) for prompt in asked["prompts"]]
pathlib.Path(out).write_text(json.dumps({"tokens": sum(lengths), "seconds": float(len(lengths))}))
"""


@pytest.fixture
def stub(tmp_path: Path) -> str:
    (tmp_path / "stub.py").write_text(STUB)
    # A shell starts it: a line "#!" cannot name an interpreter whose path has a blank.
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec '{sys.executable}' '{tmp_path}/stub.py' \"$@\"\n")
    (tmp_path / "python").chmod(0o755)
    return str(tmp_path / "python")


def data_of(tmp_path: Path) -> Any:
    prompts = [RenderedPrompt(str(length), "code", tuple(range(length))) for length in (1, 2, 3, 4, 5)]
    return SimpleNamespace(
        run=SimpleNamespace(config=load_config(small_config(tmp_path))),
        context=64,
        prompts=SimpleNamespace(train=prompts),
        settings=SimpleNamespace(eos_ids=(2,)),
    )


def test_the_prompts_are_shared_out_and_the_last_process_sets_the_time(tmp_path: Path, stub: str) -> None:
    assert program.offline(data_of(tmp_path), stub, "{}", 2, tmp_path) == {"tokens": 15, "seconds": 3.0}


def test_a_process_that_ends_early_is_reported(tmp_path: Path, stub: str) -> None:
    with pytest.raises(UserError, match="vLLM ended before it answered"):
        program.offline(data_of(tmp_path), stub, "broken", 2, tmp_path)
