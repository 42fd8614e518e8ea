"""Test the gateway's limits under attack on a real gateway: idle connections, slow clients, large bodies, a full disk, kill -9.

    python bench/gateway_limits.py --out bench/results/gateway_limits_cpu.json

Each trial starts its own gateway before the stub engine of bench/gateway.py and attacks it while ordinary streams run.
It reports which limits
held, and the gateway's peak resident memory. Exit status 1: a limit did not hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
import uvloop

from distill.live.gateway.limits import BODY_SECONDS, HEADER_SECONDS
from gateway import MARK, Seen, load, lost, started
from result_file import write_result

MIB = 1 << 20
LARGE = 100 * MIB
MOST_MIB = (
    2048  # of resident memory in any trial: at most 512 MB of bodies, held a few times while they are read and sent
)
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@dataclass(frozen=True)
class Trial:
    """tried: number and kind of attacks. errors: ordinary requests without a complete answer, of ``responses``. lost:
    complete ones without a record.
    """

    name: str
    tried: int
    says: str
    responses: int
    errors: int
    lost: int
    peak_mib: float
    seconds: float
    holds: bool


class Attacked:
    """A gateway and its engine."""

    def __init__(self, child: psutil.Process, port: int, engine: int, log: Path) -> None:
        self.child, self.port, self.engine, self.log = child, port, engine, log
        self.began, self.seen = time.monotonic(), Seen()

    def peak_mib(self) -> float:
        """Peak resident memory since the start, as counted by Linux."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.child.pid}/status").read_text())
        return int(found[1]) / 1024 if found else float("nan")

    def open_files(self) -> int:
        """Open files of the gateway."""
        return self.child.num_fds()

    async def streams(self, name: str, streams: int, seconds: float) -> None:
        """Run ordinary clients for this time."""
        found = await load(self.port, streams, seconds, 0.05, 20, name)
        self.seen.ids += found.ids
        self.seen.errors += found.errors

    def trial(self, name: str, tried: int, says: str, held: bool) -> Trial:
        """The result, and whether nothing was lost and memory stayed within bounds."""
        peak, missing = round(self.peak_mib(), 1), lost(self.log, self.seen.ids)["lost"]
        ordinary = bool(self.seen.ids) and not self.seen.errors and not missing
        seconds = round(time.monotonic() - self.began, 1)
        holds = held and ordinary and peak < MOST_MIB
        return Trial(name, tried, says, len(self.seen.ids), len(self.seen.errors), missing, peak, seconds, holds)


@contextmanager
def attacked(place: Path, *more: str) -> Iterator[Attacked]:
    """With ``more`` options."""
    log = place / "log"
    command = [sys.executable, "-P", "-m", "distill.cli", "gateway", "--log", str(log), "--port", "0", *more]
    with (
        started([sys.executable, str(Path(__file__).with_name("gateway.py")), "--stub"], MARK) as (_, engine),
        started([*command, "--engine", f"http://127.0.0.1:{engine}"], "http://127.0.0.1:") as (child, port),
    ):
        yield Attacked(child, port, engine, log)


