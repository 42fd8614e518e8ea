"""Cost of a store with many responses per rank: resident memory, and seconds from process start to the first batch.

    python bench/scale.py --responses 200000 --out bench/results/scale_cpu.json

A run folder has that many prompts and synthetic responses of 1,000 tokens each. It grows from size to size like a real one:
missing responses are added and existing ones stay. For each size a new process starts as training does (prompts, responses,
batches), with the prompts already rendered, and stops at the first batch. `resident_bytes`: memory added to a process that has
started a run with a few responses, including mapped files; `peak_bytes`: the peak before that; `startup_seconds`: all,
including imports; `reading_seconds`: the part after the imports; `first_start_seconds`: reading, de-duplicating and rendering
the prompts, once per run.
"""

from distill.faults import run_script

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.progress import track

from data.prompts.template import loss_mask
from data.responses.rendered import RenderedPrompt
from data.responses.respond import ResponsePlan
from data.responses.store import Row, Store, StoredRows
from distill.config.layout import RESPONSES, TRAINING
from distill.config.load import parse_config
from distill.config.run import RunConfig
from distill.models.target import Target
from distill.run.prompts import PromptSets, load_prompts
from distill.run.provenance import describe_run
from distill.run.responses import RunData
from distill.run.run import Run, new_accelerator
from distill.training.batches import make_batches
from result_file import write_result
from speculative.engine.memory import peak_bytes

RESPONSE_TOKENS = 1000
SIZES = (10_000, 100_000)  # below the one that is asked for
FEW = 64
CONTEXT = 4096


def config_of(folder: Path) -> RunConfig:
    """The run whose prompts are in `folder / prompts.jsonl`."""
    tree = {
        "name": "run",
        "output": str(folder),
        "serving": {"max_tokens": RESPONSE_TOKENS},
        "train": {"micro_batch_size": 32},
        "data": {"train": [{"path": str(folder / "prompts.jsonl")}], "template": {"mode": "plain"}},
    }
    return parse_config(tree, "bench/scale.py")


def prompts_of(config: RunConfig, target: Target) -> PromptSets:
    """The run's prompts, as training loads them."""
    return load_prompts(config.data, target.tokenizer, CONTEXT, RESPONSE_TOKENS, config.judge.prompts, run=Run(config))


def answer(config: RunConfig, target: Target, prompts: Sequence[RenderedPrompt]) -> None:
    """Synthetic responses to the prompts that have none yet."""
    data, generator = RunData(Run(config), target), np.random.default_rng(len(prompts))
    store, plan = Store(config.folder / RESPONSES / TRAINING), ResponsePlan(prompts, 1, config.serving.shard_size)
    store.open(data.manifest(data.settings))
    for shard, numbers in track(plan.share(store)[0], "responses", console=Console(stderr=True)):
        rows = []
        for prompt, sample in map(plan.job, numbers):
            made = generator.integers(0, target.facts.vocab_rows, RESPONSE_TOKENS, dtype=np.int32)
            ids = np.concatenate([np.array(prompt.prompt_ids, dtype=np.int32), made])
            mask, log_probs = (
                loss_mask(len(prompt.prompt_ids), len(ids)),
                np.full(RESPONSE_TOKENS, -1.0, dtype=np.float32),
            )
            rows.append(Row(prompt.prompt_id, sample, prompt.domain, ids, mask, log_probs, True))  # type: ignore[arg-type]
        store.write_shard(shard, rows)


def first_batch(folder: Path, target: Target) -> StoredRows:
    """Do what training does before its first step."""
    config = config_of(folder)
    run = Run(config)
    sets = prompts_of(config, target)
    data = RunData(run, target)
    data.prompts = sets
    rows = data.training
    batches = make_batches(run, rows.examples)
    batches.micro_batch_size = 32
    window = batches.micro_batches(0)
    assert sum(batch.labels_R.numel() for batch in window) == config.train.batch_size * RESPONSE_TOKENS
    return rows


def start(folder: Path, few: Path) -> dict[str, Any]:
    """Cost of a training start up to its first batch in this fresh process."""
    process, config = psutil.Process(), config_of(folder)
    target = Target(config.target, new_accelerator().device, config.folder)
    imported = time.time()
    first_batch(few, target)  # loads what is loaded at first use
    before, began = process.memory_info().rss, time.time()
    rows = first_batch(folder, target)
    ended, after = time.time(), process.memory_info().rss
    reading = ended - began
    return {
        "responses": len(rows),
        "resident_bytes": after - before,
        "startup_seconds": imported - process.create_time() + reading,
        "reading_seconds": reading,
        "peak_bytes": peak_bytes(target.device) - before,
    }


def grow(folder: Path, responses: int) -> float:
    """Grow the run in a folder to the given number of responses; returns the seconds for its prompts."""
    folder.mkdir(exist_ok=True)
    config = config_of(folder)
    target = Target(config.target, new_accelerator().device, config.folder)
    # Extra prompts for the held-out set.
    held_out = 256 if responses >= 1024 else -(-responses // 4)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(
            f'{{"prompt": "Question {number}: what is {number} + {7 * number}?"}}\n'
            for number in range(responses + held_out)
        )
    began = time.perf_counter()
    prompts = prompts_of(config, target).train
    first = time.perf_counter() - began
    answer(config, target, prompts)
    return first


def main(
    responses: Annotated[int, typer.Option(help="responses of the largest store", min=8)] = 200_000,
    out: Annotated[Path, typer.Option(help="JSON")] = Path("bench/results/scale_cpu.json"),
    folder: Annotated[
        Path | None, typer.Option(help="where the stores may lie, 9 KB a response; default: a temporary one")
    ] = None,
    started: Annotated[Path | None, typer.Option("--start", hidden=True)] = None,
) -> None:
    """Growth of memory and start-up time with the number of responses."""
    if started is not None:
        print(json.dumps(start(started / "many", started / "few")))
        return
    growth: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="scale-", dir=folder) as place:
        grow(Path(place) / "few", FEW)
        for size in sorted({size for size in SIZES if size < responses} | {responses}):
            first = grow(Path(place) / "many", size)
            command = [sys.executable, __file__, "--start", place]
            told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            growth.append(json.loads(told) | {"first_start_seconds": first})
            print(growth[-1], flush=True)
    last = growth[-1]
    result = {
        "machine": describe_run(0),
        "response_tokens": RESPONSE_TOKENS,
        "startup_seconds": last["startup_seconds"],
        "resident_bytes_per_token": last["resident_bytes"] / (last["responses"] * RESPONSE_TOKENS),
        "growth": growth,
    }
    write_result(out, result)


if __name__ == "__main__":
    run_script(main)
