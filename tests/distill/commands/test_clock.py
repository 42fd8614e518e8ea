"""`understudy time` with engines whose costs are known, over HTTP; the sums are in tests/speculative/measure/test_engine_costs.py."""

import contextlib
import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, Timed
from processes import free_port
from refusals import refused
from running_app import running_app
from tiny_training import fresh_accelerator, small_config

from distill import train
from distill.commands.options import ServeOptions
from distill.commands.readback import clock
from distill.commands.readback.clock import time_command, time_serving_engine
from distill.commands.readback.options import TimeOptions
from distill.commands.serve import read_export
from distill.config.command_line import TrainOptions
from distill.config.layout import CONFIG
from distill.config.load import load_config
from distill.engines.protocol import process
from distill.run.heldout_set import load_heldout_set
from distill.run.run import Run
from distill.run.verdict_record import load_verdict
from speculative.measure.engine_costs import EngineCosts

QUICK = {"fixed": 0.002, "each": 0.0, "draft": 0.0}  # costs that no test looks at


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "TURN", 1)
    monkeypatch.setattr(clock, "FEWEST", 3)
    monkeypatch.setattr(clock, "REPEATS", 2)


@pytest.fixture
def timed(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to write in."""
    return shutil.copytree(tiny_run, tmp_path / "timed", symlinks=True)


@contextlib.contextmanager
def asking(run: Path, *engines: FakeEngine) -> object:
    """Options for running engines, the first without a draft."""
    with contextlib.ExitStack() as running:
        plain, *urls = (running.enter_context(running_app(engine.app())) for engine in engines)
        yield TimeOptions(run, plain=plain, url=urls, load="1,3")


def test_running_engines_are_timed_and_the_file_is_what_is_printed(
    timed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with asking(timed, *(FakeEngine(Timed(*of)) for of in ((0, 0), (2, 1), (4, 3)))) as options:
        assert time_command(options) == 0
    made = EngineCosts.read(timed / EngineCosts.FILE, "")
    assert made.engine == "vLLM 0.32.0"
    assert made.device.startswith("http://127.0.0.1:")
    assert [one.batch_size for one in made.costs] == [1, 3]
    for one in made.costs:
        assert set(one.verify_seconds) == {2, 4}
        # An engine cannot be faster than its waits; on a busy machine a fitted step can be, by little.
        assert one.target_seconds >= 0.95 * (0.004 + 0.0002 * one.batch_size)
        value, low, high = made.ratios[one.batch_size]["block 4"]
        assert value == one.block_price(4)
        assert low <= value <= high
    printed, verdict = capsys.readouterr().out, load_verdict(timed)
    for row in verdict.model_copy(update={"engine": made}).engine_rows:
        assert f"{row.speed_up:.2f}x" in printed or row.gamma not in (2, 4)
    assert "plain decoding is faster" in printed


def test_llama_cpp_is_timed_by_the_counts_so_far_in_its_parts(timed: Path) -> None:
    """The last blocks of a response draft less, and not every token has a part: neither changes gamma or the blocks."""
    engines = [FakeEngine(Timed(*of), llama=True) for of in ((0, 0), (2, 1), (7, 2))]
    with asking(timed, *engines) as options:
        assert time_command(options) == 0
    made = EngineCosts.read(timed / EngineCosts.FILE, "")
    assert made.engine == "llama.cpp 0.32.0"
    for one in made.costs:
        assert set(one.verify_seconds) == {2, 7}
        for gamma in (2, 7):
            wait = 0.004 + 0.0002 * one.batch_size * (gamma + 1) + gamma * 0.001
            assert 0.99 * wait < one.block_price(gamma) * one.target_seconds < 2 * wait


def test_an_engine_whose_gamma_varies_is_refused(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, calls = clock._turn, itertools.count()

    def turn(*asked: Any) -> Any:
        gamma, *rest = usual(*asked)
        return gamma and gamma + next(calls) // 4 % 2, *rest  # another in each repeat

    monkeypatch.setattr(clock, "_turn", turn)
    with asking(tiny_run, *(FakeEngine(Timed(gamma, **QUICK)) for gamma in (0, 2, 4))) as options:
        assert "different numbers of tokens, each always the same" in refused(time_command, options)


def test_an_engine_is_started_with_room_and_counts(
    timed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the draft first. The user's words come last, so they count."""
    put_in_path(tmp_path, monkeypatch, "llama-server")
    asked = list[tuple[Any, ...]]()

    @contextlib.contextmanager
    def started(options: ServeOptions, gamma: int, requests: int, tokens: int) -> Any:
        asked.append((options.engine, options.alone, gamma, requests))
        longest = max(len(one.prompt_ids) for one in load_heldout_set(timed).responses)
        assert longest + 4 < tokens < longest + 400
        with running_app(FakeEngine(Timed(0 if options.alone else gamma, 1), llama=True).app()) as url:
            yield url

    monkeypatch.setattr(clock, "started", started)
    assert time_command(TimeOptions(timed, engine="llama.cpp", load="1,3", gamma="2,4")) == 0
    assert asked == [("llama.cpp", True, 1, 3), ("llama.cpp", False, 2, 3), ("llama.cpp", False, 4, 3)]


@pytest.mark.parametrize(
    ("engines", "told"),
    [
        (((0, {}), (2, {"detail": "none"}), (4, {})), "reports no drafts"),
        (((2, {}), (2, {}), (4, {})), "drafts too; start it without the draft"),
        (((0, {"ids": False}), (2, {}), (4, {})), "0 tokens are counted in a stream of"),
        (((0, {}), (2, {}), (2, {})), "two or more engines that draft different numbers"),
        (((0, {}), (2, {}), (4, {"most": 2})), "--load 3: the engine decoded 2 requests at a time; lower it"),
    ],
)
def test_engines_that_cannot_be_timed_are_one_line(
    tiny_run: Path, engines: tuple[tuple[int, dict[str, Any]], ...], told: str
) -> None:
    with asking(tiny_run, *(FakeEngine(Timed(gamma, **QUICK), **how) for gamma, how in engines)) as options:
        assert told in refused(time_command, options)
    assert not (tiny_run / "engine_costs.json").exists()


def test_no_server_and_no_verdict_are_one_line(tiny_run: Path, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert "no server answers" in refused(time_command, TimeOptions(tiny_run, plain=url, url=[url + "/a", url + "/b"]))
    unjudged = tmp_path / "run"
    shutil.copytree(tiny_run, unjudged, symlinks=True, ignore=lambda *_: ["verdict.json"])
    assert "verdict.json" in refused(time_command, TimeOptions(unjudged, plain=url, url=[url, url]))
    assert "neither" in refused(time_command, TimeOptions(tiny_run, plain=url))
    for load in ("1", "0,1", "1,x", "", "4,2000"):
        assert f"--load {load}: give two or more numbers" in refused(time_command, TimeOptions(tiny_run, load=load))


def put_in_path(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "vllm") -> None:
    """A program that dies when it is started."""
    (folder / "bin").mkdir()
    program = folder / "bin" / name
    program.write_text("#!/bin/sh\necho no memory\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def served_by(monkeypatch: pytest.MonkeyPatch, fixed: float = 0.002, **behaviour: Any) -> list[Any]:
    """Engines in this process instead of programs; the exports that they were started with."""
    exports = list[Any]()

    @contextlib.contextmanager
    def started(options: ServeOptions, gamma: int, requests: int, tokens: int) -> Any:
        exports.append((options.run.name, read_export(options.run)[1].gamma, options.alone or gamma, requests))
        engine = FakeEngine(Timed(0 if options.alone else gamma, 1, **QUICK | {"fixed": fixed}), **behaviour)
        with running_app(engine.app()) as url:
            yield url

    monkeypatch.setattr(clock, "started", started)
    return exports


def end_of(run: Path, *overrides: str) -> None:
    """The last stage of a run that is made for vLLM."""
    config = load_config(run / CONFIG, [f"output={run.parent}", f"name={run.name}", "serving.engine=vllm", *overrides])
    time_serving_engine(Run(config, fresh_accelerator(run)))


@pytest.mark.usefixtures("without_pictures")
def test_a_run_ends_with_the_times_of_its_engine_and_takes_them_once(
    timed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_in_path(tmp_path, monkeypatch)
    exports = served_by(monkeypatch)
    end_of(timed, "judge.load=[3]")
    names, _, gammas, requests = zip(*exports, strict=True)
    assert set(names) == {"timing"}, "the run has no export of its own"
    assert gammas == (True, 1, 3), "one token, and as many as were judged"
    assert set(requests) == {3}
    verdict = load_verdict(timed)
    assert verdict.engine is not None
    assert [one.batch_size for one in verdict.engine.costs] == [1, 3]
    said = capsys.readouterr().out.splitlines()
    assert verdict.headline in said[-1]
    assert "in vLLM 0.32.0" in verdict.headline
    assert "in vLLM 0.32.0" in (timed / "report.html").read_text()
    assert list(timed.glob("timing*")) == []
    end_of(timed)
    assert len(exports) == 3, "the file is there: nothing is timed again"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("absent", "vLLM is not installed: no `vllm` in PATH"),
        ("dies at the start", "vLLM exited with status 3"),
        ("dies while it is timed", "no server answers"),
        ("fails", "told to say 500"),
        ("without openai", "openai"),
    ],
)
def test_an_engine_that_cannot_be_timed_is_left_out_in_one_line(
    timed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: str,
    told: str,
) -> None:
    monkeypatch.setattr(process, "BUILT", tmp_path)
    if how != "absent":
        put_in_path(tmp_path, monkeypatch)
    if how in ("dies while it is timed", "fails", "without openai"):
        served_by(monkeypatch, **({"fails": True} if how == "fails" else {"dies_after": 5}))
    if how == "without openai":  # an extra that training does not need
        monkeypatch.setitem(sys.modules, "openai", None)
    before = load_verdict(timed)
    end_of(timed)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("vLLM was not timed: ")
    assert told in line
    assert line.endswith(f"later: understudy time {timed} (docs/serving.md)")
    assert load_verdict(timed) == before
    assert not (timed / EngineCosts.FILE).exists()
    assert list(timed.glob("timing*")) == []


def test_an_engine_that_no_command_starts_is_left_out(timed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end_of(timed, "serving.engine=sglang")
    assert "SGLang was not timed: --engine sglang: this engine cannot be started" in capsys.readouterr().out
    end_of(timed, "serving.engine=null")
    assert capsys.readouterr().out == ""


def test_training_ends_with_a_verdict_by_its_engines_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the engine the run is finished; the same command times the engine when it is there."""
    monkeypatch.setattr(process, "BUILT", tmp_path)
    path = small_config(tmp_path, serving={"engine": "vllm"}, train={"steps": 2})
    assert train.command(TrainOptions(path, [])) == 0
    assert "vLLM was not timed: vLLM is not installed" in capsys.readouterr().out.splitlines()[-1]
    assert load_verdict(tmp_path / "small").rule == "greedy-draft"
    put_in_path(tmp_path, monkeypatch)
    served_by(monkeypatch, fixed=0.03)  # A response has few tokens, and four are decoded at once.
    assert train.command(TrainOptions(path, [])) == 0
    verdict = load_verdict(tmp_path / "small")
    assert "in vLLM 0.32.0" in verdict.headline
    assert verdict.headline in capsys.readouterr().out


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(json.dumps({"format": 9}))
    assert "reads format 1" in refused(EngineCosts.read, tmp_path / "costs.json", "")