@contextlib.asynccontextmanager
async def connected(
    port: int, first: bytes, buffers: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that says ``first``. ``buffers``: bytes that it holds unread; few make a client that does not read one at once."""
    with socket.socket() as link:
        link.setblocking(False)
        if buffers < 1 << 16:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffers)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        await asyncio.get_running_loop().sock_connect(link, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=link, limit=buffers)
        try:
            writer.write(first)
            yield reader, writer
        finally:
            writer.transport.abort()


async def cut_after(port: int, first: bytes, piece: bytes, reads: bool, most: float) -> float:
    """Seconds until the gateway closes a connection that sends ``first`` and then one ``piece`` per second; ``most`` if it does not."""
    began = time.monotonic()
    with contextlib.suppress(OSError):
        async with connected(port, first, 4096) as (reader, writer):
            while (past := time.monotonic() - began) < most:
                if writer.transport.is_closing():
                    return past
                writer.write(piece)
                try:
                    async with asyncio.timeout(1):
                        if reads and not await reader.read(1 << 16):
                            return past
                        await asyncio.sleep(1)
                except TimeoutError:
                    pass
            return most
    return time.monotonic() - began


async def idle(gateway: Attacked, connections: int) -> Trial:
    """Idle connections, opened while streams run. All are open at once, then the gateway closes them."""
    ended: list[float] = []
    open_at_once = 0

    async def stay() -> None:
        ended.append(await cut_after(gateway.port, b"", b"", True, 4 * HEADER_SECONDS))

    async with asyncio.TaskGroup() as group:
        streams = group.create_task(gateway.streams("idle", 20, 2 * HEADER_SECONDS))
        for number in range(connections):
            group.create_task(stay())
            if number % 250 == 249:
                await asyncio.sleep(0.02)
        while not streams.done():
            open_at_once = max(open_at_once, gateway.open_files())
            await asyncio.sleep(0.25)
    late = max(ended)
    says = f"{open_at_once} files open at once; the last was closed after {late:.1f} s"
    return gateway.trial("idle connections", connections, says, late < 3 * HEADER_SECONDS and len(ended) == connections)


async def slow(gateway: Attacked, clients: int) -> Trial:
    """A third sends its headers slowly, a third its body, and a third does not read its response."""
    asked = json.dumps({"prompt": "x", "bytes": MIB}).encode()
    kinds = {
        "headers": (POST, b"a: b\r\n", True, HEADER_SECONDS),
        "bodies": (POST + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n", True, BODY_SECONDS),
        "readers": (POST + b"content-length: %d\r\n\r\n" % len(asked) + asked, b"x", False, BODY_SECONDS),
    }
    ended: dict[str, list[float]] = {kind: [] for kind in kinds}

    async def attack(kind: str) -> None:
        first, piece, reads, most = kinds[kind]
        ended[kind].append(await cut_after(gateway.port, first, piece, reads, 2 * most))

    async with asyncio.TaskGroup() as group:
        group.create_task(gateway.streams("slow", 20, BODY_SECONDS))
        for number in range(clients):
            group.create_task(attack([*kinds][number % len(kinds)]))
    held = all(max(ended[kind]) < 2 * most for kind, (*_, most) in kinds.items())
    says = ", ".join(f"{kind} closed after {max(seconds):.1f} s at most" for kind, seconds in ended.items())
    return gateway.trial("slow clients", clients, says, held)


async def large(gateway: Attacked, bodies: int, most: int) -> Trial:
    """Bodies of 100 MB, half of them said to be so, half in chunks, and trailers of 24 MB."""
    answers: list[str] = []

    body = b'{"bytes":1,"prompt":"' + b"x" * (LARGE - 23) + b'"}'

    async def attack(number: int) -> None:
        answer: asyncio.Task[bytes] | None = None
        length = b"content-length: %d\r\n\r\n" % LARGE
        chunked = b"transfer-encoding: chunked\r\n\r\n"
        with contextlib.suppress(OSError):
            async with connected(gateway.port, POST + (length if number % 2 else chunked), 1 << 16) as (reader, writer):
                answer = asyncio.create_task(reader.read(12))
                with contextlib.suppress(OSError):
                    for start in range(0, LARGE, MIB):
                        piece = body[start : start + MIB]
                        writer.write(piece if number % 2 else b"%x\r\n%s\r\n" % (len(piece), piece))
                        await writer.drain()
                    writer.write(b"" if number % 2 else b"0\r\n\r\n")
                await asyncio.wait([answer])
        said = answer is not None and not answer.exception() and answer.result()
        answers.append(said[9:12].decode() if said else "closed")

    async def trailers() -> None:
        with contextlib.suppress(OSError):
            async with connected(gateway.port, POST + b"transfer-encoding: chunked\r\n\r\n0\r\n", 1 << 16) as (
                _,
                writer,
            ):
                for _ in range(24):
                    writer.write(b"a:\r\n" * (MIB // 4))
                    await writer.drain()

    async with asyncio.TaskGroup() as group:
        group.create_task(gateway.streams("large", 20, 20))
        for number in range(bodies):
            group.create_task(attack(number))
            group.create_task(trailers())
    told = {status: answers.count(status) for status in sorted(set(answers))}
    held = set(told) <= ({"413", "closed"} if most < LARGE else {"200", "503", "closed"}) and (
        most < LARGE or "200" in told
    )
    return gateway.trial(f"bodies of 100 MB, --max-body {most}", bodies, f"answers {told}", held)


def health(port: int) -> dict[str, Any]:
    """The gateway's own page."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@contextmanager
def small_disk(place: Path) -> Iterator[bool]:
    """Mount a file system of 1 MB at ``place``; False without root."""
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, check=False
    ).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


