"""Progress line and Ctrl-C handling during training."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextlib.contextmanager
def progress_line(word: str, total: int, done: int, show: bool) -> Iterator[Callable[[int, str], None]]:
    """Yield a function (steps done, facts) that redraws the line. ``show`` is true on one rank only."""
    columns = (
        TextColumn(f"[bold]{word}"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(), disable=not show, refresh_per_second=2) as bar:
        task = bar.add_task("", total=total, completed=done, facts="")
        yield lambda steps, facts: bar.update(task, completed=steps, facts=facts)


class Interrupt:
    """Ctrl-C or SIGTERM sets a flag that the loop reads between steps. The second signal stops at once."""

    def __init__(self) -> None:
        """Install the signal handlers until `restore`."""
        self.requested = False
        self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if os.environ.get("RANK", "0") == "0":
            launched = "; the launcher kills all processes after 30 s, and an unfinished judgement is made on resume"
            limit = launched if "TORCHELASTIC_RUN_ID" in os.environ else ""
            print(
                f"\nstopping after this step, with a checkpoint; press Ctrl-C again to stop at once{limit}",
                file=sys.stderr,
            )

    def restore(self) -> None:
        """Restore the earlier handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
