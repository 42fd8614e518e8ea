"""The proxy: forwards a request to its arm, streams the response back, and writes a record before the last bytes."""

import asyncio
import contextlib
import gc
import hmac
import sys
import time
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpcore2
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from distill.engines.protocol.engine import reporting_flags
from distill.live.arms import ARMS, Arms, read_arms
from distill.live.gateway.exchange import Exchange
from distill.live.gateway.limits import Bodies, Refused, guarded
from distill.live.gateway.metrics import Metrics
from distill.live.gateway.request import PATHS, read_request
from distill.live.gateway.tap import Tap
from distill.live.gateway.upstream import ask
from distill.live.options import GatewayOptions
from distill.live.traffic.writer import LogWriter
from speculative.errors import UserError

MOST_CLIENTS = 2048
APPEND_SECONDS = 1.0  # that a response's last bytes wait for its record
WATCH_SECONDS = 0.5
IDLE_SECONDS = 600.0  # without a byte, until an exchange ends
_SWITCH_SECONDS = 0.0005
MOST_SLICES, OTHERS = 64, "others"
# Headers of one connection, not of the message, and headers for the gateway alone.
_OWN_HEADERS = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade host "
    b"content-length accept-encoding expect".split()
)
_PREFIX = b"x-understudy-"
_CLOSE = {"connection": "close"}  # for answers that do not wait for the whole request
_HINT = (
    "a stream reported no draft counts, so its acceptance is unknown: start the engine with them ({flags}), "
    "and ask for usage in streams (--usage)"
)


