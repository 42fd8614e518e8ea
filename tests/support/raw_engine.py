"""An engine that says given bytes, whatever HTTP makes of them."""

from __future__ import annotations

import itertools
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def raw_engine(
    answer: bytes, once: bool = False, endless: bytes = b"", pause: float = 0.0
) -> Iterator[tuple[str, list[bytes]]]:
    """Its url, and the heads of what it was asked.

    once: a second POST on a connection gets no answer. endless: what follows an answer for ever, with so many seconds between.
    """
    heads, over = list[bytes](), threading.Event()

    class Connection(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            posts = 0
            while head := b"".join(itertools.takewhile(lambda line: line != b"\r\n", self.rfile)):
                posts += head.startswith(b"POST ")
                if once and posts > 1:
                    return
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                self.rfile.read(int(lengths[0].split(b":")[1]) if lengths else 0)
                heads.append(head)
                self.wfile.write(answer)
                with suppress(OSError):
                    while endless and not over.wait(pause):
                        self.wfile.write(endless)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", heads
        finally:
            over.set()
            server.shutdown()
            thread.join()