async def full(gateway: Attacked, place: Path) -> Trial:
    """The log's disk is full while streams run, then has room again. No record that was confirmed is lost."""
    await gateway.streams("before", 20, 3)
    kept, filler = Seen(ids=[*gateway.seen.ids]), place / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    gateway.seen.ids.clear()
    await gateway.streams("full", 20, 3)
    unlogged, served, says_so = (
        lost(gateway.log, gateway.seen.ids)["lost"],
        len(gateway.seen.ids),
        health(gateway.port)["logging"] is False,
    )
    filler.unlink()
    gateway.seen.ids[:] = kept.ids
    await gateway.streams("probe", 1, 1)  # The first record after the disk has room.
    resumed = health(gateway.port)["logging"] is True
    gateway.seen.ids[:] = kept.ids
    await gateway.streams("after", 20, 3)
    says = f"{served} served while it was full, {unlogged} of them without a record and said to be; logging resumed: {resumed}"
    return gateway.trial("disk full", served, says, says_so and resumed and unlogged > 0)


async def killed(gateway: Attacked) -> Trial:
    """SIGKILL under load: every complete response has its record."""
    peak = 0.0

    async def kill() -> None:
        nonlocal peak
        await asyncio.sleep(4)
        peak = gateway.peak_mib()
        gateway.child.send_signal(signal.SIGKILL)

    async with asyncio.TaskGroup() as group:
        group.create_task(kill())
        group.create_task(gateway.streams("killed", 200, 5))
    missing, whole = lost(gateway.log, gateway.seen.ids), len(gateway.seen.ids)
    says = f"{missing['records']} records for {whole} whole responses, {missing['doubled']} twice"
    seconds = round(time.monotonic() - gateway.began, 1)
    holds = bool(whole) and not missing["lost"] and not missing["doubled"]
    return Trial("kill -9 under load", 200, says, whole, 0, missing["lost"], round(peak, 1), seconds, holds)


def _connections_for(wanted: int) -> int:
    """Number of connections within the system's limit of open files; each also needs one connection to the engine."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(wanted, hard // 2)


def main(
    out: Annotated[Path | None, typer.Option(help="JSON")] = None,
    connections: Annotated[int, typer.Option(help="idle connections")] = 10_000,
    clients: Annotated[int, typer.Option(help="slow clients")] = 1_000,
    bodies: Annotated[int, typer.Option(help="bodies of 100 MB")] = 16,
    only: Annotated[str, typer.Option(help="run only trials whose name starts with this")] = "",
) -> None:
    """Run all trials, one after another."""
    held = _connections_for(connections)
    trials: list[Trial] = []

    def attempt(name: str, make: Callable[[Attacked], Coroutine[Any, Any, Trial]], *more: str, at: Path) -> None:
        if not name.startswith(only):
            return
        shutil.rmtree(at / "log", ignore_errors=True)
        with attacked(at, *more) as gateway:
            trials.append(uvloop.run(make(gateway)))
        print(json.dumps(asdict(trials[-1])), flush=True)

    with tempfile.TemporaryDirectory(prefix="gateway-limits-") as name:
        place = Path(name)
        attempt("idle", lambda one: idle(one, held), "--max-connections", str(held), at=place)
        attempt("idle", lambda one: idle(one, held), at=place)
        attempt("slow", lambda one: slow(one, clients), "--idle-seconds", "20", at=place)
        attempt("large", lambda one: large(one, bodies, 16 * MIB), at=place)
        attempt("large", lambda one: large(one, bodies, LARGE), "--max-body", str(LARGE), at=place)
        with small_disk(place) as mounted:
            if mounted:
                attempt("full", lambda one: full(one, place), at=place)
        attempt("killed", killed, at=place)
    result = {
        "holds": all(trial.holds for trial in trials),
        "peak_mib": max(trial.peak_mib for trial in trials),
        "idle_connections": held,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "disk_full_tried": mounted,
        "trials": [asdict(trial) for trial in trials],
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
    }
    if out is not None:
        write_result(out, result)
    print(json.dumps({key: value for key, value in result.items() if key != "trials"}))
    raise typer.Exit(0 if result["holds"] else 1)


if __name__ == "__main__":
    typer.run(main)
