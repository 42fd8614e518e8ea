"""Whole runs, started as a user starts them: trained, killed and continued, exported; under a launcher; with a device map.

`worst_z`: the largest |z| between live decoding and replay, over all checkpoints and the verdict. A run that its time cut goes on
when its part is started again. A model in pieces (`pieces.py`) is put together first.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from distill.commands.training_process import error_line
from distill.config.layout import EXPORT, JUDGEMENT, METRICS, RESPONSES, VERDICT, list_steps, step_folder
from gpu.pieces import join
from gpu.place import ROOT, Place, end_tree, tried

TRAIN, RESPOND, EXPORT_COMMAND = (("-P", "-m", "distill.cli", name) for name in ("train", "respond", "export"))
WORST_Z = 3.0
HEADS = "def count_{}(values):", "class Reader{}:", "import module_{}\n", "# part {}\n", "for number in range({}):"
TINY = (
    "data.heldout=[]",
    "data.heldout_count=8",
    "serving={temperature: 0.7, max_tokens: 8, batch_size: 16, shard_size: 32}",
    "judge.prompts=6",
    "judge.live_prompts=4",
    "judge.speed_prompts=2",
    "judge.speed_seconds=0.1",
    "judge.load=[]",
)
BF16 = ("target.dtype=bfloat16", "train.mixed_precision=bf16", "train.micro_batch_size=null")


def tiny_target(folder: Path) -> list[str]:
    """Overrides of a run of seconds: two layers of the embedded target, and prompts of a line."""
    from distill.models.carving.layers import carve
    from distill.models.load import load_model, load_tokenizer

    model = folder / "target"
    if not model.exists():
        carve(load_model("target", "embedded"), (0, -1)).save_pretrained(model)
        load_tokenizer("embedded").save_pretrained(model)
        rows = [{"prompt": head.format(number)} for number in range(18) for head in HEADS]
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return [f"target.path={model}", f"data.train=[{{path: {folder / 'prompts.jsonl'}}}]", *TINY]


def overrides(place: Place, name: str, steps: int, every: int, *more: str) -> list[str]:
    """Words of a run after its config."""
    place.folder.mkdir(parents=True, exist_ok=True)
    own = tiny_target(place.folder) if place.tiny else []
    sizes = [f"train.steps={4 if place.tiny else steps}", f"judge.every={2 if place.tiny else every}"]
    return ["configs/demo.yaml", f"name={name}", f"output={place.folder}", *own, *BF16, *sizes, *more]


def run(
    place: Place,
    words: Sequence[str],
    until: Callable[[], bool] = lambda: False,
    environment: dict[str, str] | None = None,
) -> str | None:
    """What a program of ours printed; None if it was killed because of `until`.

    Raises TimeoutError: it was stopped because the part's time is over. RuntimeError: its exit status is not 0.
    """
    more = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])} | (environment or {})
    more |= {} if place.cuda else {"ACCELERATE_USE_CPU": "true"}
    log = place.folder / "log.txt"
    with log.open("wb") as out:
        process = psutil.Popen(
            [sys.executable, *words], cwd=ROOT, env={**os.environ, **more}, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        while process.poll() is None and not until() and place.left:
            time.sleep(0.05)
        killed = process.poll() is None
    finally:
        end_tree(process)
    code, printed = process.wait(), log.read_text(encoding="utf-8", errors="replace")
    if killed and not until():
        raise TimeoutError(f"stopped, its time is over: {(printed.strip().splitlines() or [''])[-1]}")
    if not killed and code != 0:
        raise RuntimeError(f"exit status {code}: {error_line(printed, code)}")
    return None if killed else printed


def json_of(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def steps_of(folder: Path) -> list[int]:
    """The optimizer steps that a run recorded, in order of writing."""
    path = folder / METRICS
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return [line["step"] for line in lines if "loss" in line]


def judged(folder: Path) -> dict[str, Any]:
    """The checkpoints' alpha, tau and z, and the verdict of a finished run."""
    verdict = json_of(folder / VERDICT)
    records = [json_of(step_folder(folder, step) / JUDGEMENT) for step in list_steps(folder)]
    checks = [(record.get("live_check") or {}).get("replay") for record in records] + [verdict.get("replay_check")]
    return {
        "outcome": verdict["outcome"],
        "headline": verdict["headline"],
        "facts": verdict["facts"],
        "checkpoints": [{key: record.get(key) for key in ("step", "alpha", "tau")} for record in records],
        "z": [check["z"] for check in checks if check],
        "worst_z": max((abs(check["z"]) for check in checks if check and check["z"] is not None), default=None),
        "runner": (verdict["costs"] or {}).get("steps"),
        "stage_seconds": verdict["seconds"],
    }


