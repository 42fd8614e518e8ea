"""Where the time of a block goes."""

from __future__ import annotations

import time

import torch


class StageClock:
    """Seconds between marks, by the device's own clock: CUDA events, so that nothing waits; wall clock on a CPU."""

    def __init__(self, device: torch.device, exact: bool):
        self._device = device
        self._cuda = device.type == "cuda"
        self._exact = exact and self._cuda
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        if self._exact:
            torch.cuda.synchronize(self._device)
        if self._cuda and not self._exact:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between consecutive marks; call it after the device was read."""
        if self._events:
            self._events[-1].synchronize()
            return [one.elapsed_time(two) / 1e3 for one, two in zip(self._events, self._events[1:], strict=False)]
        return [two - one for one, two in zip(self._marks, self._marks[1:], strict=False)]
