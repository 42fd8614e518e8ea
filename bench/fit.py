"""Does the shape that `understudy sweep --fit` finds beat the one chosen by hand? Both train equally long, with several seeds.

    python bench/fit.py configs/demo.yaml student.layers='[[0],[0,-1]]' student.head_tokens='[null,"1k"]' --out bench/results/fit_demo_cpu.json

The first value of each key is the shape chosen by hand; the grid is all combinations. The search has `--minutes`, each training after it
`--train-minutes` of the search's step time. `understudy compare` predicts the speed-ups of a seed's two drafts from replay of the same held-out
prompts and from step times taken in turn; its interval is paired by prompt. `ratio` is found / by hand - 1, with a t-interval over the seeds.
The same command resumes. `--no-judge` leaves the comparison, which wants an idle machine, for the next call.
"""

from distill.faults import run_script

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from scipy import stats

from data.files import write_bytes
from distill.commands.sweep.plan import Trial, assignment
from distill.commands.sweep.sweep import share_stores
from distill.config.layout import CONFIG, VERDICT
from distill.config.load import load_config
from distill.run.provenance import describe_run
from result_file import write_result
from speculative.errors import UserError

PROGRAM = Path(sys.executable).with_name("understudy")


def searched(base: str, grid: dict[str, list[Any]], minutes: float, folder: Path) -> dict[str, Any]:
    """sweep.json of the search, run or continued."""
    file = folder / "shapes.yaml"
    tree = {
        "base": base,
        "name": folder.name,
        "grid": grid,
        "metric": "speed_up",
        "overrides": {"output": str(folder.parent), "judge.load": []},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(file, yaml.safe_dump(tree).encode())
    subprocess.run([PROGRAM, "sweep", str(file), "--fit", str(minutes)], check=True)
    found: dict[str, Any] = json.loads(
        (folder.parent / f"{folder.name}-fit" / "sweep.json").read_text(encoding="utf-8")
    )
    return found


def trained(
    base: str, shapes: dict[str, dict[str, Any]], steps: dict[str, int], seed: int, folder: Path
) -> dict[str, Path]:
    """The runs of a seed, trained or continued: by shape name, their folders."""
    trials: list[Trial] = []
    for which, values in shapes.items():
        more = {
            "train.steps": steps[which],
            "judge.every": steps[which],
            "judge.live": "never",
            "judge.load": [],
            "seed": seed,
            "output": str(folder),
        }
        words = tuple(assignment(key, value) for key, value in {**values, **more, "name": f"{which}-{seed}"}.items())
        trial = Trial(values, words, load_config(base, words))
        if (trial.config.folder / VERDICT).exists():
            if load_config(trial.config.folder / CONFIG).train.steps != steps[which]:
                raise UserError(f"{trial.config.folder}: was trained for another number of steps; give another --to")
        else:
            share_stores(trial, trials)
            subprocess.run([PROGRAM, "train", base, *words], check=True)
        trials.append(trial)
    return dict(zip(shapes, (trial.config.folder for trial in trials), strict=True))


def compared(runs: dict[str, Path], out: Path) -> dict[str, Any]:
    """Speed-ups of a seed's two drafts, the one by hand first."""
    subprocess.run([PROGRAM, "compare", *map(str, runs.values()), "--out", str(out)], check=True)
    found = json.loads(out.read_text(encoding="utf-8"))
    keys = ("best_gamma", "best_speed_up", "cost_ratio", "parameters")
    ways = {which: {key: way[key] for key in keys} for which, way in zip(runs, found["ways"], strict=True)}
    alphas = {
        which: row["alpha"]
        for which, row in zip(runs, (one for one in found["measured"] if one["text"] == "held-out"), strict=True)
    }
    gain = next(one for one in found["differences"] if one["text"] == "held-out")
    hand, other = (ways[which]["best_speed_up"] for which in runs)
    return {
        "ways": ways,
        "alpha": alphas,
        "alpha_gain": gain["alpha"],
        "speed_up_gain": gain["speed_up"],
        "ratio": other / hand - 1,
    }


def main(
    base: Annotated[str, typer.Argument(help="config with the shape chosen by hand")],
    grid: Annotated[list[str], typer.Argument(help="key=[values], the one chosen by hand first")],
    minutes: Annotated[float, typer.Option(help="of training in the search")] = 16.0,
    train_minutes: Annotated[float, typer.Option(help="of each training after it")] = 2.0,
    seeds: Annotated[str, typer.Option(help="of the trainings")] = "0,1,2",
    folder: Annotated[Path, typer.Option("--to", help="folder of the runs")] = Path("runs/fit"),
    judge: Annotated[bool, typer.Option(help="compare the drafts, and write the result")] = True,
    out: Annotated[Path, typer.Option(help="JSON")] = Path("bench/results/fit_cpu.json"),
) -> None:
    """Search, train both shapes with each seed, compare."""
    keys = {key: yaml.safe_load(text) for key, _, text in (word.partition("=") for word in grid)}
    search = searched(base, keys, minutes, folder)
    judged = [row for row in search["rows"] if row["measured"]]
    if not judged:
        raise UserError(f"{folder}: no shape of the search was trained to its verdict: {search['failed']}")
    best = max(judged, key=lambda row: fastest(row["measured"]))
    shapes = {"by_hand": {key: values[0] for key, values in keys.items()}, "found": best["values"]}
    if shapes["by_hand"] == shapes["found"]:
        raise UserError(f"{base}: the search found the shape chosen by hand, so there is nothing to compare")
    seconds = {
        json.dumps(row["values"], sort_keys=True): search["fit"]["step_seconds"][row["name"]]
        for row in search["fit"]["rungs"][0]
    }
    times = {which: seconds[json.dumps(values, sort_keys=True)] for which, values in shapes.items()}
    steps = {which: int(60 * train_minutes / time) for which, time in times.items()}
    runs = [trained(base, shapes, steps, int(seed), folder) for seed in seeds.split(",")]
    if not judge:
        return
    rows = [compared(one, folder / f"compare-{number}.json") for number, one in enumerate(runs)]
    ratios = [row["ratio"] for row in rows]
    half = (
        stats.t.ppf(0.975, len(ratios) - 1) * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
    )
    ratio = {"mean": statistics.fmean(ratios), "half_width": half}
    result = {
        "machine": describe_run(0) | {"argv": None}, "grid": keys, "minutes": minutes, "train_minutes": train_minutes, "shapes": shapes,
        "step_seconds": times, "steps": steps, "rungs": search["fit"]["rungs"], "ratio": ratio, "seeds": rows,
    }  # fmt: skip
    write_result(out, result)


def fastest(measured: list[dict[str, Any]]) -> float:
    """The draft's speed-up in a verdict's rows of one shape."""
    return max(
        row["speed_up"] for row in measured if row["way"] == "draft" and row.get("speed_up") and row["concurrency"] == 1
    )


if __name__ == "__main__":
    run_script(main)
