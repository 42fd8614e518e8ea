"""A run's folder and two processes that want it: the second one is refused, and a killed one is in nobody's way."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import FORK, forked, rank_statuses, until
from tiny_training import fit, forget_accelerators, make_loop, metrics_of, run_config

from distill import train
from distill.commands.output import check_writable
from distill.config.layout import CONFIG, HOLDER, PROMPTS
from distill.config.load import dump_config
from distill.config.run import RunConfig
from distill.export.destination import appearing_directory
from distill.run.lock import hold
from distill.run.run import Run
from speculative.errors import UserError


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run of six steps; its config is `run.yaml` there."""
    made = run_config(tmp_path)
    (tmp_path / "run.yaml").write_text(dump_config(made), encoding="utf-8")
    return made


def _trains(config: RunConfig, stays: bool, screen: Path | None = None) -> None:
    """`distill.train` on a tiny loop; where it ``stays``, it never leaves its first step."""
    forget_accelerators()
    if screen is not None:
        sys.stderr = screen.open("w", encoding="utf-8")

    def distil(run: Run) -> None:
        loop = make_loop(config, accelerator=run.accelerator)
        if stays:
            (config.folder / "in step").touch()
            time.sleep(600)
        fit(loop)

    train.distil = distil
    status = train.main([str(config.folder.parent / "run.yaml")])
    sys.stderr.flush()
    os._exit(status)


def _rank(rank: int, config: RunConfig) -> None:
    _trains(config, stays=False)


def _state(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def _ended(child: Any) -> int | None:
    child.join(60)
    return child.exitcode


def test_the_second_of_two_trainings_is_refused_and_a_killed_one_keeps_nobody_out(
    config: RunConfig, tmp_path: Path
) -> None:
    screen = tmp_path / "screen"
    with forked(_trains, config, True) as holder:
        until((config.folder / "in step").exists)
        before = _state(config.folder)
        with forked(_trains, config, False, screen) as second:
            assert _ended(second) == 2
        (line,) = screen.read_text(encoding="utf-8").splitlines()
        assert line.startswith(
            f"understudy: {config.folder}: in use by process {holder.pid} on {os.uname().nodename} since 2"
        )
        assert line.endswith("; wait for it, end it, or write elsewhere")
        assert rank_statuses(_rank, config, limit=30) == [2, 2]
        with pytest.raises(UserError, match=f"in use by process {holder.pid} "):
            hold(config.folder)
        assert _state(config.folder) == before
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()
    with forked(_trains, config, False) as resumed:
        assert _ended(resumed) == 0
    steps = [line["step"] for line in metrics_of(config) if "loss" in line]
    assert steps == sorted(set(steps))


def _holds(folder: Path, said: Any) -> None:
    with hold(folder):
        said.set()
        time.sleep(600)


def test_what_writes_into_a_run_that_is_in_use_is_refused(config: RunConfig, tmp_path: Path) -> None:
    run, said = config.folder, FORK.Event()
    (run / PROMPTS).mkdir(parents=True)
    (run / CONFIG).touch()
    with forked(_holds, run, said):
        assert said.wait(30)
        with pytest.raises(UserError, match="in use by process"):
            check_writable("--out", run / "here.json")
        with pytest.raises(UserError, match="in use by process"), appearing_directory(run / "export"):
            raise AssertionError("it may not be written")
        check_writable("--out", tmp_path / "elsewhere.json")
        assert {path.name for path in run.iterdir()} == {PROMPTS, CONFIG, ".lock", ".holder"}
    check_writable("--out", run / "here.json")


def test_a_holder_is_reported_whatever_its_words_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["understudy", "m\udcfcller.yaml"])
    with hold(tmp_path):
        assert (tmp_path / HOLDER).read_text().endswith("'m?ller.yaml'\n")
    with forked(_holds, tmp_path, said := FORK.Event()):
        assert said.wait(30)
        (tmp_path / HOLDER).write_bytes(b"\xff")
        with pytest.raises(UserError, match="in use by"):
            hold(tmp_path)


def test_a_process_may_hold_a_run_by_any_of_its_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with hold(Path("run")), hold(tmp_path / "run"), hold(Path("link")):
        monkeypatch.chdir("/")
