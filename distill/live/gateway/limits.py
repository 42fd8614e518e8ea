"""Limits on clients beyond uvicorn's own: time for a request's headers and body, and bytes of a body and of all bodies together."""

import asyncio
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS, BODY_SECONDS = 10.0, 60.0
HEADER_BYTES = 1 << 16  # h11 holds no more of headers, of a chunk's extensions, or of trailers.
MOST_BODY_BYTES = 64 << 20
HELD_BODY_BYTES = 512 << 20  # of all requests together


class Refused(Exception):
    """A refused request: status and message."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class TimedProtocol(H11Protocol):
    """uvicorn's protocol, which aborts a connection without complete headers, and one whose client does not read the end of a response.

    A request finds it as `connection` in its state.
    """

    def __init__(self, app_state: dict[str, Any], **others: Any) -> None:
        """``app_state``, ``others``: from uvicorn."""
        super().__init__(app_state=app_state | {"connection": self}, **others)
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a client."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._wait(HEADER_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Take the next bytes."""
        super().data_received(data)
        self._wait(HEADER_SECONDS)

    def on_response_complete(self) -> None:
        """Wait for the client to read the rest and to send its next request."""
        super().on_response_complete()
        self._wait(BODY_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_clock()
        super().connection_lost(exc)

    def _wait(self, seconds: float) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_clock()
        elif self._clock is None and self in self.connections:
            self._clock = self.loop.call_later(seconds, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


def guarded(app: ASGIApp) -> ASGIApp:
    """The application, which aborts a connection on which uvicorn already answered that the rest of the request is not HTTP."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except h11.LocalProtocolError:
            scope["state"]["connection"].transport.abort()

    return guard


class Bodies:
    """Reads request bodies within the limits."""

    def __init__(self) -> None:
        self.held = 0

    async def read(self, headers: dict[bytes, bytes], receive: Any) -> bytes:
        """Read a whole body; call ``release`` when it is no longer needed.

        Raises Refused: too large, too slow, or too many bodies at once. Raises ConnectionError: the client left.
        """
        length, size = headers.get(b"content-length", b"0"), 0
        try:
            self._check(int(length) if length.isdigit() else MOST_BODY_BYTES + 1)
            parts = []
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionError
                    parts.append(message.get("body", b""))
                    size, self.held = size + len(parts[-1]), self.held + len(parts[-1])
                    self._check(size)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except BaseException as error:
            self.held -= size
            if isinstance(error, TimeoutError):
                raise Refused(408, f"the request's body was incomplete after {BODY_SECONDS:g} s") from None
            raise

    def _check(self, size: int) -> None:
        if size > MOST_BODY_BYTES:
            raise Refused(413, f"the request's body is larger than {MOST_BODY_BYTES} bytes")
        if self.held > HELD_BODY_BYTES:
            raise Refused(503, "too many large requests at once")

    def release(self, body: bytes) -> None:
        """Free the memory of a body."""
        self.held -= len(body)
