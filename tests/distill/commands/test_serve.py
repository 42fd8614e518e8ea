"""`understudy serve` with a program in the engine's place: its words, when it answers, how it dies, and that nothing of it stays."""

import json
import os
import shlex
import signal
import socket
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import forked, free_port, until

from distill.commands import serve as module
from distill.commands.options import ServeOptions
from distill.commands.serve import engine_words, serve
from distill.config.layout import SERVING_FORMAT
from distill.faults import INTERRUPTED, MISTAKE, exit_status
from speculative.errors import UserError

# It has a child of its own, like the real one, and says its words when asked.
ENGINE = """#!{python}
import http.server, json, os, signal, subprocess, sys, time
mood = os.environ.get("MOOD", "")
print("loading", flush=True)
if mood == "dies":
    print("ValueError: no such model", flush=True); sys.exit(3)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN if mood == "deaf" else lambda *_: (print("leaving", flush=True), os._exit(0)))
child = subprocess.Popen(["sleep", "60"])
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        self.send_response(503 if mood == "slow" else 200); self.end_headers()
        self.wfile.write(json.dumps(sys.argv[1:]).encode())
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
COMMAND = 'vllm serve "$TARGET" --speculative-config \'{"model":"\'"$DRAFT"\'","num_speculative_tokens":3,"parallel_drafting":true}\' --max-model-len 64'


def write_export(folder: Path, **record: Any) -> Path:
    directory = folder / "my run" / "export"
    directory.mkdir(parents=True)
    engine = {"ok": True, "reasons": [], "command": COMMAND} | record
    tree = {"format": SERVING_FORMAT, "target": {"name": "some/target"}, "engines": {"vLLM": engine}}
    (directory / "serving.json").write_text(json.dumps(tree))
    (directory.parent / "config.yaml").write_text("name: my run")
    return directory


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServeOptions:
    """A run with an export, and a program called vllm."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(ENGINE.replace("{python}", sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    return ServeOptions(run=write_export(tmp_path).parent, port=free_port())


def start(options: ServeOptions, out: Path) -> None:
    """`serve` as the program runs it, in a process of its own."""
    sys.stdout = sys.stderr = out.open("w")
    try:
        status = serve(options)
    except Exception as error:
        status = exit_status(error)
    sys.stdout.flush()
    os._exit(status)


def test_the_command_is_that_of_the_export(tmp_path: Path, options: ServeOptions) -> None:
    directory = options.run / "export"
    serving = json.loads((directory / "serving.json").read_text())
    name, words = engine_words(replace(options, words=["--dtype", "float32"]), directory, serving)
    config = {"model": str(directory), "num_speculative_tokens": 3, "parallel_drafting": True}
    end = ["--max-model-len", "64", "--host", "127.0.0.1", "--port", str(options.port)]
    assert (name, words[1:3]) == ("vLLM", ["serve", "some/target"])
    assert (words[3], json.loads(words[4])) == ("--speculative-config", config)
    assert words[5:] == [*end, "--dtype", "float32"]
    alone = engine_words(replace(options, alone=True), directory, serving)[1]
    assert alone[2:] == ["some/target", *end]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_waits_tells_and_passes_a_signal_on(tmp_path: Path, options: ServeOptions, number: signal.Signals) -> None:
    out = tmp_path / "out"
    with forked(start, options, out) as child:
        until(lambda: "answers" in out.read_text() if out.exists() else False)
        engine = psutil.Process(child.pid).children(recursive=True)
        assert len(engine) == 2
        with urllib.request.urlopen(f"http://127.0.0.1:{options.port}/health", timeout=5) as reply:
            assert json.load(reply)[0] == "serve"
        os.kill(child.pid, number)
        child.join(20)
        assert child.exitcode == 0
    assert not psutil.wait_procs(engine, timeout=5)[1]
    told = out.read_text()
    assert f"vLLM answers at http://127.0.0.1:{options.port} after" in told
    body = shlex.split(next(line for line in told.splitlines() if "curl" in line))[-1]
    assert json.loads(body)["model"] == "some/target"
    assert f"understudy readback http://127.0.0.1:{options.port} --run '{options.run}'" in told
    assert "leaving" in (options.run / "vllm.log").read_text()


