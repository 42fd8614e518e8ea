"""HTTP to engines: to one server only, bounded in bytes and seconds, and with no key but the one that was asked for."""

import contextlib
import ipaddress
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus

import httpx2

from speculative.errors import UserError

PAGE_BYTES, PAGE_SECONDS, _HEALTH_SECONDS = 1 << 24, 10.0, 5.0
# openai adds headers from its environment (an organization, OPENAI_CUSTOM_HEADERS). It looks for the last one itself.
_SENT = {
    "host", "accept", "accept-encoding", "connection", "content-type", "content-length", "user-agent", "x-stainless-raw-response",
}  # fmt: skip


def engine_http(
    url: str, key: str = "", *, most_bytes: int = PAGE_BYTES, timeout: float = PAGE_SECONDS, direct: bool = False
) -> httpx2.Client:
    """A client of the server at ``url``: it follows redirects on that server, reads at most ``most_bytes`` of an answer and waits ``timeout`` seconds for the next byte.

    ``key``: sent as a bearer token. ``direct``: past the proxies of the environment, as it always is to this machine. Its requests
    raise UserError for a redirect to another server or an answer that is too long.
    """
    home = httpx2.URL(url)
    direct = direct or home.host == "0.0.0.0" or is_loopback(home.host)

    def leave(request: httpx2.Request) -> None:
        if (request.url.scheme, request.url.netloc) != (home.scheme, home.netloc):
            raise UserError(f"{url}: redirects to {request.url.scheme}://{request.url.netloc.decode()}: not followed")
        for name in set(request.headers) - _SENT:
            del request.headers[name]
        if key:
            request.headers["authorization"] = f"Bearer {key}"

    def arrive(response: httpx2.Response) -> None:
        # It was asked for plain bytes: a compressed answer would grow past the bound.
        response.headers.pop("content-encoding", None)
        stream, body = response.stream, bytearray()
        assert isinstance(stream, httpx2.SyncByteStream)
        with contextlib.closing(stream):
            for part in stream:
                body += part
                if len(body) > most_bytes:
                    raise UserError(f"{url}: its answer is longer than {most_bytes:,} bytes: is it an engine?")
        response.stream = httpx2.ByteStream(bytes(body))

    return httpx2.Client(
        timeout=timeout, follow_redirects=True, mounts=dict.fromkeys(("http://", "https://", "all://")) if direct else None,
        verify=home.scheme == "https", headers={"accept-encoding": "identity"},
        limits=httpx2.Limits(max_connections=None), event_hooks={"request": [leave], "response": [arrive]},
    )  # fmt: skip


@contextlib.contextmanager
def within(seconds: float, url: str, close: Callable[[], None]) -> Iterator[None]:
    """Closes a client after so many seconds: its own limit is for one read, and a server may send a byte at a time for ever.

    Raises:
        UserError: the time is over.
    """
    start, timer = time.monotonic(), threading.Timer(seconds, close)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if time.monotonic() - start >= seconds:
            raise UserError(f"{url}: no whole answer within {seconds:g} s") from error
        raise
    finally:
        timer.cancel()


def page_at(
    url: str, key: str = "", *, body: object = None, direct: bool = False, seconds: float = PAGE_SECONDS
) -> httpx2.Response | None:
    """The page at an address, whatever its status; None where there is no answer within bounds. ``body``: posted as JSON."""
    try:
        client = engine_http(url, key, timeout=seconds, direct=direct)
        with client, within(seconds, url, client.close):
            answer = client.get(url) if body is None else client.post(url, json=body)
    except (OSError, ValueError, httpx2.HTTPError, httpx2.InvalidURL):
        return None
    answer.encoding = "utf-8"  # whatever it says
    return answer


def answers(url: str) -> bool:
    """Whether an engine is healthy: /health where it has one, else its list of models."""
    pages = (page_at(url + path, direct=True, seconds=_HEALTH_SECONDS) for path in ("/health", "/v1/models"))
    found = next((page for page in pages if page is None or page.status_code != HTTPStatus.NOT_FOUND), None)
    return found is not None and found.status_code == HTTPStatus.OK


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host of that name."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
