"""README's blocks are the stored results of the demo and of SmolLM2, figure by figure."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench_modules import bench

from distill.run.verdict_record import Verdict

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "how"),
    [("demo", {}), ("smollm2", {"command": "bench/smollm2.py --prompts 4000", "brief": True})],
)
def test_readme_shows_the_stored_result(name: str, how: dict[str, Any]) -> None:
    module = bench("demo")
    stored = json.loads((ROOT / f"bench/results/{name}_cpu.json").read_text())
    verdict = Verdict.model_validate(stored["verdict"])
    assert json.loads(json.dumps(verdict.record())) == stored["verdict"], "a key that no program writes"
    readme = (ROOT / "README.md").read_text()
    seconds = stored["seconds"] if name == "demo" else sum(stored["seconds"].values())
    block = module.block_of(verdict, seconds, stored["cores"], **how)
    older = readme.replace(block, "what another run found")
    assert older != readme
    assert module.put_into(older, block, name) == readme
