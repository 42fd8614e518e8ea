"""llama.cpp serves an exported draft: it writes the target's text and accepts what replay of the served weights says.

`make engines` builds it. Started as a user starts it, by `understudy serve`.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_process import LLAMA_ALONE, LLAMA_EXACT, ROOT, Server, built, serving
from processes import free_port

from data.responses.engine_http import answers
from distill.commands.readback.clock import time_command
from distill.commands.readback.options import ReadbackOptions, TimeOptions
from distill.commands.readback.readback import readback_command
from distill.commands.readback.speed import seen_in
from distill.config.layout import EXPORT, VERDICT
from distill.export.pair import check_pair
from distill.models.load import EMBEDDED_FOLDER, load_model
from distill.run.readback_record import ReadbackRecord
from distill.run.verdict_record import Verdict
from speculative.measure.engine_costs import EngineCosts

BUILT = ROOT / ".venv-llamacpp" / "ready"
pytestmark = [pytest.mark.engine, *built(".venv-llamacpp")]
GAMMA = 3
BIN, SOURCE = BUILT.parent / "bin", BUILT.parent / "source/vendor/llama.cpp"


@pytest.fixture(scope="module")
def run(pair: Path) -> Path:
    return shutil.copytree(pair, pair.parent / "gguf", symlinks=True)


def served(run: Path, *words: str) -> Any:
    words = ("--spec-draft-n-max", str(GAMMA), *LLAMA_ALONE, *words)
    return serving(run, ["--engine", "llama.cpp", "--", *words], "llama.cpp", {})


@pytest.fixture(scope="module")
def exact(run: Path) -> Iterator[Server]:
    with served(run, *LLAMA_EXACT) as server:
        yield server


def read_back(server: Server, run: Path, **more: Any) -> ReadbackRecord:
    return readback_command(ReadbackOptions(url=server.url, run=run, **{"gamma": GAMMA} | more))


def check_agreement(found: ReadbackRecord, rule: str) -> None:
    assert (found.engine, found.served.rule, found.served.gamma) == ("llama.cpp", rule, GAMMA)
    assert found.agrees, found.causes
    assert found.greedy is not None
    assert found.greedy.same
    assert found.served.tau == pytest.approx(found.replay.tau, rel=0.02)
    assert 1 < found.served.tau < GAMMA + 1


@pytest.mark.parametrize("concurrency", [1, 4])
def test_greedy_drafts_are_accepted_as_replay_says(exact: Server, run: Path, concurrency: int) -> None:
    """At temperature 0.8; greedy requests too. Nothing is random but the text."""
    found = read_back(exact, run, concurrency=concurrency)
    check_agreement(found, "greedy-draft")
    assert found.version
    assert found.text_fit is not None
    assert found.text_fit.same
    assert found.served.accepted_per_drafted == pytest.approx(found.replay.accepted_per_drafted, abs=0.02)


def test_its_counters_are_those_of_its_answers(exact: Server, run: Path) -> None:
    """They give survival, which its answers do not."""
    found = read_back(exact, run, count=12)
    timings = [json.loads(line)["response"]["timings"] for line in (run / "readback.jsonl").open()]
    drafted, accepted = (sum(one[name] for one in timings) for name in ("draft_n", "draft_n_accepted"))
    assert found.served.accepted_per_drafted == pytest.approx(accepted / drafted)
    assert found.survival["served"] == pytest.approx(found.survival["replay"], abs=0.06)
    assert not [note for note in found.notes if "other clients" in note]


def test_a_quantised_pair_is_replayed_as_it_is_served(run: Path) -> None:
    """The products of llama.cpp round activations too, so texts part after near-ties; the acceptance is that of the GGUF files."""
    with served(run, "--weights", "q8_0", "--draft-weights", "q4_k_m") as server:
        files = {
            role: run / f"{EXPORT}-gguf" / f"{role}-{kind}.gguf"
            for role, kind in (("target", "q8_0"), ("draft", "q4_k_m"))
        }
        found = read_back(server, run, count=24, **{role: str(path) for role, path in files.items()})
    whole = run / f"{EXPORT}-gguf" / "draft-auto.gguf"
    broken, _ = check_pair(str(EMBEDDED_FOLDER), str(run / EXPORT), [*files.values()], engines=["llama.cpp"])
    assert broken == []
    assert files["draft"].stat().st_size < 0.8 * whole.stat().st_size
    assert found.served.tau == pytest.approx(found.replay.tau, rel=0.05)
    assert found.text_fit is not None
    assert found.text_fit.same
    weight = "model.layers.0.mlp.gate_proj.weight"
    half, four = (load_model("draft", str(path)).state_dict()[weight] for path in (whole, files["draft"]))
    assert 0.01 < (half - four).norm() / half.norm() < 0.15


def test_lookup_is_tried_before_the_draft(run: Path) -> None:
    chained = [
        "--spec-type",
        "ngram-simple,draft-simple",
        "--spec-ngram-simple-size-n",
        "3",
        "--spec-ngram-simple-size-m",
        "8",
    ]
    with served(run, *LLAMA_EXACT, *chained, "-lv", "4") as server:
        found = read_back(server, run, count=12)
    assert found.greedy is not None
    assert found.greedy.same
    assert found.text_fit is not None
    assert found.text_fit.same
    log = server.log.read_text()
    for name in ("ngram-simple", "draft-simple"):
        assert re.search(rf"statistics +{name}:.*#gen drafts = +[1-9]", log), name


def test_the_command_of_the_page_runs(run: Path, tmp_path: Path) -> None:
    command = json.loads((run / EXPORT / "serving.json").read_text())["engines"]["llama.cpp"]["command"]
    shutil.copytree(run / EXPORT, tmp_path / "draft")
    path = os.pathsep.join([str(BIN), str(Path(sys.executable).parent), os.environ["PATH"]])
    places = {"DRAFT": str(tmp_path / "draft"), "TARGET": str(EMBEDDED_FOLDER), "LLAMA_CPP": str(SOURCE), "PATH": path}
    port = free_port()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-euc", f"{command} --port {port} {' '.join(LLAMA_ALONE)}"],
            env=os.environ | places,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        while not answers(f"http://127.0.0.1:{port}"):
            assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.2)
        body = json.dumps({"prompt": "def add(a, b):", "max_tokens": 16}).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/completions", body, timeout=60) as answer:
            assert json.load(answer)["timings"]["draft_n"] > 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_it_is_timed_and_the_served_speed_stands_beside_the_prediction(run: Path, tmp_path: Path) -> None:
    """`understudy time` starts it with a slot for each request; readback asks for no probabilities, which slow plain decoding alone."""
    timed = tmp_path / "timed"
    shutil.copytree(run, timed, symlinks=True)
    taus = {0: 1.0, 1: 1.6, 2: 2.0, 3: 2.3}
    counts = {"gamma": 3, "prompts": 40, "tokens": 1600, "outcome": "no_speed", "headline": ""}
    verdict = Verdict(version="1", rule="greedy-draft", drafts=[{"way": "draft"}], replay=taus, **counts)
    (timed / VERDICT).write_text(verdict.model_dump_json())
    flags = [*LLAMA_EXACT, *LLAMA_ALONE[:8]]
    options = TimeOptions(timed, flags, engine="llama.cpp", load="1,5", gamma="1,3", port=free_port())
    assert time_command(options) == 0
    costs = EngineCosts.read(timed / EngineCosts.FILE, "")
    assert costs.engine.startswith("llama.cpp ")
    assert [one.batch_size for one in costs.costs] == [1, 5]
    for one in costs.costs:
        assert set(one.verify_seconds) == {1, 3}
        assert 0 < one.target_seconds < one.block_price(3) * one.target_seconds
    words = ["--engine", "llama.cpp", "--alone", "--", *flags]
    with (
        served(timed, *LLAMA_EXACT) as server,
        serving(timed, words, "llama.cpp", {}) as plain,
    ):
        found = read_back(server, timed, plain=plain.url, speed=True, count=8)
    assert [one.served.concurrency for one in found.speed] == [1, 5]
    for one in found.speed:
        assert one.served.gamma == GAMMA
        assert one.served.tau == pytest.approx(found.served.tau, rel=0.25), "other seeds"
        assert (one.served.speed_up or 0) > 0
    answers = [json.loads(line)["response"] for line in (timed / "speed-readback.jsonl").open()]
    assert all(one["choices"][0].get("logprobs") is None and one["timings"]["cache_n"] == 0 for one in answers)
    assert "4 requests at a time" in seen_in(timed, costs.engine, 5)[0], "it was started with four slots"
