"""A hub of one process, with the part of the Hugging Face hub's HTTP interface that an upload of a folder uses."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN, ORGANISATION = "hf_valid", "org"
PLURALS = {"models": "model", "datasets": "dataset"}


@dataclass
class Hub:
    """What was uploaded: files by (kind, repository); repositories that are private; requests in their order."""

    url: str = ""
    files: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    private: set[tuple[str, str]] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)


def answer(hub: Hub, path: str, token: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of a request, as documented for the hub."""
    if token != f"Bearer {TOKEN}":
        return 401, {"error": "Invalid username or password."}
    if path == "/api/whoami-v2":
        return 200, {"name": "ann", "orgs": [{"name": ORGANISATION}]}
    if path == "/api/validate-yaml":
        front = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
        odd = [] if "license" in front else [{"message": "license is missing"}]
        return 400 if odd else 200, {"errors": odd, "warnings": []}
    if path == "/api/repos/create":
        asked = json.loads(body)
        kind, repository = asked.get("type", "model"), f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != ORGANISATION:
            return 403, {"error": "You don't have the rights to create a model under this namespace"}
        if (kind, repository) in hub.files:
            return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{repository}"}
        hub.files[kind, repository] = {}
        if asked.get("visibility") == "private":
            hub.private.add((kind, repository))
        return 200, {"url": f"{hub.url}/{repository}", "id": repository}
    found = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/(preupload|commit)/main", path)
    if found is None or (key := (PLURALS[found[1]], found[2])) not in hub.files:
        return 404, {"error": "Repository not found"}
    if found[3] == "preupload":
        asked = [
            {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in json.loads(body)["files"]
        ]
        return 200, {"files": asked}
    for line in map(json.loads, body.splitlines()):
        if line["key"] == "file":
            hub.files[key][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
    return 200, {"commitUrl": f"{hub.url}/{found[2]}/commit/{'0' * 40}", "commitOid": "0" * 40, "success": True}


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A running hub."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            length = self.headers.get("Content-Length")
            chunks = []
            if length is None and self.headers.get("Transfer-Encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    chunks.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            body = b"".join(chunks) or self.rfile.read(int(length or 0))
            status, told = answer(hub, path, self.headers.get("Authorization", ""), body)
            content = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        hub.url = f"http://127.0.0.1:{running.server_address[1]}"
        try:
            yield hub
        finally:
            running.shutdown()
