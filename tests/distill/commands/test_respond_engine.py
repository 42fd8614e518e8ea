"""`understudy respond --engine`, with a program in vLLM's place: what it is started with, what it answers, and that nothing of it stays."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from model_server import MODEL
from processes import forked, until
from tiny_training import forget_accelerators, small_config, tiny_tokenizer

from data.responses.store import Store
from distill.config.layout import HELDOUT, RESPONSES, TRAINING
from distill.config.target import TargetConfig
from distill.engines.protocol import process
from distill.engines.vllm import _answering
from distill.faults import INTERRUPTED, MISTAKE
from distill.respond import main

# As the tiny model's server, with a child of its own. MOOD: it dies at once, or never answers a request for a text.
ENGINE = """#!/bin/sh
'''exec' {python} "$0" "$@"
' '''
import json, os, subprocess, sys, time
from http.server import ThreadingHTTPServer
sys.path[:0] = {paths}
print(json.dumps([sys.argv[1:], os.environ["VLLM_CPU_OMP_THREADS_BIND"]]), flush=True)
mood, port = os.environ.get("MOOD", ""), int(sys.argv[sys.argv.index("--port") + 1])
if mood == "dies" and not os.environ["VLLM_CPU_OMP_THREADS_BIND"].startswith("0"):
    print("ValueError: no such model", flush=True); sys.exit(3)
child = subprocess.Popen(["sleep", "60"])
from model_server import Behaviour, Handler
class Bound(Handler):
    behaviour = Behaviour()
    def do_POST(self):
        if mood == "hangs":
            print("asked", flush=True); time.sleep(600)
        super().do_POST()
ThreadingHTTPServer(("127.0.0.1", port), Bound).serve_forever()
"""
SERVING = {"max_tokens": 6, "temperature": 0.8, "top_k": 20, "shard_size": 4, "batch_size": 4}


@pytest.fixture
def config_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, and a program called vllm that serves its target, on a machine of two cores."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    text = ENGINE.replace("{python}", shlex.quote(sys.executable)).replace("{paths}", repr(sys.path))
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(process, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    MODEL.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    data = {"heldout_count": 3, "context_length": 96}
    return small_config(tmp_path, 15, data=data, serving=SERVING, judge={"prompts": 3})


def respond(*words: str | Path) -> int:
    forget_accelerators()
    return main([str(word) for word in words])


def start(config: Path, out: Path) -> None:
    """The command in a process of its own."""
    sys.stdout = sys.stderr = out.open("w")
    status = respond(config, "--engine", "vllm", "--replicas", "2")
    sys.stdout.flush()
    os._exit(status)


def logs(run: Path) -> list[str]:
    return [path.read_text() if path.exists() else "" for path in (run / "vllm-0.log", run / "vllm-1.log")]


def test_replicas_share_the_cores_answer_and_end(config_path: Path, tmp_path: Path) -> None:
    run, before = tmp_path / "small", {*psutil.Process().children(recursive=True)}
    assert respond(config_path, "--engine", "vllm", "--replicas", "2", "--", "--enforce-eager") == 0
    assert not psutil.wait_procs({*psutil.Process().children(recursive=True)} - before, timeout=5)[1]
    assert respond(config_path, "name=local") == 0
    for name in (TRAINING, HELDOUT):
        served, local = (Store(folder / RESPONSES / name).read() for folder in (run, tmp_path / "local"))
        assert [row.prompt_id for row in served] == [row.prompt_id for row in local]
    words, cores = zip(*(json.loads(log.splitlines()[0]) for log in logs(run)), strict=True)
    assert cores == ("0", "1")
    assert words[0][:4] == ["serve", str(tmp_path / "target"), "--dtype", "float32"]
    assert words[0][words[0].index("--logprobs-mode") + 1] == "processed_logprobs"
    assert words[0][words[0].index("--max-model-len") + 1] == "96"
    assert words[0][-1] == "--enforce-eager"
    assert "endpoint: null" in (run / "config.yaml").read_text(), "later commands look for no server"
    for log in ("vllm-0.log", "vllm-1.log"):
        (run / log).unlink()
    assert respond(config_path, "--engine", "vllm", "--replicas", "2") == 0
    assert logs(run) == ["", ""], "no answer is missing, so none is started"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all_replicas(
    config_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("MOOD", "hangs")
    out = tmp_path / "out"
    with forked(start, config_path, out) as child:
        until(lambda: any("asked" in log for log in logs(tmp_path / "small")), 200)
        engines = psutil.Process(child.pid).children()
        helpers = [helper for engine in engines for helper in engine.children()]
        assert (len(engines), len(helpers)) == (2, 2)
        os.kill(child.pid, number)
        child.join(20)
        if number != signal.SIGKILL:
            assert child.exitcode == INTERRUPTED
            assert "give the same command again to continue" in out.read_text()
            engines += helpers
    assert not psutil.wait_procs(engines, timeout=10)[1]
    for left in helpers:  # what a real engine ends itself
        if left.is_running():
            left.kill()


def test_one_replica_that_dies_at_the_start_ends_the_other(
    config_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOOD", "dies")
    before = {*psutil.Process().children(recursive=True)}
    assert respond(config_path, "--engine", "vllm", "--replicas", "2") == MISTAKE
    said = capsys.readouterr().err
    assert "ValueError: no such model" in said
    assert "vLLM exited with status 3" in said
    assert not psutil.wait_procs({*psutil.Process().children(recursive=True)} - before, timeout=5)[1]


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        (lambda patch: None, ["--replicas", "3"], "--replicas 3: this machine has 2 devices or cores; lower it"),
        (lambda patch: None, ["target.endpoint={urls: ['http://a/v1']}"], "leave target.endpoint out"),
        (lambda patch: patch.setenv("PATH", "/nowhere"), [], "vLLM is not installed"),
    ],
)
def test_what_is_refused(
    config_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[pytest.MonkeyPatch], None],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(process, "BUILT", Path("/nowhere"))
    change(monkeypatch)
    assert respond(config_path, *words, "--engine", "vllm") == MISTAKE
    assert said in capsys.readouterr().err


def test_a_replica_on_a_device_takes_the_memory_that_is_free() -> None:
    target = TargetConfig(path="org/model", revision="abc", trust_remote_code=True)
    words, environment = _answering(target, "bfloat16", None, (), 0.85)
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.85"
    assert words[words.index("--revision") + 1] == words[words.index("--tokenizer-revision") + 1] == "abc"
    assert "--trust-remote-code" in words
    assert "--max-model-len" not in words
    assert "--no-enable-chunked-prefill" not in words
    assert environment == {}
    words, environment = _answering(target, "bfloat16", None, (2, 3), 3.5 * 2**30)
    assert words[-1] == "--no-enable-chunked-prefill", "a CPU server ends when it reads a prompt in parts"
    assert environment == {"VLLM_CPU_OMP_THREADS_BIND": "2,3", "VLLM_CPU_KVCACHE_SPACE": "3"}
