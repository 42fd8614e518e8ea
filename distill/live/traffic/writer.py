"""Writes the log: one thread appends records from a bounded queue, so that a slow or full disk stops no response."""

import contextlib
import fcntl
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from data.files import sync_directory, write_all, writing
from distill.live.traffic.record import (
    CONVERSATION,
    FORGOTTEN,
    LOCK,
    WRITE_LOCK,
    TrafficRecord,
    add_forgotten,
    forgotten_hashes,
    keyed_hash,
    log_files,
    make_directory,
    prepare_directory,
    remembered,
    to_line,
)
from distill.live.traffic.retention import sweep, write_lock
from speculative.errors import UserError

QUEUE_RECORDS = 4096
BATCH_RECORDS = 256
SWEEP_SECONDS = 3600.0
Done = Callable[[bool], None]


class LogWriter:
    """The only writer of a log directory; any thread may `append`. dropped: records lost because the queue was full. writing: the last
    write succeeded.
    """

    def __init__(
        self, directory: Path, text: bool = False, retention_days: float = 30.0, file_bytes: int = 64 << 20
    ) -> None:
        """``text``: keep token ids. Sweeps run at the start, after each ``file_bytes`` and every hour. Raises UserError: another gateway
        writes here, the directory is another user's and readable by others, or it cannot be written.
        """
        self.directory, self.text, self.file_bytes, self.retention_days = directory, text, file_bytes, retention_days
        self.dropped = 0
        self.writing = True
        make_directory(directory)
        with writing(directory), contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(open(os.open(directory / LOCK, os.O_CREAT | os.O_RDWR, 0o600), "rb"))
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"{directory}: another gateway writes there; give a different --log") from error
            self.salt = prepare_directory(directory)
            files = log_files(directory)
            self._number = int(files[-1].stem.removeprefix("log-")) if files else 1
            if files:
                mend_tail(directory, files[-1])
            opened = os.open(directory / WRITE_LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            self._write_lock = undo.enter_context(open(opened, "rb"))
            undo.pop_all()
        self._file: FileIO | None = None
        self._forgotten: tuple[tuple[int, int], set[str]] = ((0, 0), set())
        self._sweep_now, self._closed = threading.Event(), False
        self._began = time.time(), time.monotonic()
        self._queue: queue.Queue[tuple[TrafficRecord, Done] | None] = queue.Queue(QUEUE_RECORDS)
        self._thread = threading.Thread(target=self._run, name="traffic log", daemon=True)
        self._thread.start()
        self._sweeper = threading.Thread(target=self._sweep, name="traffic sweep", daemon=True)
        self._sweeper.start()

    def append(self, record: TrafficRecord, done: Done = lambda written: None) -> None:
        """Queue a record. ``done`` is called from the writer's thread, or here if the queue is full."""
        try:
            self._queue.put_nowait((record, done))
        except queue.Full:
            self.dropped += 1
            done(False)

    def close(self) -> None:
        """Write the queued records, then release the directory."""
        self._queue.put(None)
        self._thread.join()
        self._closed = True
        self._sweep_now.set()
        self._sweeper.join()
        for file in (self._file, self._write_lock, self._lock):
            if file is not None:
                file.close()

    def _sweep(self) -> None:
        ended = False
        while not ended:
            try:
                now = min(time.time(), self._began[0] + time.monotonic() - self._began[1])
                _, texts = sweep(self.directory, self.retention_days, now)
                if not self.text and not texts:
                    return  # No text is here, and none will be written.
            except (UserError, OSError, ValueError) as error:
                print(f"{error}; old text is kept until the next sweep", file=sys.stderr, flush=True)
            self._sweep_now.wait(SWEEP_SECONDS)
            self._sweep_now.clear()
            ended = self._closed

    def _run(self) -> None:
        ended = False
        while not ended:
            batch = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < BATCH_RECORDS:
                    batch.append(self._queue.get_nowait())
            ended = None in batch
            waiting = [entry for entry in batch if entry is not None]
            written = not waiting or self._try([record for record, _ in waiting])
            for _, done in waiting:
                done(written)

    def _try(self, records: list[TrafficRecord]) -> bool:
        try:
            self._write(records)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            self._say(False, f"cannot be written ({why}); serving continues without a log")
            return False
        self._say(True, "is written again")
        return True

    def _say(self, writing: bool, what: str) -> None:
        if writing != self.writing:
            print(f"{self.directory}: the log {what}", file=sys.stderr, flush=True)
        self.writing = writing

    def _write(self, records: list[TrafficRecord]) -> None:
        """Write all records or none, synced to disk. Raises OSError if that fails."""
        path = self.directory / f"log-{self._number:05d}.jsonl"
        fcntl.flock(self._write_lock, fcntl.LOCK_EX)
        try:
            forgotten = self._read_forgotten()
            # A request forgotten in flight: its conversation is known only here.
            late = (
                one for one in records if keyed_hash(self.salt, FORGOTTEN, one.id) in forgotten and one.conversation
            )
            talks = {keyed_hash(self.salt, CONVERSATION, one.conversation) for one in late}
            if not talks <= forgotten:
                forgotten = add_forgotten(self.directory, talks)
            kept = (remembered(record, self.salt, forgotten) for record in records)
            lines = b"".join(to_line(record if self.text else record.without_text()) for record in kept if record)
            file = self._open(path).fileno()
            size = os.fstat(file).st_size
            try:
                write_all(file, lines)
            except OSError:
                os.ftruncate(file, size)
                raise
        finally:
            fcntl.flock(self._write_lock, fcntl.LOCK_UN)
        os.fsync(file)  # One sync per batch, after releasing the lock; a rewrite syncs its own copy.
        if size + len(lines) >= self.file_bytes:
            self._number += 1
            self._sweep_now.set()

    def _open(self, path: Path) -> FileIO:
        """The open file of that name. It stays open, so that logging needs no free file descriptor; a rewrite may have replaced it."""
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(self._file.fileno())):
                    return self._file
            self._file.close()
            self._file = None
        self._file = FileIO(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a")
        sync_directory(self.directory)
        return self._file

    def _read_forgotten(self) -> set[str]:
        """The forgotten hashes; read again if the file changed."""
        try:
            file = (self.directory / FORGOTTEN).stat()
        except FileNotFoundError:
            return set()
        # mtime ticks only every few milliseconds, but the size grows with each id.
        if (changed := (file.st_mtime_ns, file.st_size)) != self._forgotten[0]:
            self._forgotten = changed, forgotten_hashes(self.directory)
        return self._forgotten[1]


def mend_tail(directory: Path, path: Path) -> None:
    """Remove an incomplete last line that a killed writer left, and print that."""
    with write_lock(directory), path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            print(f"{path}: removed an incomplete line of {len(content) - whole} bytes", file=sys.stderr, flush=True)
