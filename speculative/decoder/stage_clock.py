"""Where the time of a block, or of a training step, goes."""

import time

import torch


class StageClock:
    """Each `mark` books the time since the one before, the first since the start, under a stage.

    By the device's own clock: CUDA events, so that nothing waits; wall clock on a CPU. With `exact` every mark waits for the
    device, and the wall clock is read.
    """

    def __init__(self, device: torch.device, exact: bool = False) -> None:
        """Starts at once."""
        self._device, self._exact = device, exact and device.type == "cuda"
        self._by_events = device.type == "cuda" and not exact
        self.start()

    def start(self) -> None:
        """From here on, and nothing booked."""
        self._stages: list[str] = []
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._read()

    def mark(self, stage: str) -> None:
        """What was done since the last mark belongs to a stage."""
        self._stages.append(stage)
        self._read()

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage since the start, all its marks together; on CUDA it waits for the last mark."""
        if self._by_events:
            if not self._events[-1].query():
                self._events[-1].synchronize()
            between = [one.elapsed_time(two) / 1e3 for one, two in zip(self._events, self._events[1:], strict=False)]
        else:
            between = [two - one for one, two in zip(self._marks, self._marks[1:], strict=False)]
        spent = dict.fromkeys(self._stages, 0.0)
        for stage, seconds in zip(self._stages, between, strict=True):
            spent[stage] += seconds
        return spent

    def _read(self) -> None:
        if self._by_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
            return
        if self._exact:
            torch.cuda.synchronize(self._device)
        self._marks.append(time.perf_counter())
