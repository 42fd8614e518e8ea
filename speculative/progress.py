"""Progress of work that takes a while: a bar on a terminal; elsewhere a line after five seconds, and then every thirty.

Phases may contain phases. All of them are shown, and the last line names the whole chain. Output goes to stderr, because stdout may be
JSON for a script; to stdout only where that is a terminal.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

FIRST_SECONDS, EVERY_SECONDS = 5.0, 30.0  # after which a log has a line of a phase, and the time between two lines
REFRESHES = 2  # of a terminal in a second: what is timed should not notice them
Item = TypeVar("Item")


class Phase:
    """One phase: what is done of a total (None: unknown), how fast, what is left, and other facts."""

    def __init__(self, label: str, total: int | None, done: int) -> None:
        self.label, self.total, self.done, self.facts = label, total, done, ""
        self._tokens, self._first, self._began = 0, done, time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def fresh(self) -> int:
        """What this start has done."""
        return self.done - self._first

    def advance(self, count: int = 1) -> None:
        """Something is finished."""
        self.done += count

    def count(self, tokens: int) -> None:
        """Tokens were made; their rate becomes the facts."""
        self._tokens += tokens
        self.facts = f"{self._tokens / max(self.seconds, 1.0):,.0f} tok/s"

    def line(self) -> str:
        """Everything but the label."""
        parts = []
        if self.total is not None or self.done:
            parts.append(f"{self.done:,}" if self.total is None else f"{self.done:,} of {self.total:,}")
        if self.fresh > 0:
            each = max(self.seconds, 1e-6) / self.fresh
            parts.append(f"{1 / each:,.1f}/s" if each < 1 else f"{each:,.1f} s each")
            parts += [f"{_clock(each * (self.total - self.done))} left"] if self.total is not None else []
        else:
            parts.append(_clock(self.seconds))
        return ", ".join([*parts, *([self.facts] if self.facts else [])])


class _Display:
    """The open phases of this process, the outermost first, and what shows them."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.hidden = False
        self._lock, self._stop = threading.RLock(), threading.Event()
        self._console, self._live = Console(), None  # type: Console, Live | None

    def open(self, phase: Phase) -> None:
        with self._lock:
            self.phases.append(phase)
            if len(self.phases) > 1:
                return
            self._console = console = Console(stderr=not sys.stdout.isatty())
            if console.is_terminal and not console.is_dumb_terminal:
                self._live = Live(
                    get_renderable=self._bars,
                    console=console,
                    refresh_per_second=REFRESHES,
                    transient=True,
                    # What is printed to a terminal passes the bar; what goes to a file stays there.
                    redirect_stdout=sys.stdout.isatty(),
                    redirect_stderr=sys.stderr.isatty(),
                )
                self._live.start()
            else:
                self._stop = threading.Event()
                threading.Thread(target=self._beat, args=(self._stop,), daemon=True).start()

    def close(self, phase: Phase, finished: bool) -> None:
        with self._lock:
            self.phases.remove(phase)
            if self.phases:
                return
            self._stop.set()
            live, self._live = self._live, None
            if live is not None:
                live.stop()
            if finished and phase.seconds >= FIRST_SECONDS:
                done = f"{phase.fresh:,} in " if phase.fresh else ""
                print(f"{phase.label}: {done}{_clock(phase.seconds)}", file=self._console.file, flush=True)

    def _bars(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for phase in [*self.phases]:
            bar = ProgressBar(total=phase.total, completed=phase.done, width=16, pulse=phase.total is None)
            line = Text(phase.line(), no_wrap=True, overflow="ellipsis")
            table.add_row(Text(phase.label, style="bold", no_wrap=True), bar, line)
        return table

    def _beat(self, stop: threading.Event) -> None:
        pause = FIRST_SECONDS
        while not stop.wait(pause):
            with self._lock:
                chain = "; ".join(f"{phase.label}: {phase.line()}" for phase in self.phases)
            if not stop.is_set():
                print(chain, file=sys.stderr, flush=True)
            pause = EVERY_SECONDS


_display = _Display()


def hide() -> None:
    """Show no phase of this process: of several ranks one speaks."""
    _display.hidden = True


def note(line: str) -> None:
    """Print a line about the work of this process, unless its phases are hidden."""
    if not _display.hidden:
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def phase(label: str, total: int | None = None, done: int = 0, show: bool = True) -> Iterator[Phase]:
    """A phase that lasts as long as the block. done: what an earlier start finished."""
    entered = Phase(label, total, done)
    if _display.hidden or not show:
        yield entered
        return
    _display.open(entered)
    finished = False
    try:
        yield entered
        finished = True
    finally:
        _display.close(entered, finished)


def each(items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
    """The items, as a phase that advances by one when the next one is asked for."""
    if total is None:
        total = len(items) if hasattr(items, "__len__") else None  # type: ignore[arg-type]
    with phase(label, total) as entered:
        for item in items:
            yield item
            entered.advance()


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
