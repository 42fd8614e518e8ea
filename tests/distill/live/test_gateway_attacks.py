"""Hostile clients use bounded memory and time, displace nobody, and do not reach an engine."""

import asyncio
import contextlib
import gc
import json
import resource
import socket
import subprocess
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import h11
import httpx
import pytest
from gateway_server import connected, gateway_process, heard, metric, running_gateway
from processes import until
from raw_engine import raw_engine
from scripted_engine import ScriptedEngine

from distill.live.gateway import app as gateway_app
from distill.live.gateway import command, limits, upstream
from distill.live.gateway.tap import Tap
from distill.live.gateway.upstream import Upstream
from distill.live.traffic.reader import read_traffic

HTTP = httpx.Client(verify=False, timeout=20)
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
MOST_SENT = 16 << 20  # more than all buffers of a connection hold
PAGES = ("POST /v1/completions", "GET /health", "GET /metrics")


def asking(body: bytes, headers: bytes = b"") -> bytes:
    return POST + headers + b"content-length: %d\r\n\r\n" % len(body) + body


def is_cut_off(connection: socket.socket, piece: bytes, pause: float = 0.0) -> bool:
    """Whether the connection is closed while ``piece`` is sent repeatedly, longer than buffers could hide that nobody reads."""
    deadline, sent = time.monotonic() + 20, 0
    with connection:
        try:
            while sent < MOST_SENT and time.monotonic() < deadline:
                connection.sendall(piece)
                sent += len(piece)
                time.sleep(pause)
        except ConnectionError:
            return True
    return False


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("page", PAGES)
def test_what_surrounds_a_body_has_an_end(direct: str, tmp_path: Path, page: str, key: str | None) -> None:
    begin = f"{page} HTTP/1.1\r\nhost: x\r\n".encode() + CHUNKED
    with running_gateway(tmp_path, direct, key=key) as url:
        assert is_cut_off(connected(url, begin + b"0\r\n"), b"a:\r\n" * 4096), "trailers"
        assert is_cut_off(connected(url, begin + b"1;"), b"a" * 65536), "an extension of a chunk"
        assert metric(url, "unhandled", key) == 0


def test_a_small_body_in_many_large_chunks_has_an_end(direct: str, tmp_path: Path) -> None:
    with running_gateway(tmp_path, direct, max_body=1 << 20) as url:
        assert is_cut_off(connected(url, POST + CHUNKED), b"1;%s\r\nx\r\n" % (b"a" * 32768))


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("page", PAGES)
def test_an_unfinished_request_ends_in_time(
    direct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, key: str | None
) -> None:
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.3)
    with running_gateway(tmp_path, direct, key=key) as url:
        whole = connected(url, asking(b"{}", b"authorization: Bearer k\r\n"))
        assert whole.recv(12) == b"HTTP/1.1 200"
        assert is_cut_off(connected(url, f"{page} HTTP/1.1\r\n".encode()), b"a: b\r\n", 0.05)
        assert is_cut_off(connected(url, f"{page} HTTP/1.1\r\nhost: x\r\n".encode() + CHUNKED), b"1\r\nx\r\n", 0.05)
        assert is_cut_off(whole, b"a", 0.05), "a second request on a connection that served one"


@pytest.mark.parametrize(
    "page", ["GET /health", "POST /health", "GET /metrics", "ODD /metrics", "POST /v1/completions"]
)
def test_an_answer_before_the_whole_request_closes_the_connection(direct: str, tmp_path: Path, page: str) -> None:
    with running_gateway(tmp_path, direct, key="k") as url:
        answer = heard(connected(url, f"{page} HTTP/1.1\r\nhost: x\r\n".encode() + CHUNKED + b"1\r\nx\r\n"))
    assert answer[9:12] == (b"200" if "health" in page else b"401")


