"""An ASGI application on a port of its own, in this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import uvicorn

# It looks every tenth of a second whether to stop, and waits two more for what is open: most of the time of many tests.
vars(uvicorn.server)["asyncio"] = SimpleNamespace(**{**vars(asyncio), "sleep": lambda _: asyncio.sleep(0.01)})


@contextmanager
def running_app(app: Any, **config: Any) -> Iterator[str]:
    """Its url."""
    with running_server(uvicorn.Config(app, **{"log_level": "critical", **config})) as url:
        yield url


@contextmanager
def running_server(config: uvicorn.Config) -> Iterator[str]:
    config.host, config.port, config.timeout_graceful_shutdown = "127.0.0.1", 0, 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
