"""A gateway on a port of its own, in this process or in one of its own, and its page of metrics."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from running_app import running_server

from distill.engines.protocol.counters import parse_page
from distill.live.arms import ARMS, Arm, Arms, write_arms
from distill.live.gateway.app import MOST_CLIENTS, Gateway
from distill.live.gateway.command import configured
from distill.live.options import GatewayOptions
from distill.live.traffic.writer import LogWriter

HTTP = httpx.Client(verify=False, timeout=20)
SAYS = "the gateway answers at "


def metric(url: str, name: str, key: str | None = None, **labels: str) -> float:
    page = parse_page(HTTP.get(f"{url}/metrics", headers={"authorization": f"Bearer {key}"}).text)
    return sum(value for found, value in page.get(f"understudy_{name}", []) if labels.items() <= found.items())


def connected(url: str, content: bytes = b"") -> socket.socket:
    connection = socket.create_connection((httpx.URL(url).host, httpx.URL(url).port or 0), timeout=20)
    connection.sendall(content)
    return connection


def heard(connection: socket.socket) -> bytes:
    """All that is said until the connection is closed, which must happen."""
    found = b""
    with connection, suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


@contextmanager
def gateway_process(engine: str, log: Path, **how: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "distill.cli",
        "gateway",
        "--engine",
        engine,
        "--log",
        str(log),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how) as child:
        try:
            assert child.stdout is not None
            line = next((line for line in child.stdout if SAYS in line), "")
            assert line, child.stderr and child.stderr.read()
            yield child, line.removeprefix(SAYS).partition(",")[0]
        finally:
            child.kill()


@contextmanager
def running_gateway(
    log: Path,
    *urls: str,
    plain: str = "",
    share: float = 0.0,
    key: str | None = None,
    clients: int = MOST_CLIENTS,
    **options: Any,
) -> Iterator[str]:
    arms = [Arm("a", urls[0], 1 - share, "v0001", "t")]
    arms += [Arm("b", urls[1], share, "v0002", "t")] if urls[1:] else []
    arms += [Arm("plain", plain, 0.0, "none", "t", drafts=False)] if plain else []
    writer = LogWriter(log, text=options.get("text", False))
    write_arms(log / ARMS, Arms("flags", tuple(arms)))
    gateway = Gateway(GatewayOptions([urls[0]], log, **options), key, Arms("flags", tuple(arms)), writer, clients)
    with running_server(configured(gateway)) as url:
        yield url
