"""Requests to engines: HTTP/1.1 by httpcore2, a connection each.

Pools look at every open connection for each request, which is too slow with hundreds of streams, and a server may close a connection
after a stream without announcing it. Reads have no timeout; `_watch` in app.py ends idle exchanges.
"""

import contextlib
import functools
import ssl
from collections.abc import AsyncIterator, Iterable
from urllib.parse import urlsplit

import httpcore2

CONNECT_SECONDS = 5.0
_HIGHEST_STATUS = 599


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # It reads all trusted certificates: only for an engine that needs them.


@contextlib.asynccontextmanager
async def ask(
    method: str, root: str, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
) -> AsyncIterator[httpcore2.Response]:
    """Send a request for ``target`` under ``root``; read the response's body from its `stream`. Leaving closes the connection, which aborts
    an unfinished request at the engine.

    Raises httpcore2.LocalProtocolError: the request is not valid HTTP. Raises httpcore2.NetworkError, httpcore2.TimeoutException or
    httpcore2.RemoteProtocolError: the engine cannot be reached, does not answer, or not with HTTP.
    """
    url = urlsplit(root)
    length = [(b"content-length", b"%d" % len(body))] if body else []
    where = url.scheme.encode(), (url.hostname or "").encode(), url.port, url.path.rstrip("/").encode() + target
    request = httpcore2.Request(
        method,
        httpcore2.URL(scheme=where[0], host=where[1], port=where[2], target=where[3]),
        headers=[(b"host", url.netloc.encode()), *headers, *length],
        content=body,
        extensions={"timeout": {"connect": CONNECT_SECONDS}},
    )
    tls = _tls() if url.scheme == "https" else None
    async with httpcore2.AsyncHTTPConnection(request.url.origin, ssl_context=tls) as connection:
        response = await connection.handle_async_request(request)
        if response.status == 101 or response.status > _HIGHEST_STATUS:
            raise httpcore2.RemoteProtocolError(f"status {response.status}")
        yield response