def test_trailers_reach_no_engine(tmp_path: Path) -> None:
    said = b'{"prompt":"p"}'
    begin = POST + b"authorization: Bearer k\r\n" + CHUNKED + b"%x\r\n%s\r\n" % (len(said), said)
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    with raw_engine(answer) as (engine, heads), running_gateway(tmp_path, engine, key="k") as url:
        for pause in (0.0, 0.2):
            connection = connected(url, begin)
            time.sleep(pause)
            connection.sendall(b"0\r\nx-forwarded-user: admin\r\nauthorization: Bearer other\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 200"
            connection.close()
    assert len(heads) == 2
    assert all(b"admin" not in head and head.lower().count(b"authorization") == 1 for head in heads)


def test_connections_that_only_wait_take_nobodys_place(direct: str, tmp_path: Path) -> None:
    with running_gateway(tmp_path, direct, max_connections=3) as url, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(url, POST)) for _ in range(100)]
        with HTTP.stream("POST", f"{url}/v1/completions", json={"user": "hang", "stream": True}) as first:
            assert first.status_code == 200
            with HTTP.stream("POST", f"{url}/v1/completions", json={"user": "hang", "stream": True}) as second:
                assert second.status_code == 200
                assert httpx.post(f"{url}/v1/completions", json={}, verify=False).status_code == 200
                with HTTP.stream("POST", f"{url}/v1/completions", json={"user": "hang", "stream": True}):
                    refused = HTTP.post(f"{url}/v1/completions", json={})
                    assert (refused.status_code, refused.json()["error"]["code"]) == (503, 503)
                    assert HTTP.get(f"{url}/health").status_code == 200
                    assert metric(url, "requests", status="503") == 1
            assert next(first.iter_lines())
        assert sum(is_open(one) for one in idle) <= 3 + limits._SPARE_CONNECTIONS


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_few_open_files_are_enough_for_those_that_ask(direct: str, tmp_path: Path) -> None:
    few: Callable[[], None] = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))  # noqa: E731
    with gateway_process(direct, tmp_path, preexec_fn=few) as (child, url), contextlib.ExitStack() as stack:
        for _ in range(300):
            with contextlib.suppress(ConnectionError):
                stack.enter_context(connected(url))
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "p"}, verify=False, timeout=20).status_code == 200
        child.terminate()
        assert isinstance(child, subprocess.Popen)
        assert child.stderr is not None
        assert child.stderr.read() == ""


def test_an_upgrade_to_another_protocol_is_answered_as_before_it(
    engine: ScriptedEngine, direct: str, tmp_path: Path
) -> None:
    body = b'{"prompt": "p", "max_tokens": 6}'
    offered = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    with running_gateway(tmp_path, direct) as url, connected(url, asking(body, offered)) as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"
    headers, sent = engine.asked[-1]
    assert sent == body
    assert not {"upgrade", "http2-settings"} & set(headers)


def test_each_pipelined_request_leaves_its_record(engine: ScriptedEngine, direct: str, tmp_path: Path) -> None:
    def twice(name: str, **more: str) -> bytes:
        said = json.dumps({"prompt": "p", "stream": True, **more}).encode()
        return b"".join(asking(said, f"x-request-id: {name}-{number}\r\n".encode()) for number in (1, 2))

    def ids() -> set[str]:
        return {record.id for record in read_traffic(tmp_path).records}

    with running_gateway(tmp_path, direct) as url:
        with connected(url, twice("whole")) as connection:
            found = b""
            while found.count(b"[DONE]") < 2:
                found += connection.recv(1 << 16)
        assert ids() == {"whole-1", "whole-2"}
        before = len(engine.asked)
        with connected(url, twice("left", user="hang")) as connection:
            until(lambda: len(engine.asked) > before)
        until(lambda: not metric(url, "in_flight"))
    asked = {headers["x-request-id"] for headers, _ in engine.asked[before:]}
    assert "left-1" in asked
    assert ids() == {"whole-1", "whole-2"} | asked


@pytest.mark.parametrize(
    "line", [b"POST http://elsewhere/v1/completions", b"CONNECT elsewhere:80", b"CONNECT /x", b"OPTIONS *"]
)
def test_only_paths_are_asked_of_an_engine(engine: ScriptedEngine, direct: str, tmp_path: Path, line: bytes) -> None:
    before = len(engine.asked)
    with running_gateway(tmp_path, direct) as url:
        assert heard(connected(url, line + b" HTTP/1.1\r\nhost: x\r\n\r\n"))[9:12] == b"400"
    assert len(engine.asked) == before


def test_a_request_that_turns_out_to_be_no_http_is_no_fault_of_ours(direct: str, tmp_path: Path) -> None:
    with running_gateway(tmp_path, direct) as url:
        assert heard(connected(url, POST + CHUNKED + b"no size\r\n"))[9:12] == b"400"
        assert metric(url, "unhandled") == 0


def test_a_status_that_no_client_knows_is_no_answer(tmp_path: Path) -> None:
    with (
        raw_engine(b"HTTP/1.1 700 X\r\ncontent-length: 0\r\n\r\n") as (engine, _),
        running_gateway(tmp_path, engine) as url,
    ):
        assert HTTP.post(f"{url}/v1/completions", json={}).status_code == 502


def test_an_engine_that_leaves_http_gives_no_answer(tmp_path: Path) -> None:
    """After CONNECT a 200 ends HTTP on the connection, so no further event is read from it."""

    async def asked(engine: str) -> None:
        async with Upstream().ask("CONNECT", engine, b"/x", [], b"") as answer, asyncio.timeout(5):
            await anext(answer.pieces)

    with raw_engine(b"HTTP/1.1 200 OK\r\n\r\n") as (engine, _), pytest.raises(h11.RemoteProtocolError, match="PAUSED"):
        asyncio.run(asked(engine))


