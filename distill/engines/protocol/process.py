"""Engines as processes of ours: where their program is, how they start, and that nothing of them stays."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from data.responses.engine_http import answers
from distill.engines.protocol.engine import BUILT, Engine, Service, known_engines
from distill.faults import Interrupted
from speculative.errors import UserError
from speculative.progress import phase

TOLD_LINES = 12  # log lines printed when an engine exits on its own
GRACE_SECONDS = 15.0  # for an engine to exit after a signal, before it is killed
POLL_SECONDS = 0.5
# What a launcher of ranks gives its processes: an engine would take itself for one of them.
_LAUNCHED = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|(MASTER|TORCHELASTIC|ACCELERATE|FSDP)_.*")
_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG of Linux's prctl


class Ended(Interrupted):
    """A signal asked us to stop; `number` is passed on to the engines."""

    def __init__(self, number: int) -> None:
        super().__init__("the engine was stopped")
        self.number = number


class Program(NamedTuple):
    """An engine's command and log, and what its environment has beside ours."""

    words: Sequence[str]
    log: Path
    environment: Mapping[str, str] = {}


def startable(option: str) -> tuple[Engine, Service]:
    """Return the engine that --engine names, and how it is started."""
    found = {one.key: (one, one.service) for one in known_engines().values() if one.service is not None}
    if option not in found:
        raise UserError(f"--engine {option}: this engine cannot be started; known: {', '.join(found)}")
    return found[option]


def program_of(engine: Engine, service: Service) -> Path:
    """Return the place of an engine's program. Raises UserError if it is not installed."""
    places = (os.environ.get("PATH", ""), Path(sys.executable).parent, BUILT / service.built / "bin")
    program = shutil.which(service.program, path=os.pathsep.join(map(str, places)))
    if program is None:
        raise UserError(
            f"{engine.name} is not installed: no `{service.program}` in PATH; install it, or run `make engines`"
        )
    return Path(program)


@contextlib.contextmanager
def running(programs: Sequence[Program]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run engines, each in its own process session. A signal to us stops them, and leaving the block kills all their processes."""

    def end(number: int, _: object) -> NoReturn:
        # Python drops an exception that is raised inside a destructor, so raise it again a second later.
        signal.signal(signal.SIGALRM, lambda *_: end(number, None))
        signal.alarm(1)
        raise Ended(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in numbers}
    started: list[subprocess.Popen[bytes]] = []
    passed_on = signal.SIGTERM
    try:
        for program in programs:
            started.append(_started(program))
        yield started
    except Ended as ended:
        passed_on = signal.Signals(ended.number)
        raise
    finally:
        signal.alarm(0)
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        _end(started, passed_on)
        for number, handler in before.items():
            signal.signal(number, handler)


def _started(program: Program) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if not _LAUNCHED.fullmatch(name)}
    with program.log.open("wb") as file:
        return subprocess.Popen(
            program.words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**inherited, **program.environment},
            start_new_session=True,
            preexec_fn=_die_with_us,
        )


def _die_with_us() -> None:
    """Ask the kernel, in the engine's process, to signal the engine if our process is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _end(engines: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for engine in engines:
        engine.send_signal(number)
    deadline = time.monotonic() + GRACE_SECONDS
    for engine in engines:
        with contextlib.suppress(subprocess.TimeoutExpired):
            engine.wait(max(0.0, deadline - time.monotonic()))
        # Its child processes share its session, even after the engine has exited.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()


def wait_until_answering(process: subprocess.Popen[bytes], name: str, url: str, log: Path) -> float:
    """Wait until the engine at ``url`` answers /health; return the seconds it took. UserError: it has exited."""
    with phase(f"{name} is starting, its log is {log}") as shown:
        while not answers(url):
            if process.poll() is not None:
                died(process, name, log)
            shown.facts = (_last_lines(log, 1) or [""])[0]
            time.sleep(POLL_SECONDS)
    return shown.seconds


def died(process: subprocess.Popen[bytes], name: str, log: Path) -> NoReturn:
    """Print the last lines of an engine that has exited. Always raises UserError."""
    for line in _last_lines(log, TOLD_LINES):
        print(f"  {line}", file=sys.stderr)
    raise UserError(f"{name} exited with status {process.returncode}; its last lines are above, the full log is {log}")


def _last_lines(log: Path, count: int) -> list[str]:
    with log.open(encoding="utf-8", errors="replace") as file:
        return [line.rstrip() for line in deque(file, maxlen=count)]
