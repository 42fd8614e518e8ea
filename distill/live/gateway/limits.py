"""What a client may not do: send a request slowly, without end or too large, stand still, open connections without number."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS, BODY_SECONDS = 10.0, 60.0
HEADER_BYTES = 1 << 16  # h11 holds no more of headers, of a chunk's extensions, or of trailers.
HELD_BODY_BYTES = 512 << 20  # of all requests together
_SPARE_CONNECTIONS = 32  # above the clients: they are told that there are too many


class Refused(Exception):
    """A request that goes to no engine: status, and what is said."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """clients: that are answered at once. request_bytes: of one request as it is sent, with all that surrounds its body. waiting: connections
    without a request whose headers are whole, the oldest first.
    """

    clients: int
    request_bytes: int
    waiting: "dict[BoundedProtocol, None]" = field(default_factory=dict)


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with limits on connections and, for each unfinished request, on seconds and bytes.

    A request finds it as `connection` in its state.
    """

    def __init__(self, limits: Limits, app_state: dict[str, Any], **others: Any) -> None:
        """``app_state``, ``others``: as uvicorn gives them."""
        super().__init__(app_state=app_state | {"connection": self}, **others)
        self.limits, self.request_bytes = limits, 0
        self.clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client; beyond the limit it takes the place of the one that has waited longest."""
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
        self.app_state.clear()  # Neither this nor a request's state refers to it, so that nothing is left to the garbage collector.

    def data_received(self, data: bytes) -> None:
        """The next bytes; the first of a request start its clock."""
        if not self.request_bytes and self in self.limits.waiting:  # not behind a request that is being answered
            self.allow(HEADER_SECONDS)
        self.request_bytes += len(data)
        if self.request_bytes > self.limits.request_bytes:
            self.transport.abort()
        else:
            super().data_received(data)

    def is_one_too_many(self) -> bool:
        """Whether more clients are being answered than may be, this one among them."""
        return len(self.connections) - len(self.limits.waiting) > self.limits.clients

    def wait(self, seconds: float) -> None:
        """For the next request, unless the client is gone."""
        if self in self.connections:
            self.request_bytes = 0
            self.limits.waiting[self] = None
            self.allow(seconds)

    def allow(self, seconds: float | None) -> None:
        """The connection is cut off so many seconds from now, unless that changes before; None: it is not."""
        if self.clock is not None:
            self.clock.cancel()
        self.clock = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


def bounded(app: ASGIApp) -> ASGIApp:
    """The application, with a limit on the seconds of each request until `allow` changes it, and of taking the end of its answer."""

    async def within(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        connection: BoundedProtocol = scope["state"]["connection"]
        connection.limits.waiting.pop(connection, None)
        connection.allow(BODY_SECONDS + HEADER_SECONDS)
        try:
            await app(scope, receive, send)
        except (
            h11.LocalProtocolError
        ):  # uvicorn found the rest of the request to be no HTTP, and said so before this answer began.
            connection.transport.abort()
        finally:
            connection.wait(BODY_SECONDS)
            del scope["state"]["connection"]

    return within


class Bodies:
    """Reads request bodies within limits: of one, and of all that are held."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    async def read(self, headers: dict[bytes, bytes], receive: Any) -> bytes:
        """A whole body; ``release`` gives its room back.

        Raises:
            Refused: too large, too slow, or too much is held already.
            ConnectionError: the client left.
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
                raise Refused(408, f"the request's body was not whole after {BODY_SECONDS:g} s") from None
            raise
        return b"".join(parts)

    def release(self, body: bytes) -> None:
        """The body is no longer needed."""
        self.held -= len(body)
