"""`understudy serve` with a program in the engine's place: its words, when it answers, how it dies, and that nothing of it stays."""

import functools
import json
import os
import shlex
import shutil
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
from huggingface_hub.errors import LocalEntryNotFoundError
from processes import forked, free_port, until
from refusals import refused
from safetensors.torch import save_file

from data.responses.engine_http import listening
from distill.commands import serve as module
from distill.commands.options import ServeOptions
from distill.commands.serve import engine_words, read_export, serve, started
from distill.config.layout import SERVING_FORMAT
from distill.engines import llama_cpp
from distill.engines.llama_cpp import gguf_of
from distill.engines.protocol import process
from distill.engines.protocol.facts import EngineFacts
from distill.faults import INTERRUPTED, MISTAKE, exit_status
from distill.models.load import EMBEDDED_FOLDER
from speculative.errors import UserError
from speculative.measure.measured import Measured

# It has a child of its own, like the real one, and says its words when asked.
# The shell starts Python: a first line that names it by a path with a blank does not work.
ENGINE = """#!/bin/sh
'''exec' {python} "$0" "$@"
' '''
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
FACTS = {
    "target": "some/target",
    "draft": "export",
    "gamma": 5,
    "target_rows": 8,
    "draft_rows": 8,
    "first_difference": None,
    "first_difference_from_5": None,
    "target_quantised": False,
    "draft_context": 64,
    "one_pass": [2, 3, {"greedy-draft": 2.0}],
}


def write_export(folder: Path, **facts: Any) -> Path:
    directory = folder / "my run" / "export"
    directory.mkdir(parents=True)
    evil = {"ok": True, "reasons": [], "command": 'vllm serve "$TARGET" --trust-remote-code --middleware evil.mod'}
    tree = {"format": SERVING_FORMAT, "facts": FACTS | facts, "engines": {"vLLM": evil}}
    (directory / "serving.json").write_text(json.dumps(tree))
    text = "{name: mine, target: {path: some/target}, data: {train: [{path: x.jsonl}]}}"
    (directory.parent / "config.yaml").write_text(text)
    return directory


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServeOptions:
    """A run with an export, and a program called vllm."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(ENGINE.replace("{python}", shlex.quote(sys.executable)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(process, "POLL_SECONDS", 0.02)
    return ServeOptions(run=write_export(tmp_path).parent, engine="vllm", port=free_port())


def start(options: ServeOptions, out: Path) -> None:
    """`serve` as the program runs it, in a process of its own."""
    sys.stdout = sys.stderr = out.open("w")
    try:
        status = serve(options)
    except Exception as error:
        status = exit_status(error)
    sys.stdout.flush()
    os._exit(status)


def words_of(options: ServeOptions) -> list[str]:
    directory, facts = read_export(options.run)
    return engine_words(options, directory, facts, module._target(options, directory, facts))[1]


def test_the_command_is_made_from_the_facts_and_not_read(options: ServeOptions) -> None:
    """The stored command, which may be somebody else's, asks for remote code and a module of its own."""
    directory = options.run / "export"
    words = words_of(replace(options, words=["--dtype", "float32"]))
    config = {
        "method": "draft_model",
        "model": str(directory),
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }
    end = ["--max-model-len", "64", "--host", "127.0.0.1", "--port", str(options.port)]
    assert words[1:3] == ["serve", "some/target"]
    assert (words[3], json.loads(words[4])) == ("--speculative-config", config)
    assert words[5:] == [*end, "--dtype", "float32"]
    alone = words_of(replace(options, alone=True))
    assert alone[2:] == ["some/target", *end]


