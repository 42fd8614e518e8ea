"""The line that a training run shows: loss, alpha estimate, tokens/s, remaining time."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextlib.contextmanager
def progress_line(word: str, total: int, done: int, show: bool) -> Iterator[Callable[[int, str], None]]:
    """Gives a function (steps done, facts) that redraws the line; ``show`` is false on all ranks but one."""
    columns = (
        TextColumn(f"[bold]{word}"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(), disable=not show, refresh_per_second=2) as bar:
        task = bar.add_task("", total=total, completed=done, facts="")
        yield lambda steps, facts: bar.update(task, completed=steps, facts=facts)