def test_an_engine_that_does_not_listen_is_killed(
    tmp_path: Path, options: ServeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOOD", "deaf")
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    with forked(start, options, tmp_path / "out") as child:
        until(lambda: len(psutil.Process(child.pid).children(recursive=True)) == 2)
        engine = psutil.Process(child.pid).children(recursive=True)
        os.kill(child.pid, signal.SIGTERM)
        child.join(20)
    assert not psutil.wait_procs(engine, timeout=5)[1]


def test_when_we_are_killed_the_engine_ends(tmp_path: Path, options: ServeOptions) -> None:
    out = tmp_path / "out"
    with forked(start, options, out) as child:
        until(lambda: "answers" in out.read_text() if out.exists() else False)
        (engine,) = psutil.Process(child.pid).children()
        child.kill()
        child.join(20)
    assert not psutil.wait_procs([engine], timeout=5)[1]
    for left in psutil.Process().children():  # what the engine itself would have ended
        left.kill()


def test_ended_while_it_starts(tmp_path: Path, options: ServeOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOOD", "slow")
    out = tmp_path / "out"
    with forked(start, options, out) as child:
        until(lambda: len(psutil.Process(child.pid).children(recursive=True)) == 2)
        os.kill(child.pid, signal.SIGINT)
        child.join(20)
        assert child.exitcode == INTERRUPTED
    assert "still starting" in out.read_text()


def test_a_signal_whose_exception_is_lost_ends_it_all_the_same(
    tmp_path: Path, options: ServeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, lost = tmp_path / "out", tmp_path / "lost"

    def deaf_once(host: str, port: int) -> bool:
        try:
            time.sleep(0.1)
        except module._Ended:
            if lost.exists():
                raise
            lost.touch()
        return False

    monkeypatch.setattr(module, "_healthy", deaf_once)
    monkeypatch.setattr(module, "POLL_SECONDS", 0)
    with forked(start, options, out) as child:
        until(lambda: len(psutil.Process(child.pid).children(recursive=True)) == 2)
        os.kill(child.pid, signal.SIGTERM)
        child.join(20)
        assert (child.exitcode, lost.exists()) == (INTERRUPTED, True)


def test_an_engine_that_dies_leaves_its_last_lines(
    options: ServeOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOOD", "dies")
    with pytest.raises(UserError, match="vLLM ended by itself with exit status 3") as failed:
        serve(options)
    assert exit_status(failed.value) == MISTAKE
    assert "ValueError: no such model" in capsys.readouterr().err


def test_what_is_refused(tmp_path: Path, options: ServeOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", options.port)), pytest.raises(UserError, match=f"--port {options.port}"):
        serve(options)
    with pytest.raises(UserError, match=r"--engine ollama.*known: vllm"):
        serve(replace(options, engine="ollama"))
    with pytest.raises(UserError, match="neither a run's folder nor an exported directory"):
        serve(replace(options, run=tmp_path))
    other = write_export(tmp_path / "a", ok=False, reasons=["4 draft rows and 5 target rows"])
    with pytest.raises(UserError, match="vLLM does not take this pair: 4 draft rows"):
        serve(replace(options, run=other))
    other = write_export(tmp_path / "b", command="vllm-serve; rm -rf /")
    with pytest.raises(UserError, match="export again"):
        serve(replace(options, run=other))
    (other / "serving.json").write_text("[]")
    with pytest.raises(UserError, match=r"serving\.json: cannot be read"):
        serve(replace(options, run=other))
    (other / "serving.json").unlink()
    with pytest.raises(UserError, match=r"understudy export .*my run"):
        serve(replace(options, run=other.parent))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(module, "BUILT", Path("/nowhere"))
    with pytest.raises(UserError, match=r"vLLM is not installed.*make engines"):
        serve(options)
