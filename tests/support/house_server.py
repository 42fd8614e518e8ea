"""The house engine on a port of its own, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from distill.live.house_decoding import HouseEngine
from distill.live.house_engine import Pages


@contextmanager
def running_house(engine: HouseEngine) -> Iterator[str]:
    """Its url, without /v1."""
    config = uvicorn.Config(
        Pages(engine).app(), host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=1
    )
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
