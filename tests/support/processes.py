"""Child processes of tests: forked work, two ranks under gloo, and what ends every child that a test leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

FORK = multiprocessing.get_context("fork")  # a child that has everything imported already
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl


def keep_family_together() -> None:
    """From now on orphaned descendants are children of this process, and its forks die with it.

    Else a fork of a worker that was ended keeps the worker's pipe open, and pytest-xdist waits for that worker for ever.
    """
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.register_at_fork(after_in_child=lambda: prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def descendants() -> set[psutil.Process]:
    """Living children of this process and theirs; cheap where there is none."""
    if hasattr(os, "waitid"):
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return set()
    return set(psutil.Process().children(recursive=True))


def started_since(before: set[psutil.Process]) -> set[psutil.Process]:
    """Descendants that were not there, but for children of those that were: a browser takes and ends processes as it likes."""
    return {one for one in descendants() - before if not before & _parents(one)}


def _parents(process: psutil.Process) -> set[psutil.Process]:
    try:
        return set(process.parents())
    except psutil.NoSuchProcess:
        return set()


def end(processes: set[psutil.Process]) -> list[str]:
    """Kills what still runs of ``processes``; the command line of each that had to be killed."""
    # One that is on its way out may take a moment.
    _, running = psutil.wait_procs([one for one in processes if not _is_zombie(one)], timeout=1)
    killed = []
    for one in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not _is_zombie(one):
                killed.append(" ".join(one.cmdline()))
                one.kill()
    psutil.wait_procs(running, timeout=5)
    for one in processes:
        with contextlib.suppress(ChildProcessError):  # somebody else's
            os.waitpid(one.pid, os.WNOHANG)  # While one is left, `descendants` reads all of /proc for each test.
    return killed


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def forked(work: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """Work in a forked process, which is killed at the end of the block."""
    child = FORK.Process(target=_with_a_pool, args=(work, arguments), daemon=True)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join()


def _with_a_pool(work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """A fork has none of torch's threads. One thread has to make them: two that load a model at once can meet in the middle."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(torch.get_num_threads())
    work(*arguments)


def run_child(work: Callable[..., Any], *arguments: Any, limit: float = 120.0) -> int:
    """Runs work in a forked process to its end; its exit code."""
    return _until(work, arguments, lambda: False, limit)


def run_and_kill(
    work: Callable[..., Any], *arguments: Any, progress: Callable[[], int], generator: random.Random, most: int
) -> int:
    """Kill -9 at a random moment: a little after 1 to ``most`` more units of progress were seen. The exit code."""
    before, more, part = progress(), generator.randint(1, most), generator.random()
    seen: list[float] = []

    def reached() -> bool:
        now = progress()
        if now > before:
            seen.append(time.monotonic())
        if now < before + more:
            return False
        # About the time of one unit at most: on a fast machine a longer pause would outlast the work.
        time.sleep(part * min(0.05, 0.002 + (seen[-1] - seen[0]) / more))
        return True

    return _until(work, arguments, reached, 120.0)


def killed_often(
    work: Callable[..., Any], *arguments: Any, progress: Callable[[], int], times: int, most: int, seed: int
) -> int:
    """Starts the work so often and kills it (`run_and_kill`), then lets it end; how often it was killed."""
    generator = random.Random(seed)
    codes = [run_and_kill(work, *arguments, progress=progress, generator=generator, most=most) for _ in range(times)]
    assert set(codes) <= {0, -signal.SIGKILL}
    assert run_child(work, *arguments) == 0
    return len(codes) - codes.count(0)


def _until(work: Callable[..., Any], arguments: tuple[Any, ...], deadly: Callable[[], bool], limit: float) -> int:
    with forked(work, *arguments) as child:
        deadline = time.monotonic() + limit
        while child.is_alive() and time.monotonic() < deadline and not deadly():
            child.join(0.001)
        late = time.monotonic() >= deadline
    assert not late, f"still running after {limit:g} seconds"
    assert child.exitcode is not None
    return child.exitcode


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_ranks(work: Callable[..., Any], *arguments: Any, ranks: int = 2, limit: float = 60.0) -> None:
    """Runs ``work(rank, *arguments)`` in forked CPU ranks as a launcher would start them; fails unless all end well."""
    statuses = rank_statuses(work, *arguments, ranks=ranks, limit=limit)
    assert statuses == [0] * ranks, f"exit statuses of the ranks: {statuses} (None: took more than {limit:g} s)"


def rank_statuses(work: Callable[..., Any], *arguments: Any, ranks: int = 2, limit: float = 60.0) -> list[int | None]:
    """As `run_ranks`: the exit status of each rank, None of one that had to be killed after ``limit`` seconds."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(forked(_rank, rank, ranks, port, work, arguments)) for rank in range(ranks)]
        deadline = time.monotonic() + limit
        for child in children:
            child.join(max(0.0, deadline - time.monotonic()))
        for child in children:
            if child.exitcode is None:
                os.kill(child.pid, signal.SIGUSR1)  # it says on its stderr where it hangs
                child.join(1.0)
        return [child.exitcode for child in children]


def _rank(rank: int, ranks: int, port: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    faulthandler.register(signal.SIGUSR1)
    import torch  # here: `conftest.py` imports this file

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    work(rank, *arguments)


def until(true: Callable[[], Any], seconds: float = 30.0) -> None:
    """Waits for what another process or thread brings about."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
