"""llama.cpp's server for bench/peers.py, as `make peers` builds it.

Its cache is of 16-bit floats, as by default: one of 32 bits is slower, and the texts are the same here.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from worker import Setting, die_with_parent, serve

from distill.engines.llama_cpp import ENVIRONMENT, gguf_of
from distill.engines.protocol.engine import BUILT

SERVER = BUILT / ENVIRONMENT / "bin/llama-server"
START_SECONDS, SLACK = 120.0, 32


class _OnSocket(http.client.HTTPConnection):
    """HTTP over a Unix socket: no port can be taken by another program."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


class LlamaCpp:
    """One server a setting. Its own clock is read at batch 1, so that HTTP costs it nothing there."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[bytes] | None = None
        self.folder = tempfile.TemporaryDirectory()
        self.socket = str(Path(self.folder.name) / "llama.sock")

    def convert(self, model: str, to: str, weights: str) -> str:
        """A GGUF file in the type that llama.cpp has for these weights; it has no fast code for bfloat16 on most processors."""
        return str(gguf_of(model, Path(to), {"float32": "f32", "bfloat16": "f16", "int8": "q8_0"}[weights], SERVER))

    def open(self, setting: Setting) -> None:
        threads, each = str(setting.threads), setting.context + setting.gamma + SLACK
        words = [
            str(SERVER),
            "-m",
            setting.target,
            "--host",
            self.socket,
            "--no-webui",
            "--cache-ram",
            "0",
            "--threads",
            threads,
            "--threads-batch",
            threads,
            "--parallel",
            str(setting.batch),
            "--ctx-size",
            str(setting.batch * (-(-each // 256) * 256)),
        ]
        if setting.draft is not None:
            words += [
                "--model-draft",
                setting.draft,
                "--spec-type",
                "draft-simple",
                "--spec-draft-n-max",
                str(setting.gamma),
                "--spec-draft-threads",
                threads,
                "--spec-draft-threads-batch",
                threads,
            ]
        self.server = subprocess.Popen(words, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
        self.max_tokens = setting.max_tokens
        self._wait(self.server)

    def decode(self, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
        asked: dict[str, Any] = {
            "prompt": prompts[0] if len(prompts) == 1 else prompts,
            "n_predict": self.max_tokens,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
        }
        began = time.perf_counter()
        status, text = self._request("POST", "/completion", json.dumps(asked))
        seconds = time.perf_counter() - began
        if status != 200:
            raise RuntimeError(f"the server answered {status}: {text.decode()[:200]}")
        said = json.loads(text)
        if len(prompts) == 1:
            timings = said["timings"]
            return [said["tokens"]], (timings["prompt_ms"] + timings["predicted_ms"]) / 1e3
        return [one["tokens"] for one in sorted(said, key=lambda one: one["index"])], seconds

    def close(self) -> None:
        if self.server is not None:
            self.server.kill()
            self.server.wait()
            self.server = None
            Path(self.socket).unlink(missing_ok=True)

    def versions(self) -> dict[str, str]:
        said = subprocess.run([str(SERVER), "--version"], capture_output=True, text=True, check=True)
        lines = [line for line in (said.stdout + said.stderr).splitlines() if line.startswith("version")]
        return {"llama.cpp": lines[0].partition(":")[2].strip() if lines else "unknown"}

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        """Status and text, each on a connection of its own: the server closes one that was idle for seconds."""
        connection = _OnSocket(self.socket)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def _wait(self, server: subprocess.Popen[bytes]) -> None:
        """Until it has loaded its models."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and server.poll() is None:
            with contextlib.suppress(OSError):
                if self._request("GET", "/health")[0] == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"llama-server did not start (exit status {server.poll()})")


if __name__ == "__main__":
    serve(LlamaCpp())
