"""Latency that the gateway adds: hundreds of paced streams directly and through it, in turns. Checks that each response is in its log.

    python bench/gateway.py --streams 100 --rounds 3 --seconds 6 --out bench/results/gateway_cpu.json

A stub engine writes the time into each event of a stream, so a client sees the latency of each event. The gateway adds the median
(and p99) latency through it minus the direct one. All processes share the machine. Stub and clients parse only as much HTTP as they
need, to stay cheap. On a machine with other work, start the command with `chrt -r 1` to give all of them priority.
"""

from __future__ import annotations

from distill.faults import run_script

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
import uvloop

from distill.live.traffic.record import from_line, log_files
from result_file import write_result

HEADERS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKENS = 3  # an event
STAMP, DONE = b'"at":', b"data: [DONE]"
MARK = "stub engine on port "


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


class Stub(asyncio.Protocol):
    """One connection of an engine with vLLM's protocol that sends `max_tokens` / 3 events, one every `pace` seconds, or `bytes` at once."""

    def connection_made(self, transport: Any) -> None:
        """A client."""
        self.transport, self.got, self.whole, self.timer = transport, bytearray(), 0, None

    def data_received(self, data: bytes) -> None:
        """A request, in one piece or several."""
        self.got += data
        if len(self.got) < self.whole:
            return
        head, mark, body = self.got.partition(b"\r\n\r\n")
        told = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        self.whole = len(head) + len(mark) + int(told[0].split(b":")[1]) if mark else 0
        if not mark or len(self.got) < self.whole:
            return
        asked, self.got, self.whole = json.loads(body), bytearray(), 0
        if "bytes" in asked:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % asked["bytes"] + b"x" * asked["bytes"]
            )
            return
        self.left, self.pace, self.said = asked["max_tokens"] // TOKENS, asked["pace"], 0
        self.transport.write(HEADERS)
        self.say()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop sending when the client disconnects."""
        if self.timer is not None:
            self.timer.cancel()

    def say(self) -> None:
        """Send the next event, or the last three."""
        self.said, self.left = self.said + 1, self.left - 1
        finish = "null" if self.left else '"length"'
        ids = ",".join(["11"] * TOKENS)
        self.transport.write(
            _chunk(
                f'data: {{"id":"cmpl-1","object":"text_completion","created":0,"model":"stub","at":{time.monotonic():.6f},"choices":'
                f'[{{"index":0,"text":" some more text","logprobs":null,"finish_reason":{finish},"token_ids":[{ids}]}}]}}\n\n'.encode()
            )
        )
        if self.left:
            self.timer = asyncio.get_running_loop().call_later(self.pace, self.say)
            return
        steps = {
            "num_spec_steps": self.said,
            "num_accepted_draft_tokens": 2 * self.said,
            "num_draft_tokens": 4 * self.said,
        }
        usage = {"prompt_tokens": 1, "completion_tokens": TOKENS * self.said, "total_tokens": 1 + TOKENS * self.said}
        last = json.dumps({"choices": [], "usage": usage, "metrics": {"speculative_decoding": steps}})
        self.transport.write(_chunk(f"data: {last}\n\n".encode()) + _chunk(DONE + b"\n\n") + b"0\r\n\r\n")


async def _stub() -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0, backlog=2048)
    print(f"{MARK}{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


@dataclass
class Seen:
    """Measurements of the clients, in seconds: latency of each event, and time to the first event. ids: of complete responses."""

    ways: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One request of one stream."""

    def __init__(self, seen: Seen, request_id: str, body: bytes, events: int, ended: asyncio.Future[None]) -> None:
        self.seen, self.id, self.events, self.ended = seen, request_id, events, ended
        self.request = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {request_id}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        self.tail, self.count = b"", 0

    def connection_made(self, transport: Any) -> None:
        """Send the request."""
        self.transport, self.began = transport, time.monotonic()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Record each event's latency; an incomplete time stamp waits for the rest."""
        now = time.monotonic()
        parts = (self.tail + data).split(STAMP)
        self.tail = parts[-1] if b"," in parts[-1] or len(parts) == 1 else STAMP + parts.pop()
        for part in parts[1:]:
            self.seen.ways.append(now - float(part[: part.index(b",")]))
            if not self.count:
                self.seen.firsts.append(now - self.began)
            self.count += 1
        if DONE in self.tail:
            self.transport.close()
        elif len(parts) > 1 or not self.tail.startswith(STAMP):
            self.tail = self.tail[-len(STAMP) - len(DONE) :]

    def connection_lost(self, exc: Exception | None) -> None:
        """Record a complete response or an error."""
        if DONE in self.tail and self.count == self.events:
            self.seen.ids.append(self.id)
        else:
            self.seen.errors.append(f"{self.id}: {self.count} of {self.events} events, then {exc or self.tail[-80:]!r}")
        if not self.ended.done():
            self.ended.set_result(None)


