"""speculative/progress.py: nothing that takes long is silent, on a terminal or in a log."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import time

import pytest

from speculative import progress

SCRIPT = """
import sys, time
from speculative import progress
progress.FIRST_SECONDS = 0.2
with progress.phase("outer"):
    for number in progress.each(range(3), "inner"):
        time.sleep(0.6)
        print("printed", number)
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.2)


def test_a_line_has_what_is_done_the_rate_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    shown = progress.Phase("answers", 4000, done=1000)
    assert shown.line() == "1,000 of 4,000, 0:00:00"
    now += 20
    # What an earlier start did says nothing about the rate.
    shown.advance(500)
    shown.count(50_000)
    assert shown.line() == "1,500 of 4,000, 25.0/s, 0:01:40 left, 2,500 tok/s"
    slow = progress.Phase("steps", None, done=0)
    now += 3
    slow.advance()
    slow.facts = "loss 1.5"
    assert slow.line() == "1, 3.0 s each, loss 1.5"


@pytest.mark.usefixtures("quick")
def test_a_log_has_a_line_now_and_then_and_stdout_none(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.phase("answers", 40, done=10) as shown:
        shown.advance(20)
        time.sleep(0.7)
    out, err = capsys.readouterr()
    assert out == "", "stdout may be JSON for a script"
    *lines, last = err.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("answers: 30 of 40, ") for line in lines)
    assert last == "answers: 20 in 0:00:01"


@pytest.mark.usefixtures("quick")
def test_a_line_names_the_whole_chain_of_phases(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.phase("verdict"), progress.phase("decoding", 8):
        time.sleep(0.3)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "verdict: 0:00:00; decoding: 0 of 8, 0:00:00"
    assert last == "verdict: 0:00:00", "what is inside ends without a line"


def test_what_is_short_is_not_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.each(iter("ab"), "letters")) == ["a", "b"]
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("quick")
def test_a_failed_phase_has_no_last_line_and_the_next_one_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(ZeroDivisionError), progress.phase("broken"):
        time.sleep(0.3)
        raise ZeroDivisionError
    with progress.phase("next"):
        time.sleep(0.3)
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["broken", "next", "next"]


@pytest.mark.usefixtures("quick")
def test_of_several_ranks_one_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress._display, "hidden", False)  # so that it is shown again after this test
    progress.hide()
    with progress.phase("work") as shown:
        shown.advance()
        time.sleep(0.3)
    assert capsys.readouterr().err == ""


def test_a_terminal_has_bars_and_whole_printed_lines() -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            written += os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert child.wait() == 0
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", written.decode())
    assert re.search(r"outer +\S+ 0:00:0\d", text)
    assert re.search(r"inner +\S+ \d of 3", text)
    assert [f"printed {number}" for number in range(3)] == re.findall(r"printed \d", text)
    assert text.rstrip().endswith("outer: 0:00:02"), "the bars are gone, and a line remains"


def test_what_is_printed_to_a_file_stays_there_while_a_terminal_shows_bars() -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    out, _ = child.communicate()
    os.close(ours)
    assert out == "printed 0\nprinted 1\nprinted 2\n"
