"""Ctrl-C while training: finish the step, write a checkpoint, leave."""

import signal
import sys
from typing import Any


class Interrupt:
    """Ctrl-C sets a flag that the loop reads between steps; a second one stops at once."""

    def __init__(self) -> None:
        """Takes the handlers over until `restore`."""
        self.requested = False
        self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping after this step, with a checkpoint; once more stops at once", file=sys.stderr)

    def restore(self) -> None:
        """Puts the earlier handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
