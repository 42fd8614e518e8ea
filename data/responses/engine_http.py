"""HTTP client for engines: one server only, limited in bytes and seconds, no key except the requested one. And a server's socket."""

import contextlib
import ipaddress
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus

import httpx2

from speculative.errors import UserError

PAGE_BYTES, PAGE_SECONDS, _HEALTH_SECONDS = 1 << 24, 10.0, 5.0
# Servers close a connection that has waited 5 s, perhaps just when it is used again: ours wait no longer than this.
_KEPT_SECONDS = 1.0
# Only these headers are sent: openai adds others from the environment (organization, OPENAI_CUSTOM_HEADERS). It reads the last one itself.
_SENT = {
    "host",
    "accept",
    "accept-encoding",
    "connection",
    "content-type",
    "content-length",
    "user-agent",
    "x-stainless-raw-response",
}


def engine_http(
    url: str, key: str = "", *, most_bytes: int = PAGE_BYTES, timeout: float = PAGE_SECONDS, direct: bool = False
) -> httpx2.Client:
    """Return a client for ``url``. It follows redirects on that server only, reads at most ``most_bytes`` and waits
    ``timeout`` seconds per read.

    ``key``: sent as a bearer token. ``direct``: ignore proxies of the environment, as always for this machine. Requests raise
    UserError for a redirect to another server or an answer that is too long. A response's extensions have `sent`, when its request was
    sent, and `arrivals`, (when, bytes until then) of each part; by `time.perf_counter`.
    """
    home = httpx2.URL(url)
    direct = direct or home.host == "0.0.0.0" or is_loopback(home.host)

    def leave(request: httpx2.Request) -> None:
        if (request.url.scheme, request.url.netloc) != (home.scheme, home.netloc):
            raise UserError(
                f"{url}: redirects to {request.url.scheme}://{request.url.netloc.decode()}, which is not followed; "
                "give that address if you trust it"
            )
        for name in set(request.headers) - _SENT:
            del request.headers[name]
        if key:
            request.headers["authorization"] = f"Bearer {key}"
        request.extensions["sent"] = time.perf_counter()

    def arrive(response: httpx2.Response) -> None:
        # Plain bytes were requested: a compressed answer could exceed the limit.
        response.headers.pop("content-encoding", None)
        stream, body, arrivals = response.stream, bytearray(), list[tuple[float, int]]()
        response.extensions |= {"sent": response.request.extensions["sent"], "arrivals": arrivals}
        assert isinstance(stream, httpx2.SyncByteStream)
        with contextlib.closing(stream):
            for part in stream:
                body += part
                arrivals.append((time.perf_counter(), len(body)))
                if len(body) > most_bytes:
                    raise UserError(f"{url}: its answer is longer than {most_bytes:,} bytes; is this an engine?")
        response.stream = httpx2.ByteStream(bytes(body))

    return httpx2.Client(
        timeout=timeout,
        follow_redirects=True,
        mounts=dict.fromkeys(("http://", "https://", "all://")) if direct else None,
        verify=home.scheme == "https",
        headers={"accept-encoding": "identity"},
        limits=httpx2.Limits(max_connections=None, keepalive_expiry=_KEPT_SECONDS),
        event_hooks={"request": [leave], "response": [arrive]},
    )


@contextlib.contextmanager
def within(seconds: float, url: str, close: Callable[[], None]) -> Iterator[None]:
    """Close a client after ``seconds`` in total, with a UserError: its own limit is per read, and a server may send byte by byte."""
    start, timer = time.monotonic(), threading.Timer(seconds, close)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if time.monotonic() - start >= seconds:
            raise UserError(f"{url}: no complete answer within {seconds:g} s") from error
        raise
    finally:
        timer.cancel()


def page_at(
    url: str, key: str = "", *, body: object = None, direct: bool = False, seconds: float = PAGE_SECONDS
) -> httpx2.Response | None:
    """Return the page at an address, whatever its status; None if no answer arrives within the limits. ``body``: posted as JSON."""
    try:
        client = engine_http(url, key, timeout=seconds, direct=direct)
        with client, within(seconds, url, client.close):
            answer = client.get(url) if body is None else client.post(url, json=body)
    except (OSError, ValueError, httpx2.HTTPError, httpx2.InvalidURL):
        return None
    answer.encoding = "utf-8"  # whatever its header claims
    return answer


def answers(url: str) -> bool:
    """Whether an engine is healthy: by /health if it has that, else by its list of models."""
    pages = (page_at(url + path, direct=True, seconds=_HEALTH_SECONDS) for path in ("/health", "/v1/models"))
    found = next((page for page in pages if page is None or page.status_code != HTTPStatus.NOT_FOUND), None)
    return found is not None and found.status_code == HTTPStatus.OK


def is_loopback(host: str) -> bool:
    """Whether a host name means this machine only."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def free_ports(count: int = 1) -> list[int]:
    """Ports of this machine on which nobody listens."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def listening(host: str, port: int, keyed: bool) -> socket.socket:
    """Return a listening socket. Print a warning if other machines can reach it without a key.

    Raises UserError: the port is in use, or the address is not this machine's.
    """
    if not keyed and not is_loopback(host):
        print(
            f"warning: --host {host} without an API key: everyone who can reach this machine can use the server",
            file=sys.stderr,
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: cannot listen ({error.strerror}); choose another") from error
