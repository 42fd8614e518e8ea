"""Repeat the verdict of one draft on one machine: how much do conclusions and numbers vary?

    python bench/verdict.py runs/demo --times 10 --out bench/results/verdict.json
    python bench/verdict.py runs/demo --times 5 --fresh --out bench/results/verdict_fresh_demo_cpu.json     # each in a process of its own

Each judgement repeats all timings: step costs, best gamma, the timing at one request. The text, the draft and its acceptance
are the same, so all differences come from timing. `inside`: judgements whose interval contains the mean of all; `spread`: standard
deviation of the speed-ups divided by their mean; `half_width`: the half width of the intervals, which also includes the texts' variance;
`predicted_over_timed`: the draft's speed-up by its step times over the timed one.
"""

from distill.faults import run_script

import json
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from distill.commands.evaluate.evaluate import evaluate
from distill.config.layout import CONFIG
from distill.config.load import load_config
from distill.run.provenance import describe_run
from distill.run.result import Result
from result_file import write_result
from speculative.measure.measured import DRAFT, TARGET


def row_of(result: Result) -> dict[str, Any]:
    """Values of one judgement. predicted: the speed-up of the draft at the gamma that was timed, by its step times."""
    verdict, curves = result.verdict, result.curves
    costs, rows = verdict.costs, {row.way: row for row in verdict.measured if row.speed_up is not None}
    speeds = curves.rules[0].ways[DRAFT].predicted_speed_up if curves else None
    return {
        "predicted": speeds[rows[DRAFT].gamma or 0] if speeds else None,
        "outcome": verdict.outcome,
        "run": verdict.to_run(),
        "speed_up": rows[DRAFT].speed_up,
        "speed_up_ci": rows[DRAFT].speed_up_ci,
        "gamma": rows[DRAFT].gamma,
        "best_gamma_range": verdict.best_gamma_range,
        "target_step_seconds": costs.target_step_seconds if costs else None,
        "c": costs.cost_ratio if costs else None,
        "v": costs.verify_ratio if costs else None,
        "target_tokens_per_second": rows[TARGET].tokens_per_second,
        "ways": {name: [row.speed_up, row.speed_up_ci] for name, row in rows.items() if name not in (DRAFT, TARGET)},
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Variation between the judgements."""
    speeds = [row["speed_up"] for row in rows]
    mean = statistics.fmean(speeds)
    ends = [row["speed_up_ci"] for row in rows if row["speed_up_ci"]]
    spread = {
        name: statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else 0.0
        for name, values in {
            "speed_up": speeds,
            "target_step_seconds": [row["target_step_seconds"] for row in rows],
            "c": [row["c"] for row in rows],
            **{f"v({gamma})": [row["v"][gamma] for row in rows] for gamma in rows[0]["v"]},
        }.items()
    }
    return {
        "judgements": len(rows),
        "outcomes": dict(Counter(row["outcome"] for row in rows)),
        "runs": dict(Counter(row["run"] for row in rows)),
        "mean": mean,
        "least": min(speeds),
        "most": max(speeds),
        "spread": spread,
        "inside": sum(low <= mean <= high for low, high in ends),
        "half_width": statistics.fmean((high - low) / 2 / mean for low, high in ends) if ends else None,
        "predicted_over_timed": [row["predicted"] / row["speed_up"] for row in rows if row.get("predicted")],
        "gammas": dict(Counter(row["gamma"] for row in rows)),
    }


def _in_new_process(run: Path, out: Path) -> dict[str, Any]:
    """Values of one judgement by a new process."""
    command = [sys.executable, __file__, str(run), "--times", "1", "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    row: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))["rows"][0]
    out.unlink()
    # JSON has no keys that are numbers.
    return row | {"v": {int(gamma): ratio for gamma, ratio in row["v"].items()}}


def main(
    run: Annotated[Path, typer.Argument(help="finished run")],
    times: Annotated[int, typer.Option(help="judgements", min=1)] = 10,
    fresh: Annotated[bool, typer.Option(help="a new process for each judgement")] = False,
    out: Annotated[Path, typer.Option(help="JSON")] = Path("bench/results/verdict.json"),
) -> None:
    """Judge a run's best draft the given number of times."""
    config, console = load_config(run / CONFIG), Console()
    config = config.model_copy(update={"judge": config.judge.model_copy(update={"load": ()})})
    rows: list[dict[str, Any]] = []
    table = Table("outcome", "speed-up", "interval", "gamma", "best gammas", "c", "target step, ms")
    for _ in range(times):
        if fresh:
            rows.append(_in_new_process(run, out.with_suffix(".one.json")))
        else:
            rows.append(row_of(evaluate(config, str(run), config.judge.gamma, config.judge_rule)))
        row = rows[-1]
        ends = "" if row["speed_up_ci"] is None else "[{:.2f}, {:.2f}]".format(*row["speed_up_ci"])
        table.add_row(
            row["outcome"],
            f"{row['speed_up']:.3f}",
            ends,
            str(row["gamma"]),
            str(row["best_gamma_range"] or "none"),
            f"{row['c']:.3f}",
            f"{1e3 * row['target_step_seconds']:.2f}",
        )
        console.print(f"{len(rows)}/{times}: {row['outcome']}, {row['speed_up']:.3f}x {ends}", highlight=False)
        write_result(
            out, {"machine": describe_run(config.seed), "run": str(run), "summary": summary(rows), "rows": rows}
        )
    console.print(table)
    console.print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    run_script(main)