class Gateway:
    """The gateway as an ASGI application; `app` adds /health and /metrics."""

    def __init__(
        self, options: GatewayOptions, key: str | None, arms: Arms, writer: LogWriter, clients: int = MOST_CLIENTS
    ) -> None:
        """``key``: clients must send it; None: no key is needed. ``clients``: connections, above which requests to engines get 503."""
        self.clients = clients
        self.options, self.key, self.arms, self.writer = options, key, arms, writer
        self.metrics, self.bodies = Metrics(), Bodies()
        self.exchanges: set[Exchange] = set()
        self._slices: set[str] = set()
        self._faults: set[str] = set()
        self._log_is_late = self._hinted = False

    def app(self) -> ASGIApp:
        """The application with /health and /metrics; everything else goes to an engine."""
        # No methods: all of them are answered there, and the answer closes the connection.
        routes = [Route("/health", self._health, methods=[]), Route("/metrics", self._page, methods=[])]
        pages = Router(routes, default=self, redirect_slashes=False, lifespan=self._lifespan)
        return ServerErrorMiddleware(guarded(pages), self._fault)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Router) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._watch())
        # Streams wait for each other: the garbage collector skips objects that live as long as the process, and the log's thread releases
        # the interpreter soon.
        gc.freeze()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.to_thread(self.writer.close)

    async def _health(self, _: Request) -> Response:
        """Needs no key, so it shows no arms."""
        return JSONResponse({"status": "ok", "logging": self.writer.writing}, headers=_CLOSE)

    async def _page(self, request: Request) -> Response:
        if not self._may(dict(request.scope["headers"])):
            return _error(401, "wrong key")
        self.metrics.in_flight.set(len(self.exchanges))
        self.metrics.logging.set(self.writer.writing)
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8", headers=_CLOSE)

    async def _fault(self, _: Request, error: Exception) -> Response:
        """Count an unexpected exception and print each place once, without the request's content."""
        frames = traceback.extract_tb(error.__traceback__)
        kind = type(error).__name__
        place = f"{kind} at {frames[-1].filename}:{frames[-1].lineno}"
        self.metrics.unhandled.labels(kind).inc()
        if place not in self._faults:
            self._faults.add(place)
            message = f"a bug in the gateway ended a request: {place}; further ones at this place are only counted in /metrics"
            print(message, *traceback.format_list(frames), sep="\n", file=sys.stderr, flush=True)
        return _error(500, "internal error")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request; lifespan messages never come here."""
        headers = dict(scope["headers"])
        try:
            if len(scope["state"]["connection"].connections) > self.clients:
                raise Refused(503, f"more than {self.clients:,} connections")
            if not self._may(headers):
                raise Refused(401, "wrong key; send it as `Authorization: Bearer KEY`")
            if scope["method"] == "CONNECT" or not scope["raw_path"].startswith(b"/"):
                raise Refused(400, "the request target must begin with /, and CONNECT is not supported")
            body = await self.bodies.read(headers, receive)
        except Refused as refused:
            self.metrics.requests.labels("", refused.status).inc()
            await _error(refused.status, str(refused))(scope, receive, send)
            return
        except ConnectionError:
            return
        try:
            await self._exchange(scope, headers, body, receive, send)
        finally:
            self.bodies.release(body)

    def _may(self, headers: Mapping[bytes, bytes]) -> bool:
        sent = headers.get(b"authorization", b"")
        return self.key is None or hmac.compare_digest(sent, f"Bearer {self.key}".encode())

    async def _exchange(self, scope: Any, headers: dict[bytes, bytes], body: bytes, receive: Any, send: Any) -> None:
        # Not the loop's clock: uvloop's stands still within a turn and ticks in milliseconds.
        arrived, began = time.time(), time.perf_counter()
        path = scope["path"] if scope["method"] == "POST" else ""
        request = read_request(path, headers, body, self.options, self.writer.salt)
        shed = len(self.exchanges) >= self.options.shed_above and scope["path"] in PATHS
        arm = self.arms.choose(request.conversation, self.writer.salt, shed)
        self.metrics.shed.inc(shed and not arm.drafts)
        task = asyncio.current_task()
        assert task is not None
        name = self._slice(request.slice)
        exchange = Exchange(request, arm, name, scope, receive, send, arrived, began, task, moved=began)
        if request.why_not:
            exchange.recorded = True
            if scope["method"] == "POST":
                self.metrics.not_logged.labels(request.why_not).inc()
        self.exchanges.add(exchange)
        watch = asyncio.create_task(_watch_client(exchange))
        try:
            await self._relay(exchange)
        except asyncio.CancelledError:
            shutting_down = not exchange.why_ended
            exchange.why_ended = exchange.why_ended or "cancelled"
            await self._fail(exchange, 504, f"the engine was silent for {IDLE_SECONDS:g} s")
            if shutting_down:
                raise
            task.uncancel()
        except httpcore2.LocalProtocolError as error:  # Caused by the client, so it is not an error of the arm.
            exchange.recorded = True
            await self._fail(exchange, 400, str(error))
        except (httpcore2.NetworkError, httpcore2.TimeoutException, httpcore2.RemoteProtocolError) as error:
            await self._fail(exchange, 502, f"the engine cannot be reached ({type(error).__name__})")
        finally:
            watch.cancel()
            self.exchanges.discard(exchange)
            self.metrics.requests.labels(arm.name, exchange.status or 0).inc()

    async def _relay(self, exchange: Exchange) -> None:
        """Stream the engine's response; read the next piece after the client took the last one."""
        request, arm, scope, send = exchange.request, exchange.arm, exchange.scope, exchange.send
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        async with ask(scope["method"], arm.url, target, _passed_on(scope["headers"]), request.body) as response:
            named = [(name.lower(), value) for name, value in response.headers]
            by_name = dict(named)
            if b"transfer-encoding" in by_name:
                by_name.pop(b"content-length", None)  # With both headers, the chunks count.
            left = int(by_name[b"content-length"]) if b"content-length" in by_name else None
            if not exchange.recorded:
                self._tap(exchange, response.status, by_name)
            tap = exchange.tap
            headers = [*_passed_on(named), (b"x-understudy-id", request.id.encode())]
            headers += [(b"content-length", b"%d" % left)] if left is not None else []
            exchange.status = response.status
            exchange.sending = True
            await send({"type": "http.response.start", "status": response.status, "headers": headers})
            exchange.sending = False
            async for piece in response.aiter_stream():
                if exchange.first_token_s is None:
                    exchange.first_token_s = round(time.perf_counter() - exchange.began, 6)
                    if tap is not None and tap.stream:
                        self.metrics.first_token.labels(arm.name).observe(exchange.first_token_s)
                if tap is not None:
                    tap.feed(piece)
                if left is not None:
                    left -= len(piece)
                if left == 0 or (tap is not None and tap.ended):
                    await self._record(exchange)
                exchange.sending = True
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                exchange.sending, exchange.moved = False, time.perf_counter()
            await self._record(exchange)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if response.status == 200 and scope["path"] in PATHS:
            self.metrics.total.labels(arm.name).observe(time.perf_counter() - exchange.began)

    def _tap(self, exchange: Exchange, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Attach a reader of the response, unless it is not text of a target."""
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if 400 <= status < 500 or b"content-encoding" in headers:
            exchange.recorded = True
            self.metrics.not_logged.labels("refused" if status >= 400 else "encoded").inc()
        elif status < 400:
            exchange.tap = Tap(kind == b"text/event-stream", self.options.text)

    async def _record(self, exchange: Exchange, finish: str = "", wait: bool = True) -> None:
        """Write the record once. With ``wait``, return when it is on disk or after APPEND_SECONDS."""
        if exchange.recorded:
            return
        exchange.recorded = True
        tap = exchange.tap
        try:
            if tap is not None:
                tap.end()
                if not tap.readable and not finish:
                    raise ValueError("no answer of an engine")
            record = exchange.record(finish or (tap.finish if tap is not None else "error"), self.writer.salt)
        except (ValueError, RecursionError):
            self.metrics.not_logged.labels("answer").inc()
            return
        if tap is not None:
            self.metrics.odd_counts.labels(exchange.arm.name).inc(tap.odd_counts)
            without_counts = tap.counts is None and exchange.arm.drafts and tap.stream and not finish
            if without_counts and not self._hinted:
                self._hinted = True
                print(_HINT.format(flags=reporting_flags()), file=sys.stderr, flush=True)
        self.metrics.count(record)
        await self._append(record, wait)

    async def _append(self, record: Any, wait: bool) -> None:
        loop = asyncio.get_running_loop()
        on_disk: asyncio.Future[bool] = loop.create_future()

        def done(written: bool) -> None:
            self._log_is_late = self._log_is_late and not written
            self.metrics.records_failed.inc(not written)
            if not on_disk.done():
                on_disk.set_result(written)

        def done_in_thread(written: bool) -> None:
            with contextlib.suppress(RuntimeError):  # The loop has ended.
                loop.call_soon_threadsafe(done, written)

        self.writer.append(record, done_in_thread)
        if not wait or self._log_is_late:
            return
        try:
            async with asyncio.timeout(APPEND_SECONDS):
                await on_disk
        except TimeoutError:
            # Only one response waits for a hanging disk; the next ones do not wait until it answers.
            self._log_is_late = True

    async def _fail(self, exchange: Exchange, status: int, why: str) -> None:
        """End an incomplete response: one JSON error if it has not begun, else close the connection, so that it does not look complete."""
        if exchange.why_ended and not exchange.recorded:
            self.metrics.cancelled.labels(exchange.arm.name).inc()
        # Silence is the engine's error, unless the client is not reading.
        left = exchange.why_ended == "cancelled" or (exchange.why_ended and exchange.sending)
        await self._record(exchange, "cancelled" if left else "error", wait=False)
        if exchange.why_ended == "cancelled":
            return
        if exchange.status is None:
            exchange.status = status
            await _error(status, why)(exchange.scope, exchange.receive, exchange.send)
        else:
            exchange.scope["state"]["connection"].transport.abort()

    def _slice(self, name: str) -> str:
        """The slice's name, or `others` after MOST_SLICES names, because clients choose them."""
        if name not in self._slices:
            if len(self._slices) >= MOST_SLICES:
                return OTHERS
            self._slices.add(name)
        return name

    async def _watch(self) -> None:
        """Reload arms.json when it changes; end idle exchanges."""
        path, seen = self.options.log / ARMS, None
        while True:
            with contextlib.suppress(OSError):
                changed = path.stat().st_mtime_ns
                if changed != seen:
                    seen = changed
                    try:
                        self.arms = read_arms(path)
                    except UserError as error:
                        print(f"{error}; the arms are unchanged", file=sys.stderr, flush=True)
            late = time.perf_counter() - IDLE_SECONDS
            for exchange in [exchange for exchange in self.exchanges if exchange.moved < late]:
                exchange.end("idle")
            await asyncio.sleep(WATCH_SECONDS)


async def _watch_client(exchange: Exchange) -> None:
    """End an exchange whose client left; closing the engine's connection aborts the request there."""
    while (await exchange.receive())["type"] != "http.disconnect":
        pass
    exchange.end("cancelled")


def _passed_on(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers to forward: not those of the connection, which `connection` can list too."""
    named = {word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")}
    return [(n, v) for n, v in headers if n not in _OWN_HEADERS and n not in named and not n.startswith(_PREFIX)]


def _error(status: int, why: str) -> Response:
    error = {"message": f"understudy gateway: {why}", "type": "gateway_error", "param": None, "code": status}
    return JSONResponse({"error": error}, status, _CLOSE)
