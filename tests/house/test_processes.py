"""What ends the children that a test leaves, and what gives a test Ctrl-C where the shell has taken it away."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from processes import descendants, end, forked, run_ranks, started_since


def _leave_an_orphan(note: Path) -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    note.write_text(str(child.pid), encoding="utf-8")
    os._exit(0)


def test_an_orphan_in_a_session_of_its_own_is_found_and_ended(tmp_path: Path) -> None:
    before = descendants()
    with forked(_leave_an_orphan, tmp_path / "pid") as child:
        child.join(30)
    (orphan,) = started_since(before)
    assert orphan.pid == int((tmp_path / "pid").read_text(encoding="utf-8"))
    assert end({orphan}) == ["sleep 600"]
    assert orphan not in descendants() or orphan.status() == psutil.STATUS_ZOMBIE


def test_a_forked_child_ends_with_its_block_also_when_that_fails() -> None:
    with pytest.raises(RuntimeError), forked(time.sleep, 600) as child:
        raise RuntimeError
    assert child.exitcode == -signal.SIGKILL


def _fork_and_end_at_once(note: Path) -> None:
    child = os.fork()
    if not child:
        time.sleep(600)
    note.write_text(str(child), encoding="utf-8")
    os._exit(1)  # as faulthandler ends a test that hangs in C


def test_a_fork_dies_with_the_process_that_made_it(tmp_path: Path) -> None:
    with forked(_fork_and_end_at_once, tmp_path / "pid") as child:
        child.join(30)
    grandchild = int((tmp_path / "pid").read_text(encoding="utf-8"))
    deadline = time.monotonic() + 5
    while psutil.Process(grandchild).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _fail_on_rank_1(rank: int) -> None:
    os._exit(rank)


def test_a_rank_that_fails_fails_the_test() -> None:
    with pytest.raises(AssertionError, match=r"\[0, 1\]"):
        run_ranks(_fail_on_rank_1)


def _interrupt_itself() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_reaches_tests_and_their_children_where_the_shell_ignores_it(request: pytest.FixtureRequest) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _interrupt_itself()  # ignored, as under `make test &`
        request.getfixturevalue("interruptible")
        with pytest.raises(KeyboardInterrupt):
            _interrupt_itself()
        with forked(_interrupt_itself) as child:
            child.join(30)
            assert child.exitcode == 1
    finally:
        signal.signal(signal.SIGINT, before)
