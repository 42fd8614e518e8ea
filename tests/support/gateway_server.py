"""A gateway on a port of its own, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from running_app import running_app

from distill.live.arms import ARMS, Arm, Arms, write_arms
from distill.live.gateway.app import Gateway
from distill.live.gateway.limits import BoundedProtocol
from distill.live.options import GatewayOptions
from distill.live.traffic.writer import LogWriter


@contextmanager
def running_gateway(
    log: Path, *urls: str, plain: str = "", share: float = 0.0, key: str | None = None, **options: Any
) -> Iterator[str]:
    arms = [Arm("a", urls[0], 1 - share, "v0001", "t")]
    arms += [Arm("b", urls[1], share, "v0002", "t")] if urls[1:] else []
    arms += [Arm("plain", plain, 0.0, "none", "t", drafts=False)] if plain else []
    writer = LogWriter(log, text=options.get("text", False))
    write_arms(log / ARMS, Arms("flags", tuple(arms)))
    app = Gateway(GatewayOptions([], log, **options), key, Arms("flags", tuple(arms)), writer).app()
    with running_app(app, http=BoundedProtocol, server_header=False, date_header=False) as url:
        yield url
