"""The contestants as bench/peers.py sees them: our decoder in this process, each other engine in a child of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from peer_workers.worker import Setting, die_with_parent
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.errors import UserError
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY

HOME = Path(__file__).resolve().parent
ROOT = HOME.parents[1]
OURS = "ours"
# Peer: its worker's file, and its folder; without Python in it, the worker runs in the project's own environment.
WORKERS = {
    "OpenVINO GenAI": ("openvino_worker.py", ".venv-openvino"),
    "llama.cpp": ("llamacpp_worker.py", ".venv-llamacpp"),
    "transformers": ("transformers_worker.py", ""),
}


class Contestant(Protocol):
    """The contestant that decodes a cell. Raises UserError if it cannot."""

    def open(self, setting: Setting) -> None: ...
    def decode(self, prompts: list[list[int]]) -> tuple[list[list[int]], float]: ...
    def close(self) -> None: ...


class Ours:
    """Our decoder on models that are loaded already."""

    def __init__(self, target: Any, draft: Any, runner: str) -> None:
        self.target, self.draft, self.runner = target, draft, runner

    def open(self, setting: Setting) -> None:
        torch.set_num_threads(setting.threads)
        self.drafter = None if setting.draft is None else ModelDrafter(self.draft)
        self.batch = setting.batch
        self.settings = DecodeSettings(GREEDY, setting.gamma, Rule.named("greedy"), setting.max_tokens, setting.eos_ids)

    def decode(self, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
        named = [(str(number), ids) for number, ids in enumerate(prompts)]
        began = time.perf_counter()
        responses, _ = decode(
            self.target, self.drafter, named, self.settings, batch_size=self.batch, runner=self.runner
        )
        return [response.response_ids for response in responses], time.perf_counter() - began

    def close(self) -> None:
        self.drafter = None


class Child:
    """A worker's process. It converts the models once, and ends with this process however that ends."""

    def __init__(self, name: str, work: Path, models: dict[str, Path], weights: str, stack: ExitStack) -> None:
        """models: folders of `target` and `draft`. weights: their type in the engine. stack: ends the process.

        Raises UserError: it cannot be had.
        """
        script, environment = WORKERS[name]
        python = ROOT / environment / "bin/python"
        python = python if environment and python.exists() else Path(sys.executable)
        if environment and not (ROOT / environment / "ready").exists():
            raise UserError(f"{name}: no {environment}; `make peers` builds it")
        self.name, self.log = name, work / f"{Path(script).stem}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(python), str(HOME / script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=die_with_parent,
            )
        stack.callback(self.end)
        self.paths = {
            role: self.ask(
                do="convert", model=str(folder), to=str(work / f"{Path(script).stem}-{role}"), weights=weights
            )["path"]
            for role, folder in models.items()
        }

    def ask(self, **asked: Any) -> dict[str, Any]:
        """One line there, one back."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            last = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise UserError(f"{self.name}: its process ended: {' '.join(last)[:300]}")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise UserError(f"{self.name}: {said['error'][:300]}")
        return said

    def open(self, setting: Setting) -> None:
        own = replace(setting, target=self.paths["target"], draft=self.paths["draft"] if setting.draft else None)
        self.ask(do="open", **asdict(own))

    def decode(self, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
        said = self.ask(do="decode", prompts=prompts)
        return said["responses"], said["seconds"]

    def close(self) -> None:
        self.ask(do="close")

    def versions(self) -> dict[str, str]:
        return self.ask(do="versions")

    def end(self) -> None:
        """What it started ends with it."""
        self.process.kill()
        self.process.wait()
