"""Connections to engines: HTTP/1.1 with h11 over asyncio's streams.

The connection pool of a client library checks every open connection at the start and end of each request, which is too slow with hundreds of
streams. So this file keeps the few idle connections itself. Reads have no timeout; `_watch` in app.py ends idle exchanges.
"""

import asyncio
import contextlib
import functools
import ssl
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11

CONNECT_SECONDS = 5.0
_IDLE_SECONDS = 2.0  # Shorter than engines keep a connection open, so that none is reused while it closes.
_IDLE_MOST = 32  # of one engine
_READ_BYTES = 1 << 16  # Unread bytes stay with the engine.
_HEAD_BYTES = 1 << 16
_HIGHEST_STATUS = 599


@dataclass(frozen=True)
class Answer:
    """An engine's response. headers: names in lower case. pieces: of its body, as they arrive."""

    status: int
    headers: list[tuple[bytes, bytes]]
    pieces: AsyncIterator[bytes]


@dataclass(frozen=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    http: h11.Connection

    async def send(self, *events: h11.Event) -> None:
        self.writer.writelines([self.http.send(event) or b"" for event in events])
        await self.writer.drain()

    async def head(self) -> Any:
        """The response's status and headers, after informational responses."""
        while type(event := self.http.next_event()) is not h11.Response:
            if type(event) is not h11.InformationalResponse:
                await self._more(event)
        return event

    async def pieces(self) -> AsyncIterator[bytes]:
        """The response's body: one piece per read."""
        parts: list[bytes] = []
        while type(event := self.http.next_event()) is not h11.EndOfMessage:
            if isinstance(event, h11.Data):
                parts.append(event.data)
                continue
            if parts:
                yield b"".join(parts)
                parts = []
            await self._more(event)
        if parts:
            yield b"".join(parts)

    async def _more(self, event: Any) -> None:
        if event is not h11.NEED_DATA:  # It switched protocols or closed the connection.
            raise h11.RemoteProtocolError(f"{event} instead of an answer")
        self.http.receive_data(await self.reader.read(_READ_BYTES))

    def reset(self) -> bool:
        """Prepare for another request; False unless the response is complete without surplus bytes, which the next client would get."""
        both = self.http.our_state, self.http.their_state
        if both != (h11.DONE, h11.DONE) or self.http.trailing_data[0]:
            return False
        self.http.start_next_cycle()
        return True

    async def is_silent(self) -> bool:
        """Whether the engine has neither closed the connection nor sent anything since its last response."""
        try:
            async with asyncio.timeout(0):
                await self.reader.read(1)
        except TimeoutError:
            return True
        except OSError:
            pass
        return False


class Upstream:
    """Sends requests to engines. Used from one event loop."""

    def __init__(self) -> None:
        self._idle: dict[str, list[tuple[float, _Connection]]] = {}

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()  # It reads all trusted certificates: only for an engine that needs them.

    @contextlib.asynccontextmanager
    async def ask(
        self, method: str, root: str, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> AsyncIterator[Answer]:
        """Send a request for ``target`` under ``root``; the response's body is read later. If it is not read to the end, the connection is
        closed, which aborts the request at the engine.

        Raises OSError: the engine cannot be reached. Raises h11.LocalProtocolError: the request is not valid HTTP. Raises
        h11.RemoteProtocolError: the engine does not answer, or not with HTTP.
        """
        url = urlsplit(root)
        sent = [(b"host", url.netloc.encode()), *headers]
        if body:
            sent.append((b"content-length", b"%d" % len(body)))
        request = h11.Request(method=method, target=url.path.rstrip("/").encode() + target, headers=sent)
        connection, chunked = await self._connection(root), False
        try:
            await connection.send(request, h11.Data(data=body), h11.EndOfMessage())
            head = await connection.head()
            if head.status_code > _HIGHEST_STATUS:
                raise h11.RemoteProtocolError(f"status {head.status_code}")
            # llama-server closes a connection after every stream without announcing it, and the next request would get no answer.
            chunked = any(name == b"transfer-encoding" for name, _ in head.headers)
            yield Answer(head.status_code, list(head.headers), connection.pieces())
        finally:
            idle = self._idle.setdefault(root, [])
            if len(idle) < _IDLE_MOST and not chunked and connection.reset():
                idle.append((time.monotonic() + _IDLE_SECONDS, connection))
            else:
                connection.writer.close()

    async def _connection(self, root: str) -> _Connection:
        idle = self._idle.get(root, [])
        while idle:
            until, connection = idle.pop()
            if time.monotonic() < until and await connection.is_silent():
                return connection
            connection.writer.close()
        url = urlsplit(root)
        port, tls = (443, self._tls) if url.scheme == "https" else (80, None)
        async with asyncio.timeout(CONNECT_SECONDS):
            streams = await asyncio.open_connection(url.hostname, url.port or port, ssl=tls, limit=_READ_BYTES)
        return _Connection(*streams, h11.Connection(h11.CLIENT, _HEAD_BYTES))

    def close_idle(self, seconds: float = 0.0) -> None:
        """Close connections that are idle for too long, or will be within ``seconds``."""
        now = time.monotonic() + seconds
        for root, connections in list(self._idle.items()):
            for until, connection in connections:
                if until <= now:
                    connection.writer.close()
            # The same list: `_connection` may be looking at it.
            connections[:] = [one for one in connections if one[0] > now]
            if not connections:
                del self._idle[root]
