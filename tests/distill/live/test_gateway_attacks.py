"""Hostile clients use bounded memory and time, displace nobody, and do not reach an engine."""

import json
import resource
import socket
import time
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine
from gateway_server import connected, heard, metric, running_gateway
from processes import until
from raw_engine import raw_engine

from distill.live.gateway import app as gateway_app
from distill.live.gateway import command, limits
from distill.live.gateway.tap import Tap
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
def test_trailers_and_chunk_extensions_are_bounded(direct: str, tmp_path: Path, page: str, key: str | None) -> None:
    begin = f"{page} HTTP/1.1\r\nhost: x\r\n".encode() + CHUNKED
    with running_gateway(tmp_path, direct, key=key) as url:
        assert is_cut_off(connected(url, begin + b"0\r\n"), b"a:\r\n" * 4096), "trailers"
        assert is_cut_off(connected(url, begin + b"1;"), b"a" * 65536), "an extension of a chunk"
        assert metric(url, "unhandled", key) == 0


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


def test_clients_beyond_the_limit_get_503(direct: str, tmp_path: Path) -> None:
    with running_gateway(tmp_path, direct, clients=3) as url:
        hanging = HTTP.stream("POST", f"{url}/v1/completions", json={"user": "hang", "stream": True})
        with connected(url, POST), connected(url, POST), hanging:
            assert httpx.post(f"{url}/v1/completions", json={}, verify=False).status_code == 503
            assert httpx.get(f"{url}/health", verify=False).status_code == 200
        until(lambda: httpx.post(f"{url}/v1/completions", json={}, verify=False).status_code == 200)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 700 X\r\ncontent-length: 0", b"HTTP/1.1 101 Switching\r\nupgrade: x"])
def test_a_status_that_is_no_answer_is_a_502(tmp_path: Path, answer: bytes) -> None:
    with raw_engine(answer + b"\r\n\r\n") as (engine, _), running_gateway(tmp_path, engine) as url:
        assert HTTP.post(f"{url}/v1/completions", json={}).status_code == 502


def test_there_are_open_files_for_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: calls.append(limits))
    for hard in (resource.RLIM_INFINITY, 4096, 128):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (100, hard))
        calls.append((command._allowed_clients(), 0))
    assert calls == [(4160, -1), (2048, 0), (4096, 4096), (2016, 0), (128, 128), (32, 0)]


def test_an_upgrade_to_another_protocol_is_answered_as_before_it(
    engine: FakeEngine, direct: str, tmp_path: Path
) -> None:
    body = b'{"prompt": "p", "max_tokens": 6}'
    offered = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    with running_gateway(tmp_path, direct) as url, connected(url, asking(body, offered)) as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"
    headers, sent = engine.asked[-1]
    assert sent == body
    assert not {"upgrade", "http2-settings"} & set(headers)


def test_each_pipelined_request_leaves_its_record(engine: FakeEngine, direct: str, tmp_path: Path) -> None:
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
def test_only_paths_are_forwarded(engine: FakeEngine, direct: str, tmp_path: Path, line: bytes) -> None:
    before = len(engine.asked)
    with running_gateway(tmp_path, direct) as url:
        assert heard(connected(url, line + b" HTTP/1.1\r\nhost: x\r\n\r\n"))[9:12] == b"400"
    assert len(engine.asked) == before


def test_invalid_chunks_are_a_400_and_no_fault(direct: str, tmp_path: Path) -> None:
    with running_gateway(tmp_path, direct) as url:
        assert heard(connected(url, POST + CHUNKED + b"no size\r\n"))[9:12] == b"400"
        assert metric(url, "unhandled") == 0


def test_bytes_after_a_request_in_progress_start_no_clock(
    engine: FakeEngine, direct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
