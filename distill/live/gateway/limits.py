"""Limits on clients: time, size and number of requests and connections."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS, BODY_SECONDS = 10.0, 60.0
HEADER_BYTES = 1 << 16  # h11 holds no more of headers, of a chunk's extensions, or of trailers.
HELD_BODY_BYTES = 512 << 20  # of all requests together
_SPARE_CONNECTIONS = 32  # beyond the clients, to answer them with 503


class Refused(Exception):
    """A refused request: status and message."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """clients: answered at once. request_bytes: of one request as sent, including everything around its body. waiting: connections without
    complete request headers, oldest first.
    """

    clients: int
    request_bytes: int
    waiting: "dict[BoundedProtocol, None]" = field(default_factory=dict)


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with limits on connections and on seconds and bytes of each unfinished request, which finds it as `connection` in
    its state.
    """

    def __init__(self, limits: Limits, app_state: dict[str, Any], **others: Any) -> None:
        """``app_state``, ``others``: from uvicorn."""
        super().__init__(app_state=app_state | {"connection": self}, **others)
        self.limits, self.request_bytes = limits, 0
        self.clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a client; beyond the limit, close the connection that has waited longest."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.wait(HEADER_SECONDS)
        if len(self.connections) > self.limits.clients + _SPARE_CONNECTIONS:
            oldest = next(iter(self.limits.waiting))
            del self.limits.waiting[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self.allow(None)
        self.limits.waiting.pop(self, None)
        super().connection_lost(exc)
        self.app_state.clear()  # Breaks reference cycles, so that nothing is left to the garbage collector.

    def data_received(self, data: bytes) -> None:
        """Take the next bytes; the first bytes of a request start its clock."""
        if not self.request_bytes and self in self.limits.waiting:  # not while another request is being answered
            self.allow(HEADER_SECONDS)
        self.request_bytes += len(data)
        if self.request_bytes > self.limits.request_bytes:
            self.transport.abort()
        else:
            super().data_received(data)

    def is_one_too_many(self) -> bool:
        """Whether more clients are being answered than allowed."""
        return len(self.connections) - len(self.limits.waiting) > self.limits.clients

    def wait(self, seconds: float) -> None:
        """Wait this long for the next request, unless the client is gone."""
        if self in self.connections:
            self.request_bytes = 0
            self.limits.waiting[self] = None
            self.allow(seconds)

    def allow(self, seconds: float | None) -> None:
        """Abort the connection after this time, unless called again before; None: never."""
        if self.clock is not None:
            self.clock.cancel()
        self.clock = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


def bounded(app: ASGIApp) -> ASGIApp:
    """The application with a time limit on each request, until `allow` changes it, and on reading the end of its response."""

    async def within(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        connection: BoundedProtocol = scope["state"]["connection"]
        connection.limits.waiting.pop(connection, None)
        connection.allow(BODY_SECONDS + HEADER_SECONDS)
        try:
            await app(scope, receive, send)
        except h11.LocalProtocolError:  # uvicorn already answered that the rest of the request is not HTTP.
            connection.transport.abort()
        finally:
            connection.wait(BODY_SECONDS)
            del scope["state"]["connection"]

    return within


class Bodies:
    """Reads request bodies within two limits: per body and for all bodies together."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    async def read(self, headers: dict[bytes, bytes], receive: Any) -> bytes:
        """Read a whole body; call ``release`` when it is no longer needed.

        Raises Refused: too large, too slow, or too many bodies at once. Raises ConnectionError: the client left.
        """
        told = headers.get(b"content-length", b"0")
        if not told.isdigit() or int(told) > self.most:
            raise Refused(413, f"the request's body is larger than {self.most} bytes")
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionError
                    part, more = message.get("body", b""), message.get("more_body", False)
                    parts.append(part)
                    size, self.held = size + len(part), self.held + len(part)
                    if size > self.most:
                        raise Refused(413, f"the request's body is larger than {self.most} bytes")
                    if self.held > HELD_BODY_BYTES:
                        raise Refused(503, "too many large requests at once")
        except BaseException as error:
            self.held -= size
            if isinstance(error, TimeoutError):
                raise Refused(408, f"the request's body was incomplete after {BODY_SECONDS:g} s") from None
            raise
        return b"".join(parts)

    def release(self, body: bytes) -> None:
        """Free the memory of a body."""
        self.held -= len(body)
