"""What logged answers give instead of fresh ones: alpha and CPU minutes of the demo, shortened, with three kinds of training text.

    python bench/logged.py --out bench/results/logged_cpu.json

fresh    the target answers all prompts
logged   the same answers from a log of completions, as text: `data.responses: logged`
other    answers that the draft of `fresh` wrote. The product refuses the log; here they are trained on nevertheless

All three have the same prompts, steps, seed and held-out responses. Minutes are CPU time of the processes, each with one thread, so other
load does not matter. `answers` is until the training text is there, `training` the rest.
"""

from distill.faults import run_script

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from data.responses.rendered import StoredPrompts
from data.responses.respond import ResponsePlan, respond
from data.responses.store import Store
from distill.config.layout import LOGGED, PROMPTS, RESPONSES, TRAINING
from distill.config.load import load_config
from distill.models.load import load_model, load_tokenizer
from distill.models.target import Target
from distill.run.checkpoint import load_judgements
from distill.run.prompts import TRAIN_FILE
from distill.run.provenance import describe_run
from distill.run.responses import decode_settings
from result_file import write_result

CONFIG = "configs/demo.yaml"
QUICK = (
    *("judge.live=never", "judge.load=[]", "serving.max_tokens=64", "serving.batch_size=64", "serving.shard_size=128"),
    *("train.mixed_precision=auto", "optim.name=adamw"),
)


class Programs:
    """Starts the product's programs below a folder, each as a process."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.overrides = [f"output={folder}", *QUICK, f"train.steps={steps}", f"judge.every={steps}"]

    def run(self, program: str, name: str, source: dict[str, Any], *more: str) -> tuple[float, str]:
        """(CPU minutes, the last line of stderr) of a program on a source of training prompts."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        words = [CONFIG, *self.overrides, f"name={name}", f"data.train={json.dumps([source])}", *more]
        command = [sys.executable, "-m", program, *words]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return seconds / 60, done.stderr.strip().splitlines()[-1] if done.returncode else ""

    def measure(self, name: str, source: dict[str, Any], *more: str) -> dict[str, Any]:
        """Answers, then training: {minutes, alpha, alpha_ci, tau}."""
        answers, fault = self.run("distill.respond", name, source, *more)
        training, fault = (0.0, fault) if fault else self.run("distill.train", name, source, *more)
        if fault:
            raise SystemExit(fault)
        last = load_judgements(self.folder / name)[-1]
        return {
            "minutes": {"answers": answers, "training": training},
            "alpha": last.alpha,
            "alpha_ci": last.alpha_ci,
            "tau": last.tau,
        }


def write_log(path: Path, rows: Any, texts: dict[str, str], tokenizer: Any, stated: dict[str, Any], eos: Any) -> None:
    """A log of completions: text alone, without the token that ended it."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            ids = row.response_ids[:-1] if row.response_ids[-1] in eos else row.response_ids
            choice = {"index": 0, "text": tokenizer.decode(ids), "finish_reason": "stop" if row.finished else "length"}
            asked = {"model": "served", "prompt": texts[row.prompt_id], **stated}
            file.write(json.dumps({"request": asked, "response": {"choices": [choice]}}) + "\n")


def main(
    out: Annotated[Path, typer.Option(help="JSON")] = Path("bench/results/logged_cpu.json"),
    folder: Annotated[Path, typer.Option(help="where the runs go; must not exist")] = Path("runs/logged"),
    prompts: Annotated[int, typer.Option(help="training prompts")] = 1000,
    steps: Annotated[int, typer.Option(help="optimizer steps of 32 sequences")] = 160,
) -> None:
    """Measure."""
    programs, source = Programs(folder, steps), {"path": "stdlib", "limit": prompts}
    result: dict[str, Any] = {"machine": describe_run(0), "prompts": prompts, "steps": steps, "cells": {}}
    cells = result["cells"]
    cells["fresh"] = programs.measure("fresh", source)
    config = load_config(CONFIG, [*programs.overrides, "name=fresh"])
    target = Target(config.target, torch.device("cpu"), folder / "fresh")
    settings = decode_settings(config.serving, config.seed, target)
    store, stated = Store(folder / "fresh" / RESPONSES / TRAINING), config.serving.sampling.as_dict()
    asked = StoredPrompts(folder / "fresh" / PROMPTS / TRAIN_FILE)
    texts = {prompt.prompt_id: prompt.text for prompt in asked}
    tokenizer, eos = load_tokenizer("embedded"), target.facts.eos_ids

    write_log(folder / "own.jsonl", store.rows(), texts, tokenizer, stated, eos)
    cells["logged"] = programs.measure("logged", {"path": str(folder / "own.jsonl")}, "data.responses=logged")
    log = json.loads((folder / "logged" / RESPONSES / LOGGED).read_text(encoding="utf-8"))
    cells["logged"]["log"] = {name: log[name] for name in ("taken", "left_out", "median_log_probs")}

    others = Store(folder / "other" / RESPONSES / TRAINING)
    others.open(store.manifest())
    writer = load_model("writer", str(folder / "fresh" / "best" / "student"), dtype=torch.float32)
    plan = ResponsePlan(asked, 1, config.serving.shard_size)
    respond(others, plan, writer, settings, batch_size=config.serving.batch_size)
    write_log(folder / "other.jsonl", others.rows(), texts, tokenizer, stated, eos)
    _, refusal = programs.run(
        "distill.respond", "refused", {"path": str(folder / "other.jsonl")}, "data.responses=logged"
    )
    cells["other"] = programs.measure("other", source) | {"refusal": refusal.partition(": the answers")[2]}
    write_result(out, result)


if __name__ == "__main__":
    run_script(main)
