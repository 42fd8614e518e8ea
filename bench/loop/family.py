"""Child processes that end with this program, even if it is killed, including processes that they start in other sessions.

All of them have a mark in their environment. A watcher process notices by a pipe that this program ended, and kills
every process with the mark.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from distill.live.rollout.engine import last_line, marked, marked_environment
from speculative.errors import UserError

MARK = "UNDERSTUDY_LOOP"
_POLL_SECONDS = 0.1


class Family:
    """Context manager for the processes of one folder. Entering it ends processes left by an earlier loop."""

    def __init__(self, folder: Path) -> None:
        self.mark = str(folder.resolve())
        self.folder = folder

    def __enter__(self) -> "Family":
        end_marked(self.mark)
        # The watcher has no mark, or it would kill itself.
        words = [sys.executable, __file__, self.mark]
        self._watcher = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        self._watcher.wait()

    def start(self, name: str, words: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """Start a process whose output goes to NAME.log in the folder."""
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=marked_environment(MARK, self.mark) | environment,
            )

    def last_line(self, name: str) -> str:
        """The last line of a process's log."""
        return last_line(self.folder / f"{name}.log") or "it printed nothing"

    def check(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Raises UserError if the process has ended."""
        if process.poll() is not None:
            raise UserError(f"{name} ended with exit status {process.returncode}: {self.last_line(name)}")


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children with SIGKILL."""
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(process.pid)
        for one in [leader, *leader.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


def end_marked(mark: str) -> None:
    """Kill every process with the mark; return when none is left."""
    while left := list(marked(MARK, mark)):
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_marked(sys.argv[1])
