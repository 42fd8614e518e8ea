"""A run: its folder, the ranks that share it, and the time of its stages."""

import contextlib
import functools
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from filelock import AcquireReturnProxy

from data.files import write_bytes, write_json, writing
from distill.config.layout import CHECKPOINTS, CONFIG, ROLLOUTS, SELF_CHECKS, STUDENT_NOTES
from distill.config.load import dump_config, load_config, parse_config
from distill.config.origin import remember_origin, spelled
from distill.config.run import RunConfig
from distill.run.lock import hold
from speculative.errors import UserError
from speculative.measure.record import Record
from speculative.progress import each, hide, phase

PATIENCE = 60.0  # Seconds. NFS caches the contents of a folder for 3 to 60.
# How long a rank waits in a collective of a training step. After that a stuck or lost rank ends the run.
STEP_LIMIT = timedelta(minutes=10)
# How long ranks wait for work that one rank does alone: judging, answering, the verdict.
WORK_LIMIT = timedelta(hours=12)
Seen = TypeVar("Seen")
Piece = TypeVar("Piece")


@dataclass
class Progress:
    """State of a resumed run besides tensors. The position in the data follows from `step`."""

    step: int = 0
    tokens_seen: int = 0
    best_step: int | None = None
    best_score: float | None = None
    judged_without_gain: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def spend(self, stage: str, seconds: float) -> None:
        """Add to the time spent in a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Show the block as a phase, and add its wall-clock seconds, unless it fails."""
        started = time.perf_counter()
        with phase(stage.replace("_", " ")):
            yield
        self.spend(stage, time.perf_counter() - started)


def new_accelerator(**options: Any) -> Accelerator:
    """An Accelerator on the best device with float64, which sums need. Apple's GPU lacks it, so its CPU is used."""
    short = InitProcessGroupKwargs(timeout=STEP_LIMIT)
    # Without `cpu`, each of several processes without a device would believe that it is the only one.
    none = not (torch.cuda.is_available() or torch.accelerator.is_available())
    return Accelerator(cpu=none or torch.backends.mps.is_available(), kwargs_handlers=[short], **options)


