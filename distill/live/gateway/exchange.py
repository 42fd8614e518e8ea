"""One request and its response in flight, and the record made of them."""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any

from distill.live.arms import Arm
from distill.live.gateway.request import LoggedRequest
from distill.live.gateway.tap import Tap
from distill.live.traffic.record import FINISHES, TrafficRecord, keyed_hash

_TEXT = ("prompt_tokens", "response_tokens", "prompt_ids", "response_ids")
_COUNTS = ("accepted", "drafted", "blocks", "accepted_B", "drafted_B")


@dataclass(eq=False)
class Exchange:
    """Times are seconds of time.perf_counter; arrived is Unix time.

    scope, receive, send: the client's ASGI callables. task: answers the request. moved: when a byte last moved. why_ended: `cancelled` (the
    client left) or `idle`. sending: the client has not yet taken what was sent. status: sent to the client. recorded: the record is
    made, or there will be none.
    """

    request: LoggedRequest
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
        """Cancel the exchange."""
        if not self.why_ended:
            self.why_ended = why
            self.task.cancel()

    def record(self, finish: str, salt: bytes) -> TrafficRecord:
        """The record. Inconsistent counts are left out and set ``tap.odd_counts``. Call after ``tap.end``.

        Raises ValueError: the record is invalid even without counts.
        """
        request, arm, tap = self.request, self.arm, self.tap
        values: dict[str, Any] = {
            "id": request.id,
            "time": self.arrived,
            "slice": self.slice,
            "arm": arm.name,
            "draft_version": arm.draft_version,
            "target_version": arm.target_version,
            "sampling": request.sampling,
            "constrained": request.constrained,
            "prompt_hash": keyed_hash(salt, "prompt", request.content),
            "conversation": keyed_hash(salt, "conversation", request.conversation.decode("latin-1")),
            "first_token_s": self.first_token_s,
            "total_s": round(time.perf_counter() - self.began, 6),
            "finish": finish if finish in FINISHES else "unknown",
        }
        if tap is not None:
            values |= {key: getattr(tap, key) for key in _TEXT}
            with contextlib.suppress(ValueError):
                return TrafficRecord(**values, **{key: getattr(tap.counts, key) for key in _COUNTS if tap.counts})
            tap.odd_counts = True
        return TrafficRecord(**values)
