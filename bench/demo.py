"""Run and time `understudy demo` from nothing, store its verdict as JSON, and update README's demo block and the pictures of docs/.

The run's folder must not exist yet.

    python bench/demo.py                        # writes bench/results/demo_cpu.json, README.md, docs/*.png
    python bench/demo.py --no-readme configs/demo.yaml output=runs/again      # JSON only, with any override
"""

from distill.faults import run_script

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from data.files import write_bytes
from distill.config.load import load_config
from distill.report.measured import ways_tables
from distill.run.provenance import describe_run
from distill.run.verdict_record import Verdict, load_verdict
from pictures import draw_pictures
from result_file import write_result
from speculative.measure.measured import UNDISTILLED


def block_of(verdict: Verdict, seconds: float, cores: str, command: str = "make demo", brief: bool = False) -> str:
    """The table of ways, the verdict's headline, and where they come from; a brief one without its caption and the undistilled draft."""
    minutes = f"{seconds // 60:.0f} minutes {seconds % 60:.0f} seconds"
    table = ways_tables(verdict)[0]
    source = f"*`{command}`, {cores}, {minutes}; {table.title}.*"
    text = table.markdown(titled=False)
    if brief:
        lines = text.replace(table.caption, "").rstrip().splitlines()
        text = "\n".join(line for line in lines if not line.startswith(f"| {UNDISTILLED} "))
    return f"{text}\n\n**{verdict.headline}**\n{source}"


def put_into(readme: str, block: str, name: str = "demo") -> str:
    """README with the block between its two marks, `<!-- NAME -->` and `<!-- end of NAME -->`."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = readme.split(begin)
    return f"{before}{begin}\n{block}\n{end}{rest.split(end)[1]}"


def main(
    config: Annotated[str, typer.Argument(help="the demo's config")] = "configs/demo.yaml",
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value")] = None,
    out: Annotated[Path, typer.Option(help="JSON")] = Path("bench/results/demo_cpu.json"),
    readme: Annotated[bool, typer.Option(help="write README's block and the pictures too")] = True,
) -> None:
    """Run the demo and store the results."""
    loaded = load_config(config, overrides or [])
    if loaded.folder.exists():
        raise typer.BadParameter(f"{loaded.folder} is there already; remove it, the minutes are those of a whole run")
    program = Path(sys.executable).with_name("understudy")
    began = time.perf_counter()
    subprocess.run([program, "demo", config, *(overrides or [])], check=True)
    seconds = time.perf_counter() - began
    verdict, machine = load_verdict(loaded.folder), describe_run(loaded.seed)
    cores = f"{torch.get_num_threads()} CPU cores, torch {machine['versions']['torch']}"
    write_result(out, {"machine": machine, "cores": cores, "seconds": seconds, "verdict": verdict.record()})
    if readme:
        page = Path("README.md")
        write_bytes(page, put_into(page.read_text(encoding="utf-8"), block_of(verdict, seconds, cores)).encode())
        draw_pictures(out)


if __name__ == "__main__":
    run_script(main)
