"""Kill a real gateway under load: each complete response has one record, and the next gateway continues."""

import threading
import time
from pathlib import Path

import httpx
from fake_engine import FakeEngine
from gateway_server import gateway_process
from running_app import running_app

from distill.live.traffic.reader import read_traffic


def ask_on(url: str, client: int, whole: list[str]) -> None:
    """One client: streams until the gateway is gone; ids of its complete responses."""
    body = {"prompt": "say", "stream": True, "user": "slowly"}
    with httpx.Client(verify=False, timeout=20) as http:
        for turn in range(10_000):
            said = f"c{client}-{turn}"
            try:
                with http.stream("POST", f"{url}/v1/completions", json=body, headers={"x-request-id": said}) as answer:
                    for line in answer.iter_lines():
                        if line == "data: [DONE]":
                            whole.append(said)
            except httpx.TransportError:
                return


def test_after_kill_9_every_complete_response_has_its_record(tmp_path: Path) -> None:
    whole: list[str] = []
    with running_app(FakeEngine(name="a", usage=True).app()) as engine:
        with gateway_process(engine, tmp_path) as (child, url):
            clients = [threading.Thread(target=ask_on, args=(url, number, whole)) for number in range(8)]
            for client in clients:
                client.start()
            deadline = time.monotonic() + 60
            while len(whole) < 60 and time.monotonic() < deadline:
                time.sleep(0.002)
            child.kill()
            for client in clients:
                client.join()
        found = [record.id for record in read_traffic(tmp_path).records]
        assert len(whole) >= 60
        assert set(whole) - set(found) == set()
        file = tmp_path / "log-00001.jsonl"
        assert len(file.read_bytes().splitlines()) == len(set(found)) <= len(whole) + 8
        with file.open("ab") as torn:
            torn.write(b'{"id":"half')
        with gateway_process(engine, tmp_path) as (_, url):
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "say"}, timeout=20).status_code == 200
    assert len(read_traffic(tmp_path).records) == len(found) + 1
