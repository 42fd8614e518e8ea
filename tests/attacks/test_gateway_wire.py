"""Fuzz the gateway over a socket with mutated HTTP from clients and engines: it answers or closes, counts no internal
error, and keeps serving.

A failure gives its case, which runs alone with ATTACK:

    ATTACK="engine:1234" pytest tests/attacks/test_gateway_wire.py
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest
from gateway_server import metric, running_gateway
from mutation import memory_grown, mutant
from simulation import trials

from distill.live.gateway import limits
from distill.live.traffic.reader import read_traffic

CASES = {"client": 1000, "engine": 500}
PARTS, STEP = trials(1, 50), trials(4, 1)
AT_ONCE = 64
SECONDS = 20.0  # per case; most take milliseconds on two cores
GROWTH = 1 << 30
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
GOOD = b'{"choices": [{"text": "ab", "finish_reason": "stop"}], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}'

CHAT = (
    b"POST /v1/chat/completions HTTP/1.1",
    {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 5},
)
TEXT = b"POST /v1/completions HTTP/1.1", {"prompt": "hello", "temperature": 0, "n": 1}
# headers without the body's length, and bodies
REQUESTS = [
    (
        CHAT[0] + b"\r\nhost: x\r\nauthorization: Bearer k\r\nx-understudy-slice: code\r\nx-request-id: a-1\r\n",
        json.dumps(CHAT[1]).encode(),
    ),
    (
        TEXT[0] + b"\r\nhost: x\r\nx-understudy-conversation: c\r\nx-understudy-no-log: 0\r\ncookie: a=b\r\n",
        json.dumps(TEXT[1]).encode(),
    ),
    (
        TEXT[0] + b"\r\nhost: x\r\nexpect: 100-continue\r\nconnection: keep-alive, x-own\r\nx-own: 1\r\n",
        json.dumps(TEXT[1]).encode(),
    ),
    (
        TEXT[0] + b"\r\nhost: x\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
        b'{"prompt": [1, 2]}',
    ),
    (TEXT[0] + b"\r\nhost: x\r\n", b'{"prompt": [{"role": "user"}, 5]}'),  # caused an internal error once
    (b"GET /v1/models?a=%20b HTTP/1.1\r\nhost: x\r\n", b""),
    (b"GET /health HTTP/1.1\r\nhost: x\r\n", b""),
    (b"HEAD /metrics HTTP/1.0\r\n", b""),
]
EVENTS = [
    {"choices": [{"text": "a", "token_ids": [5]}]},
    {"choices": [{"text": "b", "finish_reason": "stop"}], "usage": {"completion_tokens": 2}},
]
ANSWERS = [
    (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n", GOOD),
    (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n",
        b"".join(b"data: %s\n\n" % json.dumps(one).encode() for one in EVENTS) + b"data: [DONE]\n\n",
    ),
    (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 429 Too Many\r\nretry-after: 1\r\nset-cookie: a=b\r\nset-cookie: c=d\r\n",
        b'{"error": {"message": "later"}}',
    ),
    (b"HTTP/1.1 204 No Content\r\n", b""),
    (b"HTTP/1.0 200 OK\r\nserver: x\r\n", GOOD),
    (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n", GOOD),
]


def message(seeds: Sequence[tuple[bytes, bytes]], draw: random.Random) -> bytes:
    """A mutant of a message: of its headers, of its body (with the right length or in chunks), or of all of it."""
    head, body = draw.choice(seeds)
    way = draw.choice(("head", "body", "chunks", "whole"))
    if way in ("body", "chunks"):
        body = mutant(body, draw)
    framed = b"content-length: %d\r\n\r\n%s" % (len(body), body) if body else b"\r\n"
    if way == "chunks":
        cuts = sorted({0, len(body), *draw.choices(range(len(body) + 1), k=2)})
        pieces = [body[start:end] for start, end in itertools.pairwise(cuts)]
        framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        framed = (
            b"transfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n" + draw.choice((b"", b"x-late: 1\r\n")) + b"\r\n"
        )
    if way == "head":
        head = mutant(head, draw)
    return mutant(head + framed, draw) if way == "whole" else head + framed


def case(side: str, number: int) -> tuple[bytes, bytes]:
    """(bytes from the client, bytes from the engine)."""
    draw = random.Random(f"{side}:{number}")
    if side == "client":
        return message(REQUESTS, draw), b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(GOOD), GOOD)
    head, body = draw.choice(REQUESTS)
    return head + b"x-case: %d\r\ncontent-length: %d\r\n\r\n%s" % (number, len(body), body), message(ANSWERS, draw)


async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each request with its case's bytes; a request without a case gets a valid response."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        while head := (await reader.readuntil(b"\r\n\r\n")).lower():
            length = re.search(rb"\r\ncontent-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            told = re.search(rb"\r\nx-case: (\d+)", head)
            answer = case("engine", int(told[1]))[1] if told else case("client", 0)[1]
            writer.write(answer.partition(b"{")[0] if head.startswith(b"head ") else answer)
            await writer.drain()
            if told:
                break
    writer.close()


async def said_to(port: int, side: str, number: int) -> None:
    """Run one case. Raises AssertionError if the gateway misbehaves."""
    asked, answered = case(side, number)
    what = f"ATTACK={side}:{number} ({(asked if side == 'client' else answered)[:4000]!r})"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = b""
    try:
        async with asyncio.timeout(SECONDS):
            with contextlib.suppress(ConnectionError):
                writer.write(asked)
                while piece := await reader.read(1 << 16):
                    found += piece
    except TimeoutError:
        raise AssertionError(f"{what}: not ended after {SECONDS:g} s; {found[:200]!r}") from None
    finally:
        writer.close()
    statuses = [int(status) for status in STATUS.findall(found)]
    assert not found or STATUS.match(found), f"{what}: {found[:200]!r}"
    # An engine's status is forwarded; an invalid response becomes a 502.
    assert side == "engine" or max(statuses, default=0) < 500, f"{what}: {statuses}"
    assert b"gateway: internal error" not in found, what


async def all_said(
    url_of: Callable[[str], contextlib.AbstractContextManager[str]], side: str, numbers: Sequence[int]
) -> None:
    async with await asyncio.start_server(engine, "127.0.0.1", 0, limit=1 << 22) as server:
        with url_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as url:
            port, places = httpx.URL(url).port or 0, asyncio.Semaphore(AT_ONCE)

            async def one(number: int) -> None:
                async with places:
                    await said_to(port, side, number)

            with pytest.MonkeyPatch.context() as patch:
                for name in ("HEADER_SECONDS", "BODY_SECONDS"):  # limits for an unfinished request
                    patch.setattr(limits, name, 0.3)
                async with asyncio.TaskGroup() as group:
                    for number in numbers:
                        group.create_task(one(number))
            await asyncio.to_thread(check_after, url, f"{side}: {numbers[0]} to {numbers[-1]}")


def check_after(url: str, which: str) -> None:
    """Check that the gateway is alive and counted no internal error."""
    assert metric(url, "unhandled") == 0, which
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "p"}, headers={"x-request-id": "good"}, timeout=20)
    assert (answer.status_code, answer.content) == (200, GOOD), which


@pytest.mark.simulation
@pytest.mark.parametrize("side", CASES)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_gateway_outlives_what_clients_and_engines_say(
    side: str, part: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    numbers = range(part * CASES[side], (part + 1) * CASES[side], STEP)
    if "ATTACK" in os.environ:
        chosen, _, number = os.environ["ATTACK"].partition(":")
        numbers = range(int(number), int(number) + (chosen == side))
    with memory_grown() as grown:
        if numbers:
            asyncio.run(all_said(lambda at: running_gateway(tmp_path, at, text=True), side, numbers))
            assert "good" in {record.id.partition("-")[0] for record in read_traffic(tmp_path).records}
    assert grown() < GROWTH, f"{grown() >> 20} MB"
    assert "Traceback" not in capfd.readouterr().err
