"""A row of the board in docs/studies.md from a finished run.

    understudy train configs/board/sgd.yaml && python bench/yardstick.py runs/sgd
    python bench/yardstick.py bench/results/demo_cpu.json            # from what bench/demo.py stored

alpha is replayed on the held-out text, the speed-up is the draft's over the target alone at one request. Minutes are those of all
stages, from the first response to the verdict, on the machine that the row names. A commit with + had changes that are not in it.
"""

from distill.faults import run_script

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from distill.config.layout import BEST_LINK, PROVENANCE
from distill.run.verdict_record import Verdict, load_verdict
from speculative.errors import UserError
from speculative.measure.intervals import interval
from speculative.measure.measured import DRAFT

COLUMNS = ("config", "alpha", "tau (gamma)", "speed-up", "minutes", "machine", "commit")


def row_of(verdict: Verdict, origin: dict[str, Any], minutes: float | None = None) -> str:
    """The row. origin: as `describe_run` gives it. minutes: of the whole command; by default the sum of the verdict's stages."""
    rows = [row for row in verdict.measured if row.way == DRAFT and row.concurrency == 1 and row.speed_up is not None]
    if not rows:
        raise UserError("the verdict timed no draft: train with judge.live: checkpoint or end")
    draft, words = rows[0], origin["argv"][1:] or ["configs/demo.yaml"]  # the default of bench/demo.py
    stages = sum(seconds for stage, seconds in verdict.seconds.items() if "/" not in stage)
    cells = (
        " ".join(words),
        f"{draft.alpha:.3f} {interval(draft.alpha_ci)}",
        f"{draft.tau:.2f} ({draft.gamma})",
        f"{draft.speed_up:.2f}x {interval(draft.speed_up_ci, '.2f')}",
        f"{stages / 60 if minutes is None else minutes:.0f}",
        f"cpu, threads {origin['threads']}" if origin["device"] == "cpu" else origin["device"],
        origin["commit"][:8] + ("+" if origin["uncommitted_changes"] else "") if origin["commit"] else "unknown",
    )
    return f"| {' | '.join(cells)} |"


def main(
    run: Annotated[Path, typer.Argument(help="finished run, or a JSON of bench/demo.py")],
) -> None:
    """Print the row, below the head of its table."""
    if run.is_file():
        stored = json.loads(run.read_text(encoding="utf-8"))
        row = row_of(Verdict.model_validate(stored["verdict"]), stored["machine"], stored["seconds"] / 60)
    else:
        verdict = load_verdict(run)
        row = row_of(verdict, json.loads((run / BEST_LINK / PROVENANCE).read_text(encoding="utf-8")))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n{row}")


if __name__ == "__main__":
    run_script(main)
