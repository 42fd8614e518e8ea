"""What was put on the device's only stream, and how much of it the host knows to be done."""

from collections.abc import Iterator

import torch


def spoiled(tensor: torch.Tensor) -> torch.Tensor:
    """Values of the same shape that nobody can take for those of `tensor`."""
    if tensor.is_floating_point():
        return torch.full_like(tensor, torch.nan)
    return ~tensor if tensor.dtype == torch.bool else torch.full_like(tensor, torch.iinfo(tensor.dtype).max)


class Timeline:
    """The order of recorded events and of copies to the host that nobody waits for.

    A copy arrives when the host learns that something behind it is done; until then its destination holds garbage.
    """

    def __init__(self) -> None:
        self.now = self.known = 0
        self._coming: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def put(self) -> int:
        """One more thing on the stream: its place."""
        self.now += 1
        return self.now

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Where these values will be."""
        destination = spoiled(values)
        self._coming.append((self.put(), destination, values))
        return destination

    @torch.inference_mode()  # Writes to anything, whatever mode the caller is in.
    def reach(self, place: int) -> None:
        """The host knows that everything up to this place is done."""
        self.known = max(self.known, place)
        here = [copy for copy in self._coming if copy[0] <= place]
        self._coming = [copy for copy in self._coming if copy[0] > place]
        for _, destination, values in here:
            destination.copy_(values)

    def answers(self, place: int) -> Iterator[bool]:
        """What a query for this place says, one after the other: not yet, then always done."""
        yield place <= self.known
        while True:
            self.reach(place)
            yield True


TIMELINE = Timeline()
