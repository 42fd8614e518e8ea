"""An engine as a user starts it, by `understudy serve`."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from processes import free_port

from data.responses.engine_http import answers

ROOT = Path(__file__).resolve().parents[2]
# Of llama.cpp. Its threads wait for each other in a loop: on a busy machine two of them take a hundred times as long as one.
LLAMA_EXACT = ["--weights", "f32", "--draft-weights", "f32"]
LLAMA_ALONE = ["-t", "1", "-tb", "1", "-td", "1", "-tbd", "1", "--kv-unified-per-slot", "384"]


def built(environment: str, seconds: int = 340) -> list[pytest.MarkDecorator]:
    """The marks of tests of an engine that `make engines` builds, beside `engine`: tests/conftest.py looks for that one in their text."""
    reason = f"no {environment}: `make engines` builds it"
    missing = pytest.mark.skipif(not (ROOT / environment / "ready").exists(), reason=reason)
    return [pytest.mark.timeout(seconds), missing]


@dataclass(frozen=True)
class Server:
    """A running engine; `log`: what it printed."""

    url: str
    log: Path


@contextlib.contextmanager
def serving(run: Path, words: Sequence[str], name: str, environment: Mapping[str, str]) -> Iterator[Server]:
    """The engine under `understudy serve`; it and its children are gone at the end. words: options. name: as it is told."""
    port, key = free_port(), words[words.index("--engine") + 1] if "--engine" in words else "vllm"
    log = run / f"{key}{'-alone' if '--alone' in words else ''}.log"
    command = [sys.executable, "-P", "-m", "distill.cli", "serve", str(run), "--port", str(port), *words]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        told = process.stdout.readline()
        assert told.startswith(f"{name} answers at"), log.read_text() if log.exists() else told
        engine = psutil.Process(process.pid).children(recursive=True)
        yield Server(f"http://127.0.0.1:{port}", log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert not psutil.wait_procs(engine, timeout=5)[1]
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def raw_vllm(target: Path, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[Server]:
    """vLLM by its own command, with whatever drafter ``words`` say; it and its children are gone at the end."""
    port = free_port()
    command = [
        ROOT / ".venv-vllm" / "bin" / "vllm",
        "serve",
        target,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *words,
    ]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=log.parent, env=os.environ | environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        while not answers(f"http://127.0.0.1:{port}"):
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.5)
        yield Server(f"http://127.0.0.1:{port}", log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