async def load(port: int, streams: int, seconds: float, pace: float, events: int, name: str) -> Seen:
    """The given number of concurrent streams for the given time; each sends a new request after its response."""
    seen, loop = Seen(), asyncio.get_running_loop()
    end = time.monotonic() + seconds

    async def stream(number: int) -> None:
        generator = random.Random(number)
        await asyncio.sleep(generator.uniform(0, min(2.0, seconds / 4)))  # so that the streams are not synchronised
        turn = 0
        while time.monotonic() < end:
            own = generator.randint(events // 2, events)
            asked = {
                "model": "stub",
                "prompt": f"{name} {number} {turn}",
                "max_tokens": own * TOKENS,
                "stream": True,
                "pace": pace,
            }
            body, ended = json.dumps(asked).encode(), loop.create_future()
            client = Client(seen, f"{name}-{number}-{turn}", body, own, ended)
            try:
                await loop.create_connection(lambda client=client: client, "127.0.0.1", port)
            except OSError as error:
                seen.errors.append(f"{client.id}: {error}")
                return
            await ended
            turn += 1

    await asyncio.gather(*(stream(number) for number in range(streams)))
    return seen


@contextmanager
def started(command: list[str], mark: str) -> Iterator[tuple[psutil.Process, int]]:
    """Start a program that prints its port: (process, port)."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        line = next(line for line in child.stdout if mark in line)
        yield psutil.Process(child.pid), int(line.partition(mark)[2].split(",")[0])
    finally:
        child.terminate()
        child.wait()


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return {f"p{share}": round(1e3 * float(np.percentile(seconds, share)), 3) for share in (50, 90, 99)}


def lost(log: Path, ids: list[str]) -> dict[str, int]:
    """Complete responses without a record, duplicate records, and records without counts."""
    records = [from_line(line) for path in log_files(log) for line in path.read_bytes().splitlines()]
    found = [record.id for record in records]
    return {
        "lost": len(set(ids) - set(found)),
        "doubled": len(found) - len(set(found)),
        "records": len(found),
        "records_without_counts": sum(record.drafted is None for record in records),
    }


def main(
    out: Annotated[Path | None, typer.Option(help="JSON")] = None,
    streams: Annotated[int, typer.Option(help="streams at once")] = 500,
    rounds: Annotated[int, typer.Option(help="rounds per way, in turns")] = 3,
    seconds: Annotated[float, typer.Option(help="seconds per round")] = 12.0,
    pace: Annotated[float, typer.Option(help="seconds between two events of a stream")] = 0.1,
    events: Annotated[int, typer.Option(help="maximum events per response; at least half of it")] = 60,
    text: Annotated[bool, typer.Option(help="run the gateway with --text")] = False,
    stub: Annotated[bool, typer.Option("--stub", hidden=True)] = False,
) -> None:
    """Run the load test."""
    if stub:
        uvloop.run(_stub())
        return
    direct, through, used = Seen(), Seen(), 0.0
    with tempfile.TemporaryDirectory(prefix="gateway-") as place:
        log = Path(place) / "log"
        gateway = [
            sys.executable,
            "-P",
            "-m",
            "distill.cli",
            "gateway",
            "--log",
            str(log),
            "--port",
            "0",
            *(["--text"] if text else []),
        ]
        with (
            started([sys.executable, __file__, "--stub"], MARK) as (_, engine_port),
            started([*gateway, "--engine", f"http://127.0.0.1:{engine_port}"], "http://127.0.0.1:") as (process, port),
        ):
            for turn in range(rounds):
                for seen, way in ((direct, engine_port), (through, port)):
                    before = sum(process.cpu_times()[:2])
                    found = uvloop.run(load(way, streams, seconds, pace, events, f"r{turn}"))
                    used += sum(process.cpu_times()[:2]) - before if seen is through else 0.0
                    for name in ("ways", "firsts", "ids", "errors"):
                        getattr(seen, name).extend(getattr(found, name))
            memory = process.memory_info().rss
        result = (
            _told(direct, through)
            | lost(log, through.ids)
            | {
                "streams": streams,
                "cpu_us_per_event": round(1e6 * used / max(1, len(through.ways)), 1),
                "gateway_cpu_share": round(used / (rounds * seconds), 3),
                "gateway_mib": round(memory / 2**20, 1),
                "settings": {"rounds": rounds, "seconds": seconds, "pace": pace, "events": events, "text": text},
                "cpus": os.cpu_count(),
                "load_average": os.getloadavg(),
                "real_time": os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO),
            }
        )
    print(json.dumps(result, indent=2))
    if out is not None:
        write_result(out, result)


def _told(direct: Seen, through: Seen) -> dict[str, Any]:
    event = {"direct": _milliseconds(direct.ways), "through": _milliseconds(through.ways)}
    first = {"direct": _milliseconds(direct.firsts), "through": _milliseconds(through.firsts)}
    return {
        "median_added_ms": round(event["through"]["p50"] - event["direct"]["p50"], 3),
        "p99_added_ms": round(event["through"]["p99"] - event["direct"]["p99"], 3),
        "first_event_median_added_ms": round(first["through"]["p50"] - first["direct"]["p50"], 3),
        "errors": len(through.errors),
        "errors_direct": len(direct.errors),
        "first_errors": through.errors[:3],
        "event_ms": event,
        "first_event_ms": first,
        "responses": len(through.ids),
        "events": len(through.ways),
    }


if __name__ == "__main__":
    run_script(main)
