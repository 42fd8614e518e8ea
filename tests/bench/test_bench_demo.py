"""README's demo block is the stored result of the demo, figure by figure."""

import json
from pathlib import Path

from bench_modules import bench

from distill.run.verdict_record import Verdict

ROOT = Path(__file__).parents[2]


def test_readme_shows_the_stored_result() -> None:
    module = bench("demo")
    stored = json.loads((ROOT / "bench/results/demo_cpu.json").read_text())
    readme = (ROOT / "README.md").read_text()
    block = module.block_of(Verdict.model_validate(stored["verdict"]), stored["seconds"], stored["cores"])
    assert module.put_into(readme, block) == readme
