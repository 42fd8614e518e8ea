"""The gateway's log as it grows: each record since a moment, once."""

import os
from pathlib import Path

from distill.live.traffic.record import RecordError, TrafficRecord, from_line, log_files
from speculative.errors import UserError


class LogTail:
    """Reads on from where it stood; a file that was rewritten meanwhile (rotation, retention, forget) from its beginning."""

    def __init__(self, directory: Path, since: float) -> None:
        """``since``: Unix seconds; requests that arrived earlier are left out."""
        self.directory, self.since = directory, since
        self._records: dict[str, TrafficRecord] = {}
        self._stood: dict[Path, tuple[int, int, int]] = {}  # file: (inode, bytes, lines) that were read

    def read(self) -> list[TrafficRecord]:
        """All records since then; of several with one id the last.

        Raises:
            UserError: a line that is damaged or forged (file, line and field are named).
        """
        for path in log_files(self.directory):
            try:
                self._read_on(path)
            except FileNotFoundError:  # retention was quicker
                continue
        return list(self._records.values())

    def _read_on(self, path: Path) -> None:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            inode, place, lines = self._stood.get(path, (status.st_ino, 0, 0))
            if inode != status.st_ino or status.st_size < place:
                place = lines = 0
            if not place and status.st_mtime < self.since:
                return
            file.seek(place)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.splitlines():
            lines += 1
            try:
                record = from_line(line)
            except RecordError as error:
                raise UserError(f"{path}:{lines}: {error}; nobody but the gateway writes here") from error
            if record.time >= self.since:
                self._records[record.id] = record
        self._stood[path] = status.st_ino, place + len(whole), lines