def whole(place: Place, words: list[str]) -> Iterator[dict[str, Any]]:
    """A cell for each: killed after its first judged steps, trained to the verdict from there, exported."""
    folder = place.folder / words[1].partition("=")[2]
    if (folder / EXPORT).exists():  # It is wanted again.
        shutil.rmtree(folder)

    def trained_some() -> bool:
        return any(step > 0 for step in list_steps(folder))

    def killed() -> dict[str, Any]:
        if trained_some():
            return {"skipped": "it goes on from an earlier start"}
        if run(place, [*TRAIN, *words], trained_some) is not None:
            raise RuntimeError("it ended before it could be killed")
        return {"checkpoint": max(list_steps(folder))}

    def trained() -> dict[str, Any]:
        saved, began = max(list_steps(folder), default=0), time.monotonic()
        run(place, [*TRAIN, *words])
        found = judged(folder)
        steps = steps_of(folder)
        fused = {"fused": float("fused" in (found["runner"] or ""))} if place.cuda and not place.tiny else {}
        return (
            found
            | fused
            | {
                "seconds": time.monotonic() - began,
                "resumed_from": saved,
                "each_step_once": float(steps == list(range(1, len(steps) + 1))),
                "marks": {"each_step_once": 1.0} | dict.fromkeys(fused, 1.0),
                "limits": {"worst_z": WORST_Z},
            }
        )

    def exported() -> dict[str, Any]:
        run(place, [*EXPORT_COMMAND, str(folder), "--to", str(folder / EXPORT), "--overwrite"])
        return {"files": sorted(path.name for path in (folder / EXPORT).iterdir())}

    yield tried({"stage": "killed"}, killed)
    yield tried({"stage": "trained"}, trained)
    if (folder / VERDICT).exists():
        yield tried({"stage": "exported"}, exported)


def embedded(place: Place) -> Iterator[dict[str, Any]]:
    """The demo in bfloat16."""
    yield from whole(place, overrides(place, "embedded", 400, 200))


def smollm2(place: Place) -> Iterator[dict[str, Any]]:
    """The same prompts, answered by SmolLM2, which is put together from its pieces; four of its layers learn."""
    model = join(place.folder)
    words = overrides(place, "smollm2", 200, 100, f"target.path={model}")
    yield from whole(place, [*words, *([] if place.tiny else ["student.layers=[0, 10, 20, -1]"])])


def ranks(place: Place) -> Iterator[dict[str, Any]]:
    """One rank under DDP and FSDP2, whose library must answer; then a target with a device map, whose store is learned."""
    few = ["data.train.0.limit=128"] if not place.tiny else []
    short = ["judge.live=never", "optim.name=adamw", *few]

    def under(name: str, *launcher: str) -> dict[str, Any]:
        words = overrides(place, name, 10, 10, *short)
        shutil.rmtree(place.folder / name, ignore_errors=True)
        began = time.monotonic()
        printed = run(place, [*launcher, *words], environment={"NCCL_DEBUG": "VERSION"}) or ""
        nccl = re.search(r"NCCL version (\S+)", printed)
        found = {"steps": len(steps_of(place.folder / name)), "seconds": time.monotonic() - began}
        return found | {"backend": f"nccl {nccl[1]}" if nccl else "gloo"}

    def mapped() -> dict[str, Any]:
        words = overrides(place, "mapped", 10, 10, *short, "signal.source=store", "signal.k=16")
        shutil.rmtree(place.folder / "mapped", ignore_errors=True)
        began = time.monotonic()
        run(place, [*RESPOND, *words, "target.device_map=auto", "--signal", "topk"])
        answers = sorted(path.name for path in (place.folder / "mapped" / RESPONSES).iterdir())
        run(place, [*TRAIN, *words, "target.device_map=auto"])
        return {"stores": answers, "steps": len(steps_of(place.folder / "mapped")), "seconds": time.monotonic() - began}

    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", "-m", "distill.train")
    fsdp = (*TRAIN, "--num-processes", "1", "--config-file", "configs/accelerate/fsdp2.yaml")
    yield tried({"launcher": "DDP, 1 rank"}, lambda: under("ddp", *torchrun))
    yield tried({"launcher": "FSDP2, 1 rank"}, lambda: under("fsdp", *fsdp))
    yield tried({"launcher": "device_map"}, mapped)