class Run:
    """Shared state of the programs of a run. The main process makes what is made once, and every rank reads it.

    If the main process fails it exits, and the launcher ends the ranks that wait for it (`distill.faults`).
    """

    def __init__(self, config: RunConfig, accelerator: Accelerator | None = None, progress: Progress | None = None):
        """``accelerator``: default: a new one for this process. ``progress``: where an earlier start stopped."""
        self.config, self.folder = config, config.folder
        self.accelerator = accelerator or new_accelerator()
        self.progress = progress or Progress()
        self._held: AcquireReturnProxy | None = None
        # Of this process: whether it is the main one, its rank (0 .. ranks - 1) and its device. ranks: processes that share the run.
        self.main, self.rank = self.accelerator.is_main_process, self.accelerator.process_index
        self.ranks, self.device = self.accelerator.num_processes, self.accelerator.device
        if not self.main:
            hide()

    def claim(self) -> None:
        """Lock the folder on the main process until the run or the process ends; see `claim_folder`."""

        def claimed() -> None:
            self._held = hold(self.folder)
            claim_folder(self.config)

        self.wait()  # The ranks form their group first, so that all of them notice when one is refused.
        self.once(self.folder / CONFIG, claimed)

    @property
    def claimed(self) -> bool:
        """Whether this process holds the run's folder; on the main process only."""
        return self._held is not None

    def end(self, last: Callable[[], object] = lambda: None) -> None:
        """Finish the trackers, part from the other ranks, do what is ``last``, and release the folder."""
        self.accelerator.end_training()
        last()
        self._held = None

    def say(self, line: str) -> None:
        """Print on the main process, at once also where a file is read while it grows."""
        self.accelerator.print(line, flush=True)

    @functools.cached_property
    def _patient(self) -> dist.ProcessGroup:
        """The process group, on the CPU, in which ranks wait for each other's work. All ranks must call it."""
        return dist.new_group(backend="gloo", timeout=WORK_LIMIT)

    def wait(self) -> None:
        """Wait for all ranks, even if one of them works for hours."""
        if self.ranks > 1:
            dist.barrier(self._patient)

    def seen(self, look: Callable[[], Seen]) -> Seen:
        """Return what ``look`` returns on the main process, on every rank. On a network disk other machines see new files later."""
        # Before the look, because ranks have only minutes to form a group.
        group = self._patient if self.ranks > 1 else None
        found = [look() if self.main else None]
        if group is not None:
            dist.broadcast_object_list(found, group=group, device=torch.device("cpu"))
        return found[0]  # type: ignore[return-value]

    def gathered(self, value: Seen) -> list[Seen]:
        """What each rank gives, by rank, on every rank. All ranks must call it."""
        gathered: list[Any] = [value]
        if self.ranks > 1:
            gathered *= self.ranks
            dist.all_gather_object(gathered, value, group=self._patient)
        return gathered

    def dealt(
        self, folder: Path, name: str, pieces: Sequence[Piece], work: Callable[[Piece], Any], alone: bool = False
    ) -> list[Any]:
        """The JSON results of ``work`` for all pieces, in order, on every rank. All ranks must call it with the same pieces.

        The ranks take the pieces in turn, or the main process all of them if ``alone``. Results are kept in ``folder``, so that
        a killed run does not repeat them; the caller deletes it.

        Raises UserError: ``folder`` cannot be written.
        """
        results = {}
        for index, piece in each(enumerate(pieces), f"{name.partition('-')[0]}, parts", len(pieces)):
            if self.rank == (0 if alone else index % self.ranks):
                path = folder / f"{name}-{index:04d}.json"
                if not path.exists():
                    result = work(piece)
                    with writing(path):
                        folder.mkdir(exist_ok=True)
                        write_json(path, result)
                results[index] = json.loads(path.read_text(encoding="utf-8"))
        found = {index: result for part in self.gathered(results) for index, result in part.items()}
        return [found[index] for index in range(len(pieces))]

    def once(self, path: Path, make: Callable[[], object]) -> None:
        """Call ``make``, which writes a file at ``path``, on the main process; return when this rank reads the same bytes.

        Raises UserError: not within a minute, because the disk is not shared.
        """
        if self.main:
            make()
        if self.ranks > 1:
            written = self.seen(lambda: _digest(path))
            self.await_seen(lambda: _digest(path) == written, path)

    def record(self, path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The JSON record at ``path``; the main process makes and writes it if it is missing."""

        def kept() -> dict[str, Any]:
            if path.exists():
                return Record.read(path).record()
            made = make()
            write_json(path, made)
            return made

        return self.seen(kept)

    def await_seen(self, seen: Callable[[], bool], path: Path) -> None:
        """Wait until this rank sees what another one has written; return at once if there is no other.

        Raises UserError: not within a minute; the message starts with ``path``.
        """
        deadline = time.monotonic() + PATIENCE
        while self.ranks > 1 and not seen():
            if time.monotonic() > deadline:
                raise UserError(
                    f"{path}: another rank wrote this, but it is not visible here after {PATIENCE:g} s; "
                    "set output to a folder on a disk that all machines share"
                )
            time.sleep(0.1)


def _digest(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return None


# Keys that may change when a run resumes: they do not affect what is trained, only where it runs and how it is shown.
_MAY_DIFFER = """
output target.shard target.device_map student.gradient_checkpointing serving.engine target.endpoint target.endpoint.urls
target.endpoint.api_key_env target.endpoint.concurrency target.endpoint.timeout
train.micro_batch_size loss.chunk_tokens serving.batch_size judge.batch_size judge.live judge.live_prompts
judge.speed_prompts judge.speed_seconds judge.speed_threads judge.served tracking.trackers export.quantize
"""
MAY_DIFFER = frozenset(_MAY_DIFFER.split())


def claim_folder(config: RunConfig) -> None:
    """Make the run's folder, or accept one with the same config (apart from `MAY_DIFFER`).

    Raises UserError: it holds another config (the message gives the first difference), or it cannot be written.
    """
    folder = config.folder
    path = folder / CONFIG
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remember_origin(folder)
        tree = spelled(config.model_dump(mode="json"), folder)
        text = dump_config(parse_config(tree, str(path)))
        # Before the first checkpoint only responses depend on the config, and their manifests are checked. So a failed
        # start may be repeated with another config.
        if path.exists() and (folder / CHECKPOINTS).exists():
            old_tree = spelled(load_config(path).model_dump(mode="json"), folder)
            if difference := _first_difference(old_tree, tree, set(MAY_DIFFER)):
                key, old, new = difference
                raise UserError(
                    f"{folder}: holds a run with another config ({key} is {old}, now {new}); "
                    f"choose another name=... (its responses may be copied there), or delete the folder"
                )
        elif path.exists() and path.read_text(encoding="utf-8") != text:
            shutil.rmtree(folder / ROLLOUTS, ignore_errors=True)  # by a draft of the earlier config
            for stale in (SELF_CHECKS, STUDENT_NOTES):
                (folder / stale).unlink(missing_ok=True)
        write_bytes(path, text.encode())
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); set output=... to a writable one") from error


def _first_difference(old: Any, new: Any, may: set[str], key: str = "") -> tuple[str, str, str] | None:
    """(dotted key, old value, new value) of the first difference between two trees; keys in ``may`` are ignored."""
    if isinstance(old, dict) and isinstance(new, dict):
        below = ((name, f"{key}.{name}".lstrip(".")) for name in {**old, **new})
        found = (_first_difference(old.get(name), new.get(name), may, inner) for name, inner in below)
        return next(filter(None, found), None)
    return None if old == new or key in may else (key, json.dumps(old), json.dumps(new))
