"""README's demo block is the stored result of the demo, figure by figure."""

import json
from pathlib import Path

from bench_modules import bench

from distill.run.verdict_record import Verdict

ROOT = Path(__file__).parents[2]


def test_readme_shows_the_stored_result() -> None:
    module = bench("demo")
    stored = json.loads((ROOT / "bench/results/demo_cpu.json").read_text())
    verdict = Verdict.model_validate(stored["verdict"])
    assert json.loads(json.dumps(verdict.record())) == stored["verdict"], "a key that no program writes"
    readme = (ROOT / "README.md").read_text()
    block = module.block_of(verdict, stored["seconds"], stored["cores"])
    older = readme.replace(block, "what another run found")
    assert older != readme
    assert module.put_into(older, block) == readme
