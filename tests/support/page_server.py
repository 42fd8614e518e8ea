"""A server of fixed pages, on a port of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def page_server(page_of: Callable[[str], str | None], kind: str = "text/html") -> Iterator[str]:
    """Its url. ``page_of``: the page at a path, None where there is none."""

    class Page(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            page = page_of(self.path)
            content = (page or "").encode()
            self.send_response(404 if page is None else 200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{running.server_address[1]}"
        finally:  # An exception that passes leaves no thread polling.
            running.shutdown()
