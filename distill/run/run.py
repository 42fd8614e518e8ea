"""A run: its folder, the ranks that share it, and where its time goes."""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list

from data.files import write_json
from distill.config.run import RunConfig
from speculative.errors import UserError

PATIENCE = 60.0  # seconds; NFS remembers what a folder held for 3 to 60
Seen = TypeVar("Seen")


@dataclass
class Progress:
    """What a resumed run needs besides tensors. The position in the data follows from `step`."""

    step: int = 0
    tokens_seen: int = 0
    best_step: int | None = None
    best_score: float | None = None
    judged_without_gain: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def spend(self, stage: str, seconds: float) -> None:
        """Adds to the time spent in a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Books the seconds of the block by the wall clock; not those of one that fails."""
        started = time.perf_counter()
        yield
        self.spend(stage, time.perf_counter() - started)


def new_accelerator(**options: Any) -> Accelerator:
    """An Accelerator on the best device that has float64, which the sums need: Apple's GPU does not, its CPU does."""
    # The other ranks wait while the main process judges: for longer than the usual ten minutes on real prompts.
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=12))
    return Accelerator(cpu=torch.backends.mps.is_available(), kwargs_handlers=[patience], **options)


class Run:
    """What all programs of a run share. The main process makes what is made once, and every rank reads it.

    A main process that fails leaves, and the launcher ends the ranks that wait for it (`distill.faults`).
    """

    def __init__(self, config: RunConfig, accelerator: Accelerator | None = None, progress: Progress | None = None):
        """``accelerator``: a new one, of this process, where none is given. ``progress``: where an earlier start stopped."""
        self.config, self.folder = config, config.folder
        self.accelerator = accelerator or new_accelerator()
        self.progress = progress or Progress()

    @property
    def main(self) -> bool:
        """Whether this is the main process."""
        return self.accelerator.is_main_process

    @property
    def rank(self) -> int:
        """Of this process, 0 .. ranks - 1."""
        return self.accelerator.process_index

    @property
    def ranks(self) -> int:
        """Processes that share the run."""
        return self.accelerator.num_processes

    @property
    def device(self) -> torch.device:
        """Of this process."""
        return self.accelerator.device

    def say(self, line: str) -> None:
        """Prints on the main process."""
        self.accelerator.print(line)

    def wait(self) -> None:
        """Returns when all ranks are here."""
        self.accelerator.wait_for_everyone()

    def seen(self, look: Callable[[], Seen]) -> Seen:
        """What the main process sees, on every rank: on a network disk another machine sees a new file later."""
        found = [look() if self.main else None]
        return broadcast_object_list(found)[0] if self.ranks > 1 else found[0]  # type: ignore[return-value]

    def once(self, path: Path, make: Callable[[], object]) -> None:
        """The main process calls ``make``, which leaves a file at ``path``; returns when this rank reads the same bytes.

        Raises:
            UserError: not within a minute: the disk is not shared.
        """
        if self.main:
            make()
        if self.ranks > 1:
            written = self.seen(lambda: _digest(path))
            self.await_seen(lambda: _digest(path) == written, path)

    def record(self, path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The JSON record at ``path``, made and written by the main process where there is none."""

        def kept() -> dict[str, Any]:
            if path.exists():
                return json.loads(path.read_text(encoding="utf-8"))
            made = make()
            write_json(path, made)
            return made

        return self.seen(kept)

    def await_seen(self, seen: Callable[[], bool], path: Path) -> None:
        """Returns when this rank sees what another one has written; at once where there is no other.

        Raises:
            UserError: not within a minute; ``path`` is named.
        """
        deadline = time.monotonic() + PATIENCE
        while self.ranks > 1 and not seen():
            if time.monotonic() > deadline:
                raise UserError(
                    f"{path}: what another rank has written there does not show here after {PATIENCE:g} s; "
                    "set output to a folder on a disk that all machines share"
                )
            time.sleep(0.1)


def _digest(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return None