def test_llama_cpp_is_converted_in_our_environment_and_takes_its_own_flags(
    tmp_path: Path, options: ServeOptions
) -> None:
    program = tmp_path / "bin" / "llama-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    directory = write_export(tmp_path / "gguf", sampling={"temperature": 0.7})
    asked = replace(options, run=directory, engine="llama.cpp", words=["--draft-weights", "q4_k_m"])
    words = words_of(asked)
    assert words[:5] == [sys.executable, "-P", "-m", "distill.engines.llama_cpp", "some/target"]
    assert words[5:9] == ["--store", f"{directory}-gguf", "--program", str(program)]
    # It drafts token by token: the gamma of that way.
    draft = ["--draft", str(directory), "--spec-type", "draft-simple", "--spec-draft-n-max", "5"]
    assert words[9:15] == draft
    assert words[15:19] == ["-c", "64", "--temp", "0.7"]
    assert words[-2:] == ["--draft-weights", "q4_k_m"]
    alone = words_of(replace(asked, alone=True))
    assert alone == [word for word in words if word not in draft]


def test_a_target_that_is_a_gguf_file_is_served_as_it_is_by_engines_that_load_one(
    tmp_path: Path, options: ServeOptions
) -> None:
    program = tmp_path / "bin" / "llama-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    file = tmp_path / "target.gguf"
    file.write_bytes(b"GGUF")
    words = words_of(replace(options, engine="llama.cpp", target=str(file)))
    assert words[4] == str(file)
    assert gguf_of(str(file), tmp_path / "store", "auto", program) == file
    assert "vLLM loads no GGUF file" in refused(words_of, replace(options, target=str(file)))


def test_a_gguf_file_that_is_gone_is_made_again_and_a_failed_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def words(model: str, weights: str, to: Path, fails: bool = False) -> list[str]:
        made.append(weights)
        return ["sh", "-c", f"echo x > {shlex.quote(str(to))}; exit {int(fails)}"]

    monkeypatch.setattr(llama_cpp, "_source", lambda: tmp_path)
    monkeypatch.setattr(llama_cpp, "_converter", words)
    monkeypatch.setattr(llama_cpp, "_quantizer", lambda _, base, to, weights: words("", weights, to))
    store = tmp_path / "store"
    file = gguf_of("model", store / "target", "q8_0", tmp_path)
    gguf_of("model", store / "target", "q8_0", tmp_path)
    file.unlink()
    gguf_of("model", store / "target", "q8_0", tmp_path)
    assert made == ["auto", "q8_0", "q8_0"]
    files = sorted(store.iterdir())
    assert [one.name for one in files] == [
        f"target-{kind}.{end}" for kind in ("auto", "q8_0") for end in ("gguf", "json")
    ]
    monkeypatch.setattr(llama_cpp, "_converter", functools.partial(words, fails=True))
    assert "does not convert it to f16" in refused(gguf_of, "model", store / "target", "f16", tmp_path)
    assert sorted(store.iterdir()) == files


