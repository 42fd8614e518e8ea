"""What a GPU would have waited for, and what was sent to it, by the line of our code that asked."""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
OWN_FOLDER = str(Path(__file__).parent)
READ, SYNCHRONIZED = "read", "synchronized"


def site() -> str:
    """`file.py:line` of the innermost frame in our product, else in our tests."""
    frame, outside = sys._getframe(1), "?"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(str(ROOT)) and not name.startswith(OWN_FOLDER) and "site-packages" not in name:
            place = f"{Path(name).name}:{frame.f_lineno}"
            if not name.startswith(str(ROOT / "tests")):
                return place
            outside = place if outside == "?" else outside
        frame = frame.f_back  # type: ignore[assignment]
    return outside


class Ledger:
    """Counts since the last `clear`.

    reads: the host waited for a value of the device, by (what, site). synchronized: it waited for an event, a stream or the
    device. uploads: copies to the device, by (whether the host waited, site). downloads: copies to pinned memory that nobody waited
    for, by site. kernels: calls for the device outside graphs; replays: launches of graphs; replayed_kernels: of all those graphs.
    captures: (side stream, error mode) of each begun capture. failed_captures: what a capture met that none may contain; on a GPU
    torch's allocator believes in such a capture ever after.
    """

    def __init__(self) -> None:
        self.sync_mode = "default"
        self.clear()

    def clear(self) -> None:
        """Forget all counts."""
        self.reads: Counter[tuple[str, str]] = Counter()
        self.synchronized: Counter[tuple[str, str]] = Counter()
        self.uploads: Counter[tuple[bool, str]] = Counter()
        self.downloads: Counter[str] = Counter()
        self.captures: list[tuple[bool, str]] = []
        self.failed_captures: list[str] = []
        self.kernels = self.replays = self.replayed_kernels = 0

    @property
    def blocking_uploads(self) -> int:
        """Copies to the device that the host waited for."""
        return sum(count for (blocking, _), count in self.uploads.items() if blocking)


LEDGER = Ledger()
