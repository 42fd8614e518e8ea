"""Where the time of a training step goes, by stage."""

import time

import torch

# data: micro-batches, rollouts when they are due; teacher: the target's layers, or reading its store; student: the draft's layers,
# forward and backward; loss: the head products of both models and the divergence.
STAGES = ("data", "teacher", "student", "loss", "optimizer")


class StepClock:
    """Each `mark` books the time since the one before under a stage; on CUDA by events, so that nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        """Stands still until `start`."""
        self._device = device
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def start(self) -> None:
        """A new step begins."""
        self._marks = []
        self.mark("")

    def mark(self, stage: str) -> None:
        """What was done since the last mark belongs to a stage."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append((stage, event))
        else:
            self._marks.append((stage, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage in this step; on CUDA it waits for the last mark."""
        spent = dict.fromkeys(STAGES, 0.0)
        for (_, before), (stage, now) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(now, torch.cuda.Event):
                now.synchronize()
                spent[stage] += before.elapsed_time(now) / 1e3  # type: ignore[union-attr]
            else:
                spent[stage] += now - before  # type: ignore[operator]
        return spent
