"""`understudy time` with engines whose costs are known, over HTTP; the sums are in tests/speculative/measure/test_engine_costs.py."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from processes import free_port
from refusals import refused
from running_app import running_app
from timed_engine import TimedEngine

from distill.commands.readback.clock import time_command
from distill.config.command_line import TimeOptions
from distill.run.verdict_record import load_verdict
from speculative.measure.engine_costs import EngineCosts


@contextlib.contextmanager
def asking(run: Path, *engines: TimedEngine) -> object:
    """Options for running engines, the first without a draft."""
    with contextlib.ExitStack() as running:
        plain, *urls = (running.enter_context(running_app(engine.app())) for engine in engines)
        yield TimeOptions(run, plain=plain, url=urls, load="1,3", repeats=2)


def test_running_engines_are_timed_and_the_file_is_what_is_printed(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "costs.json"
    with asking(tiny_run, TimedEngine(0), TimedEngine(2, 1), TimedEngine(4, 3)) as options:
        assert time_command(TimeOptions(**{**vars(options), "out": out})) == 0
    made = EngineCosts.read(out, "")
    assert made.engine == "vllm 0.32.0"
    assert made.device.startswith("http://127.0.0.1:")
    assert [one.batch_size for one in made.costs] == [1, 3]
    for one in made.costs:
        assert set(one.verify_seconds) == {2, 4}
        # An engine cannot be faster than its waits.
        assert one.target_seconds >= 0.99 * (0.004 + 0.0002 * one.batch_size)
        value, low, high = made.ratios[one.batch_size]["block 4"]
        assert value == one.block_price(4)
        assert low <= value <= high
    printed, verdict = capsys.readouterr().out, load_verdict(tiny_run)
    for row in verdict.model_copy(update={"engine": made}).engine_rows:
        assert f"{row.speed_up:.2f}x" in printed or row.gamma not in (2, 4)
    assert "plain decoding is faster" in printed
    assert not (tiny_run / "engine_costs.json").exists()


@pytest.mark.parametrize(
    ("engines", "told"),
    [
        ((TimedEngine(0), TimedEngine(2, 1, counts=False), TimedEngine(4)), "reports no drafts"),
        ((TimedEngine(2), TimedEngine(2), TimedEngine(4)), "drafts too; start it without the draft"),
        ((TimedEngine(0, with_ids=False), TimedEngine(2), TimedEngine(4)), "0 token ids in a stream of"),
        ((TimedEngine(0), TimedEngine(2), TimedEngine(2)), "two or more engines that draft different numbers"),
    ],
)
def test_engines_that_cannot_be_timed_are_one_line(tiny_run: Path, engines: tuple[TimedEngine, ...], told: str) -> None:
    with asking(tiny_run, *engines) as options:
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


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(json.dumps({"format": 9}))
    assert "reads format 1" in refused(EngineCosts.read, tmp_path / "costs.json", "")
