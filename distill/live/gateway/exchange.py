"""One request and its answer while they pass, and the record that stays of them."""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any

from distill.live.arms import Arm
from distill.live.gateway.request import Asked
from distill.live.gateway.tap import Tap
from distill.live.traffic.record import FINISHES, TrafficRecord, keyed_hash

_TEXT = ("prompt_tokens", "response_tokens", "prompt_ids", "response_ids")
_COUNTS = ("accepted", "drafted", "blocks", "accepted_B", "drafted_B")


@dataclass(eq=False)
class Exchange:
    """Times are of one clock, in seconds; arrived is of the clock on the wall.

    scope, receive, send: its client's, as ASGI has them. task: answers it. moved: when a byte last went on. why_ended: it was cancelled by us, `cancelled` (the client left) or `idle`. sending: the
    client has not yet taken what is sent. status: that the client got. recorded: its record is made, or it leaves none.
    """

    asked: Asked
    arm: Arm
    slice: str
    scope: Any
    receive: Any
    send: Any
    arrived: float
    began: float
    task: asyncio.Task[None]
    moved: float = 0.0
    status: int | None = None
    tap: Tap | None = None
    first_token_s: float | None = None
    why_ended: str = ""
    sending: bool = False
    recorded: bool = False

    def end(self, why: str) -> None:
        """Ends it from outside."""
        if not self.why_ended:
            self.why_ended = why
            self.task.cancel()

    def record(self, finish: str, salt: bytes) -> TrafficRecord:
        """What is kept. Counts that break a law are left out; ``tap.odd_counts`` says so then. Call after ``tap.end``.

        Raises:
            ValueError: what remains breaks one too.
        """
        asked, arm, tap = self.asked, self.arm, self.tap
        known: dict[str, Any] = {
            "id": asked.id, "time": self.arrived, "slice": self.slice, "arm": arm.name, "draft_version": arm.draft_version,
            "target_version": arm.target_version, "sampling": asked.sampling, "constrained": asked.constrained,
            "prompt_hash": keyed_hash(salt, "prompt", asked.content),
            "conversation": keyed_hash(salt, "conversation", asked.conversation.decode("latin-1")),
            "first_token_s": self.first_token_s, "total_s": round(time.perf_counter() - self.began, 6),
            "finish": finish if finish in FINISHES else "unknown",
        }  # fmt: skip
        if tap is not None:
            known |= {key: getattr(tap, key) for key in _TEXT}
            with contextlib.suppress(ValueError):
                return TrafficRecord(**known, **{key: getattr(tap.counts, key) for key in _COUNTS if tap.counts})
            tap.odd_counts = True
        return TrafficRecord(**known)