def test_an_idle_connection_to_an_engine_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_IDLE_SECONDS", 0.1)

    async def seen() -> list[str]:
        told: list[str] = []

        async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            told.append("rest" if await reader.read() else "closed")
            writer.close()

        server = await asyncio.start_server(engine, "127.0.0.1", 0)
        engines = Upstream()
        async with engines.ask(
            "GET", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", b"/", [], b""
        ) as answer:
            assert [piece async for piece in answer.pieces] == [b"ok"]
        engines.close_idle()
        await asyncio.sleep(0.15)
        assert told == [], "it may be asked again until then"
        engines.close_idle()
        async with asyncio.timeout(5):
            while not told:
                await asyncio.sleep(0.01)
        server.close()
        return told

    assert asyncio.run(seen()) == ["closed"]


@pytest.mark.parametrize("framing", ["content-length: 2", "transfer-encoding: chunked"])
def test_a_connection_is_not_used_again_after_a_stream(framing: str) -> None:
    """llama-server closes it then, and says so nowhere; after another answer it does not."""
    body = b"ok" if "length" in framing else b"2\r\nok\r\n0\r\n\r\n"

    async def connections() -> int:
        opened: list[int] = []

        async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opened.append(1)
            with contextlib.suppress(asyncio.IncompleteReadError):
                while await reader.readuntil(b"\r\n\r\n"):
                    writer.write(b"HTTP/1.1 200 OK\r\n" + framing.encode() + b"\r\n\r\n" + body)
            writer.close()

        server = await asyncio.start_server(engine, "127.0.0.1", 0)
        engines, root = Upstream(), f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for _ in range(3):
            async with engines.ask("GET", root, b"/", [], b"") as answer:
                assert [piece async for piece in answer.pieces] == [b"ok"]
        engines.close_idle(60.0)
        server.close()
        return len(opened)

    assert asyncio.run(connections()) == (1 if "length" in framing else 3)


def test_what_is_sent_after_a_request_that_is_being_answered_starts_no_clock(
    engine: ScriptedEngine, direct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.3)
    quick, hangs = asking(b'{"prompt": "p"}'), asking(b'{"prompt": "p", "stream": true, "user": "hang"}')
    with running_gateway(tmp_path, direct) as url:
        before = len(engine.asked)
        with connected(url, quick + hangs) as connection:
            until(lambda: len(engine.asked) == before + 2)
            connection.sendall(quick)
            connection.settimeout(1.0)
            with pytest.raises(TimeoutError):
                all(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("hard", [4096, resource.RLIM_INFINITY])
def test_as_many_files_are_asked_for_as_clients_need(hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert command._clients_for(1000) == 1000
    assert asked == [(2064, hard)]


def test_a_fault_of_the_gateway_is_counted_and_printed_once(
    direct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "what the request said"

    def fails(*_: object) -> None:
        raise KeyError(said)

    with running_gateway(tmp_path, direct) as url:
        with monkeypatch.context() as patch:
            patch.setattr(gateway_app, "read_request", fails)
            answers = [HTTP.post(f"{url}/v1/completions", json={}) for _ in range(3)]
        assert [(answer.status_code, answer.json()["error"]["code"]) for answer in answers] == [(500, 500)] * 3
        monkeypatch.setattr(Tap, "feed", fails)
        for _ in range(2):
            with pytest.raises(httpx.RemoteProtocolError):
                HTTP.post(f"{url}/v1/completions", json={"prompt": "p", "stream": True})
        assert metric(url, "unhandled", kind="KeyError") == 5
        assert metric(url, "in_flight") == 0
    printed = capfd.readouterr().err
    assert printed.count("a bug in the gateway") == 1  # Both are raised at the same place.
    assert said not in printed


def test_a_connection_leaves_nothing_to_the_garbage_collector(
    direct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, connection_made = weakref.WeakSet[limits.BoundedProtocol](), limits.BoundedProtocol.connection_made

    def counted(connection: limits.BoundedProtocol, transport: asyncio.BaseTransport) -> None:
        made.add(connection)
        connection_made(connection, transport)

    monkeypatch.setattr(limits.BoundedProtocol, "connection_made", counted)
    gc.disable()
    try:
        with running_gateway(tmp_path, direct) as url, connected(url, asking(b'{"prompt": "p"}')) as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
            assert HTTP.get(f"{url}/health").status_code == 200
            deadline = time.monotonic() + 20
            while len(made) > 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(made) == 1, "that of /health is gone"
            connection.close()
            until(lambda: not made)
    finally:
        gc.enable()
