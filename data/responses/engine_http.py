"""HTTP to engines: to one server only, bounded in bytes and seconds, and with no key but the one that was asked for."""

import contextlib
import ipaddress
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import httpx2

from speculative.errors import UserError

PAGE_BYTES, PAGE_SECONDS = 1 << 24, 10.0
# openai adds headers from its environment (an organization, OPENAI_CUSTOM_HEADERS). It looks for the last one itself.
_SENT = {
    "host", "accept", "accept-encoding", "connection", "content-type", "content-length", "user-agent", "x-stainless-raw-response",
}  # fmt: skip


class Page(NamedTuple):
    """What a server says at an address."""

    status: int
    text: str


class _Bounded(httpx2.SyncByteStream):
    """A body that is refused after so many bytes."""

    def __init__(self, body: httpx2.SyncByteStream, url: str, most_bytes: int) -> None:
        self.body, self.url, self.most_bytes = body, url, most_bytes

    def __iter__(self) -> Iterator[bytes]:
        length = 0
        for part in self.body:
            length += len(part)
            if length > self.most_bytes:
                raise UserError(f"{self.url}: its answer is longer than {self.most_bytes:,} bytes: is it an engine?")
            yield part

    def close(self) -> None:
        self.body.close()


def engine_http(
    url: str, key: str = "", *, most_bytes: int = PAGE_BYTES, timeout: float = PAGE_SECONDS, direct: bool = False
) -> httpx2.Client:
    """A client of the server at ``url``: it follows redirects on that server, reads at most ``most_bytes`` of an answer and waits ``timeout`` seconds for the next byte.

    ``key``: sent as a bearer token. ``direct``: past the proxies of the environment, as it always is to this machine. Its requests
    raise UserError for a redirect to another server or an answer that is too long.
    """
    home = httpx2.URL(url)

    def leave(request: httpx2.Request) -> None:
        if _origin(request.url) != _origin(home):
            raise UserError(f"{url}: redirects to {request.url.scheme}://{request.url.netloc.decode()}: not followed")
        for name in set(request.headers) - _SENT:
            del request.headers[name]
        if key:
            request.headers["authorization"] = f"Bearer {key}"

    def arrive(response: httpx2.Response) -> None:
        # It was asked for plain bytes: a compressed answer would grow past the bound.
        response.headers.pop("content-encoding", None)
        assert isinstance(response.stream, httpx2.SyncByteStream)
        response.stream = _Bounded(response.stream, url, most_bytes)

    return httpx2.Client(
        timeout=timeout, follow_redirects=True, trust_env=not (direct or _is_here(home.host)),
        verify=home.scheme == "https", headers={"accept-encoding": "identity"},
        limits=httpx2.Limits(max_connections=None), event_hooks={"request": [leave], "response": [arrive]},
    )  # fmt: skip


@contextlib.contextmanager
def within(seconds: float, url: str, close: Callable[[], None]) -> Iterator[None]:
    """Closes a client after so many seconds: its own limit is for one read, and a server may send a byte at a time for ever.

    Raises:
        UserError: the time is over.
    """
    late = threading.Event()
    timer = threading.Timer(seconds, lambda: (late.set(), close()))
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if late.is_set():
            raise UserError(f"{url}: no whole answer within {seconds:g} s") from error
        raise
    finally:
        timer.cancel()


def page_at(
    url: str, key: str = "", *, body: object = None, direct: bool = False, seconds: float = PAGE_SECONDS
) -> Page | None:
    """The page at an address, whatever its status; None where there is no answer within bounds. ``body``: posted as JSON."""
    try:
        client = engine_http(url, key, timeout=seconds, direct=direct)
        with client, within(seconds, url, client.close):
            answer = client.get(url) if body is None else client.post(url, json=body)
    except (OSError, ValueError, httpx2.HTTPError, httpx2.InvalidURL):
        return None
    return Page(answer.status_code, answer.content.decode(errors="replace"))


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _is_here(host: str) -> bool:
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    return host == "localhost"