def test_a_target_that_the_hub_does_not_deliver_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: str) -> None:
        raise LocalEntryNotFoundError("no network\nat all")

    (tmp_path / "convert_hf_to_gguf.py").touch()
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    monkeypatch.setattr("distill.models.load.load_tokenizer", lambda _: None)
    monkeypatch.setattr("distill.models.files.gguf.pre_tokenizer_name", lambda _: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", gone)
    assert "did not deliver it (no network)" in refused(gguf_of, "some/target", tmp_path / "target", "auto", tmp_path)


def test_an_engine_is_started_at_another_gamma_and_ends_with_the_block(options: ServeOptions) -> None:
    """As `understudy time` starts it: the same words at every load, and nothing is left of it."""
    with started(options, 7, 16, 100) as url:
        with urllib.request.urlopen(url, timeout=5) as reply:
            words = json.loads(reply.read())
        engine = psutil.Process().children(recursive=True)
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config["num_speculative_tokens"] == 7
    assert "num_speculative_tokens_per_batch_size" not in config
    assert words[words.index("--per-request-spec-decode-metrics") + 1] == "detailed"
    assert engine
    assert not psutil.wait_procs(engine, timeout=5)[1]


def test_llama_cpp_gets_room_for_all_requests_and_only_the_draft_proposes(
    options: ServeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[tuple[ServeOptions, EngineFacts]]()

    def words(options: ServeOptions, directory: Path, facts: EngineFacts, target: str) -> tuple[str, list[str]]:
        found.append((options, facts))
        raise UserError("seen")

    monkeypatch.setattr(module, "engine_words", words)
    lookup = Measured("draft + lookup", "greedy", gamma=4, then_gamma=2)
    _, facts = read_export(options.run)
    monkeypatch.setattr(module, "read_export", lambda path: (path, replace(facts, lookup_draft=lookup)))
    for alone in (False, True):
        with (
            pytest.raises(UserError, match="seen"),
            started(replace(options, engine="llama.cpp", alone=alone, words=["-t", "1"]), 3, 16, 100),
        ):
            pass
    for seen, told in found:
        assert seen.words == ["--parallel", "16", "-c", "1600", "-t", "1"]
        assert (told.gamma, told.lookup_draft) == (3, None)


@pytest.mark.parametrize(
    ("asked", "own", "engine"), [("", None, "vllm"), ("", "llama.cpp", "llama.cpp"), ("vllm", "llama.cpp", "vllm")]
)
def test_the_engine_of_the_run_is_the_default(
    asked: str, own: str | None, engine: str, options: ServeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {
        "name": "x",
        "target": {"path": "some/target"},
        "data": {"train": [{"path": "x"}]},
        "serving": {"engine": own},
    }
    (options.run / "config.yaml").write_text(json.dumps(tree))

    def words(options: ServeOptions, *_: Any) -> None:
        raise UserError(f"it starts {options.engine}")

    monkeypatch.setattr(module, "engine_words", words)
    assert refused(serve, replace(options, engine=asked)).endswith(f"it starts {engine}")


EVIL = "3 --trust-remote-code --middleware evil.mod"


@pytest.mark.parametrize(
    "facts",
    [
        {"gamma": EVIL},
        {"draft_context": EVIL},
        {"one_pass": [2, EVIL, {}]},
        {"one_pass": [2, 3, {"sample": EVIL}]},
        {"gamma_by_load": [[1, 4, EVIL], [5, 8, 0]]},
        {"sampling": {"temperature": EVIL}},
        {"taus": EVIL},
        {"sampling": {"temperature": 0.7, "top_k": EVIL}},
        {"target_rows": None},
    ],
)
def test_words_in_place_of_numbers_are_refused(tmp_path: Path, options: ServeOptions, facts: dict[str, Any]) -> None:
    other = write_export(tmp_path / "evil", **facts)
    assert "serving.json: key facts." in refused(words_of, replace(options, run=other))


@pytest.mark.parametrize(
    "target", ["--trust-remote-code", "--middleware=evil.mod", "a b", "/not/here", "../not-here", "-x/y"]
)
def test_a_target_that_is_none_is_refused(tmp_path: Path, options: ServeOptions, target: str) -> None:
    assert "--target" in refused(words_of, replace(options, target=target))
    config = options.run / "config.yaml"
    config.write_text(json.dumps({"name": "x", "target": {"path": target}, "data": {"train": [{"path": "x"}]}}))
    assert "--target" in refused(words_of, options)
    config.unlink()  # An export by itself.
    write = json.loads((options.run / "export" / "serving.json").read_text())
    write["facts"]["target"] = target
    (options.run / "export" / "serving.json").write_text(json.dumps(write))
    assert "--target" in refused(words_of, options)


def test_where_the_target_is(tmp_path: Path, options: ServeOptions) -> None:
    (tmp_path / "model").mkdir()
    assert words_of(replace(options, target=str(tmp_path / "model")))[2] == str(tmp_path / "model")
    assert words_of(replace(options, target="embedded"))[2] == str(EMBEDDED_FOLDER)
    (options.run / "config.yaml").unlink()
    assert words_of(options)[2] == "some/target"


def test_a_target_of_a_revision_is_served_from_its_folder(
    tmp_path: Path, options: ServeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every engine takes a revision, so none is asked for one."""
    asked = []
    monkeypatch.setattr("distill.models.load.reach_hub", lambda *_: None)
    monkeypatch.setattr(module, "snapshot_download", lambda *of, **how: (asked.append((of, how)), str(tmp_path))[1])
    tree = {"name": "x", "target": {"path": "some/target", "revision": "abc"}, "data": {"train": [{"path": "x"}]}}
    (options.run / "config.yaml").write_text(json.dumps(tree))
    assert words_of(options)[2] == str(tmp_path)
    serving = options.run / "export" / "serving.json"
    serving.write_text(json.dumps(json.loads(serving.read_text()) | {"facts": FACTS | {"revision": "abc"}}))
    (options.run / "config.yaml").unlink()  # An export by itself.
    assert words_of(options)[2] == str(tmp_path)
    assert asked == [(("some/target",), {"revision": "abc"})] * 2
    assert words_of(replace(options, target="some/other"))[2] == "some/other"


@pytest.mark.parametrize(
    ("host", "warned"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True), ("::", True)]
)
def test_an_open_address_without_a_key_is_a_warning(
    host: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for keyed in (False, True):
        listening(host, free_port(), keyed).close()
        assert bool(capsys.readouterr().err) is (warned and not keyed)


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
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.1)
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
    assert "stopped while it was starting" in out.read_text()


def test_a_signal_whose_exception_is_lost_ends_it_all_the_same(
    tmp_path: Path, options: ServeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, lost = tmp_path / "out", tmp_path / "lost"

    def deaf_once(url: str) -> bool:
        try:
            time.sleep(0.1)
        except process.Ended:
            if lost.exists():
                raise
            lost.touch()
        return False

    monkeypatch.setattr(process, "answers", deaf_once)
    monkeypatch.setattr(process, "POLL_SECONDS", 0)
    with forked(start, options, out) as child:
        until(lambda: len(psutil.Process(child.pid).children(recursive=True)) == 2)
        os.kill(child.pid, signal.SIGTERM)
        child.join(20)
        assert (child.exitcode, lost.exists()) == (INTERRUPTED, True)


def test_an_engine_that_dies_leaves_its_last_lines(
    options: ServeOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOOD", "dies")
    with pytest.raises(UserError, match="vLLM exited with status 3") as failed:
        serve(options)
    assert exit_status(failed.value) == MISTAKE
    assert "ValueError: no such model" in capsys.readouterr().err


def test_the_actual_files_are_checked_before_the_engine_starts(
    tmp_path: Path, options: ServeOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record of the export says that all is well; the files were changed since."""
    directory = options.run / "export"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_FOLDER / name, directory)
    save_file({}, directory / "model.safetensors")
    words = words_of(replace(options, target="embedded"))
    module._check_files("vLLM", words, directory, words[2])
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match=r"embedded|export: breaks vLLM 0\.32: .*--tensor-parallel-size 3"):
        module._check_files("vLLM", [*words, "-tp", "3"], directory, words[2])
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    module._check_files("vLLM", words, directory, words[2])
    assert "note for every engine: the draft's context is 64 tokens" in capsys.readouterr().err
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 4000}))
    with pytest.raises(UserError, match=r"breaks vLLM 0\.32: .*vocab_size 4000 in the draft"):
        serve(replace(options, target="embedded"))


def test_what_is_refused(tmp_path: Path, options: ServeOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", options.port)), pytest.raises(UserError, match=f"--port {options.port}"):
        serve(options)
    with pytest.raises(UserError, match=r"--engine ollama.*known: vllm"):
        serve(replace(options, engine="ollama"))
    with pytest.raises(UserError, match="neither a run nor an export"):
        serve(replace(options, run=tmp_path))
    other = write_export(tmp_path / "a", draft_rows=4, target_rows=5)
    with pytest.raises(UserError, match="vLLM refuses this pair: 4 draft rows"):
        serve(replace(options, run=other))
    other = write_export(tmp_path / "b")
    (other / "serving.json").write_text("[]")
    with pytest.raises(UserError, match=r"serving\.json: the file has an invalid value"):
        serve(replace(options, run=other))
    (other / "serving.json").unlink()
    with pytest.raises(UserError, match=r"understudy export .*my run"):
        serve(replace(options, run=other.parent))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(process, "BUILT", Path("/nowhere"))
    with pytest.raises(UserError, match=r"vLLM is not installed.*make engines"):
        serve(options)
