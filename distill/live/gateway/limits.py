"""What a client may not do: send headers slowly or without end, a body that is too large or never whole, stand still."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_SECONDS, BODY_SECONDS = 10.0, 60.0
HEADER_BYTES = 1 << 16
HELD_BODY_BYTES = 512 << 20  # of all requests together


class Refused(Exception):
    """A request that goes to no engine: status, and what is said."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with a clock and a limit on headers; requests find `abort` of their connection in their state."""

    _clock: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client: its headers have so much time."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts what belongs to headers that are not complete."""
        self._header_bytes += len(data)
        super().data_received(data)
        if self._clock is not None and self._header_bytes > HEADER_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """The first byte of a request, of the connection's first or of a later one."""
        super().on_message_begin()
        self.scope["state"]["abort"] = self.transport.abort
        self._stop_clock()
        self._start_clock()

    def on_headers_complete(self) -> None:
        """Headers are whole; from here on the body's limits hold."""
        self._stop_clock()
        super().on_headers_complete()

    def _start_clock(self) -> None:
        self._header_bytes = 0
        self._clock = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._clock = None


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
