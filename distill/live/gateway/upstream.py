"""Connections to engines: httpcore's HTTP/1.1 (what httpx speaks) over asyncio's streams.

httpx's own pool looks at every open connection at each begin and end of a request; with hundreds of open streams that takes longer than all
else here. So the few idle connections are kept by this file. Reads have no clock of their own: idle exchanges are ended by their watch.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpcore

CONNECT_SECONDS = 5.0
_IDLE_SECONDS = 2.0  # Less than engines keep a connection open, so that none is taken that is about to close.
_IDLE_MOST = 32  # of one engine
_READ_BYTES = 1 << 16


class _Stream(httpcore.AsyncNetworkStream):
    """httpcore's idea of a socket. Its buffer is bounded: what nobody reads stays with the engine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            return await self.reader.read(max_bytes)
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            self.writer.write(buffer)
            await self.writer.drain()
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    async def aclose(self) -> None:
        self.writer.close()

    def get_extra_info(self, info: str) -> Any:
        return self.reader.at_eof() or bool(self.reader._buffer) if info == "is_readable" else None  # type: ignore[attr-defined]


class Upstream:
    """Engines as clients see them. Used from one event loop."""

    def __init__(self) -> None:
        self._idle: dict[str, list[httpcore.AsyncHTTP11Connection]] = {}
        self._tls = ssl.create_default_context()

    @contextlib.asynccontextmanager
    async def ask(
        self, method: str, root: str, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> AsyncIterator[httpcore.Response]:
        """The engine's answer to a request of ``target`` under ``root``, its body still to come. A connection whose answer was not read to its end is closed, which ends the request
        at the engine.

        Raises:
            OSError: the engine cannot be reached.
            httpcore.NetworkError, httpcore.ProtocolError: it does not answer, or not in HTTP.
        """
        url = httpcore.URL(root)
        url = httpcore.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target.rstrip(b"/") + target)
        sent = [(b"host", root.partition("//")[2].partition("/")[0].encode()), *headers]
        if body:
            sent.append((b"content-length", b"%d" % len(body)))
        request = httpcore.Request(method, url, headers=sent, content=body)
        connection = await self._connection(request.url.origin)
        try:
            response = await connection.handle_async_request(request)
            try:
                yield response
            finally:
                await response.aclose()
        finally:
            idle = self._idle.setdefault(str(request.url.origin), [])
            # An engine that said more than its answer is not asked again there: the next client would get the rest.
            if connection.is_idle() and not connection._h11_state.trailing_data[0] and len(idle) < _IDLE_MOST:
                idle.append(connection)
            else:
                await connection.aclose()

    async def _connection(self, origin: httpcore.Origin) -> httpcore.AsyncHTTP11Connection:
        idle = self._idle.get(str(origin), [])
        while idle:
            connection = idle.pop()
            if not connection.has_expired():
                return connection
            await connection.aclose()
        tls = self._tls if origin.scheme == b"https" else None
        async with asyncio.timeout(CONNECT_SECONDS):
            streams = await asyncio.open_connection(origin.host.decode(), origin.port, ssl=tls, limit=_READ_BYTES)
        return httpcore.AsyncHTTP11Connection(origin, _Stream(*streams), keepalive_expiry=_IDLE_SECONDS)

    async def close(self) -> None:
        """Closes what is idle."""
        for connections in self._idle.values():
            for connection in connections:
                await connection.aclose()
