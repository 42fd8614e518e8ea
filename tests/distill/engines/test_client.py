"""What engines are asked and told: no key that was not asked for, no other server, no endless answer, no proxy on
the way to this machine.
"""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from page_server import page_server
from processes import free_port
from raw_engine import raw_engine
from refusals import refused
from tiny_training import TOKENS, tiny_tokenizer

from data.responses import engine_http
from data.responses.endpoint import EndpointTarget
from data.responses.endpoint_keys import Endpoint
from data.responses.engine_http import answers, page_at
from distill.commands.drift.sources import scrape
from distill.commands.readback.options import ReadbackOptions
from distill.commands.readback.readback import readback_command
from distill.engines.protocol import client as engine_client
from distill.engines.protocol.client import EngineClient, counters_of
from distill.engines.protocol.engine import known_engines
from distill.live.rollout.engine import models
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY

SECRET = "sk-secret"
OK = b"HTTP/1.1 200 OK\r\n"


def engine_at(url: str, **how: Any) -> EngineClient:
    how = {"model": None, "timeout": 20.0, "concurrency": 1, **how}
    return EngineClient(url, tiny_tokenizer(), TOKENS, **how)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"X-Gateway: {SECRET}\nAuthorization: Bearer {SECRET}")


def check_target(url: str) -> None:
    target = EndpointTarget(Endpoint(urls=(f"{url}/v1",)), tiny_tokenizer(), TOKENS)
    target.retries = 0
    target.check()


ASKED: dict[str, Callable[[str], Any]] = {
    "readback": lambda url: engine_at(url).identify(),
    "readback's counters": lambda url: engine_at(url).scrape(),
    "drift": lambda url: scrape(url, 2, 0.0, None),
    "served target": check_target,
    "rollout's health": answers,
    "rollout's models": models,
}


@pytest.mark.parametrize("asked", ASKED)
def test_no_key_is_sent_that_was_not_asked_for(asked: str) -> None:
    with raw_engine(OK + b"content-length: 2\r\n\r\n{}") as (url, heads), suppress(UserError):
        ASKED[asked](url)
    assert heads
    assert SECRET.encode() not in b"".join(heads)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("status", [b"302 Found", b"307 Temporary Redirect"])
def test_a_redirect_to_another_server_is_not_followed(
    asked: str, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "_LONGEST_SETTLING", 0.0)
    with raw_engine(OK + b"content-length: 2\r\n\r\n{}") as (other, reached):
        moved = f"location: {other}/v1/x\r\ncontent-length: 0\r\n\r\n".encode()
        with raw_engine(b"HTTP/1.1 " + status + b"\r\n" + moved) as (url, heads), suppress(UserError):
            ASKED[asked](url)
        assert heads
    assert reached == []


def test_a_key_that_was_asked_for_reaches_its_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "right")
    with raw_engine(b"") as (other, reached):
        moved = f"HTTP/1.1 307 x\r\nlocation: {other}/v1/x\r\ncontent-length: 0\r\n\r\n".encode()
        with raw_engine(moved) as (url, heads):
            client = engine_at(url, api_key_env="ENGINE_KEY")
            assert f"redirects to {other}" in refused(client.identify)
            assert client.scrape() is None
            with pytest.raises(ValueError, match="no counters"):
                scrape(url, 2, 0.0, None, "right")
    assert reached == []
    assert len(heads) > 3
    assert all(b"authorization: bearer right" in head.lower() for head in heads)


def test_a_redirect_on_the_same_server_is_followed() -> None:
    with raw_engine(b"HTTP/1.1 307 x\r\nlocation: /metrics/\r\ncontent-length: 0\r\n\r\n") as (url, heads):
        assert page_at(f"{url}/metrics") is None
    assert heads[1].startswith(b"GET /metrics/ ")


def test_an_empty_variable_is_one_line(tmp_path: Any) -> None:
    asked = ReadbackOptions("http://127.0.0.1:9", tmp_path, api_key_env="NOT_THERE")
    assert "--api-key-env NOT_THERE: the variable is empty" in refused(readback_command, asked)


CHUNK = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n"
ENDLESS = {
    "body": (OK + b"\r\n", b"x" * (1 << 16)),
    "chunks": (OK + b"transfer-encoding: chunked\r\n\r\n", CHUNK),
    "said length": (OK + b"content-length: 1000000000\r\n\r\n", b"x" * (1 << 16)),
    "error": (b"HTTP/1.1 400 Bad\r\n\r\n", b"x" * (1 << 16)),
    "headers": (OK, b"a: b\r\n" * 1000),
    "informational": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "trailers": (OK + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 1000),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_answer_ends(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineClient, "most_bytes", 1 << 22)
    tracemalloc.start()
    try:
        head, part = ENDLESS[kind]
        with raw_engine(head, endless=part) as (url, _):
            assert page_at(url, seconds=2.0) is None
            text = refused(engine_at(url, timeout=1.0).identify)
            assert text.startswith(url)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # An answer that is too long is there twice at most: its parts, and the last of them joined.
    assert peak < 3 * engine_http.PAGE_BYTES
    if kind in ("body", "chunks", "said length", "error"):
        assert "longer than 4,194,304 bytes" in text


def test_an_answer_a_byte_at_a_time_ends() -> None:
    with raw_engine(OK + b"content-length: 1000000\r\n\r\n", endless=b"x", pause=0.02) as (url, _):
        assert page_at(url, seconds=0.5) is None
        engine = engine_at(url, timeout=0.5)
        for _ in range(2):  # the second request gets another connection
            assert "no complete answer within 1.5 s" in refused(engine.identify)


def test_a_connection_is_not_used_again_after_it_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers close it after some seconds, and what is asked at that moment gets no answer."""
    monkeypatch.setattr(engine_http, "_KEPT_SECONDS", 0.5)
    with raw_engine(OK + b"content-length: 2\r\n\r\n{}") as (url, _), engine_http.engine_http(url) as client:

        def port() -> int:
            stream = client.get(url).extensions["network_stream"]
            return int(stream.get_extra_info("client_addr")[1])

        first = port()
        assert port() == first
        time.sleep(0.6)
        assert port() != first


def test_no_request_follows_a_stream_of_llama_server_on_its_connection() -> None:
    page = {"data": [{"id": "tiny", "object": "model"}], "usage": {"completion_tokens": 1}}
    page["choices"] = [{"text": "a", "token_ids": [5], "finish_reason": "length"}]
    body = json.dumps(page).encode()
    answer = OK + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with raw_engine(answer, once=True) as (url, heads):
        client = engine_at(url, model="tiny")
        client.engine, client.timed = known_engines()["llama.cpp"], True
        settings = DecodeSettings(GREEDY, 0, Rule.named("greedy"), 1, eos_ids=(2,))
        found = [client.ask([1, 2], settings, key).ids for key in "abc"]
    assert found == [[5]] * 3
    assert sum(head.startswith(b"POST ") for head in heads) == 3


def test_a_compressed_answer_does_not_grow() -> None:
    bomb = gzip.compress(b" " * (1 << 26))
    head = b"content-encoding: gzip\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(bomb)
    with raw_engine(OK + head + bomb) as (url, heads):
        page = page_at(url)
        assert "accept-encoding: identity" in heads[0].decode().lower()
        assert page is not None
        assert len(page.text) <= len(bomb)
        assert url in refused(engine_at(url).identify)


def test_json_too_deep_is_one_line() -> None:
    deep = b"[" * 200_000
    with raw_engine(OK + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(deep) + deep) as (
        url,
        _,
    ):
        assert url in refused(engine_at(url).identify)
        assert models(url) == set()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_engine_here_is_asked_without_the_proxy(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    pages = {
        "/v1/models": '{"data": [{"id": "tiny", "object": "model"}]}',
        "/metrics": "vllm:spec_decode_num_drafts 1\n",
    }
    with page_server(pages.get, "application/json") as url:
        url = url.replace("127.0.0.1", host)
        assert answers(url)
        assert models(url) == {"tiny"}
        assert engine_at(url).model == "tiny"
        assert page_at(f"{url}/metrics") is not None
        assert counters_of(url) is None


def test_another_machine_is_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway connects to all its engines directly, and so does a rollout that asks for their health."""
    with raw_engine(OK + b"content-length: 2\r\n\r\n{}") as (proxy, heads):
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        page = page_at("http://engine.invalid:8000/metrics")
        assert page is not None
        assert page.text == "{}"
        assert heads[0].startswith(b"GET http://engine.invalid:8000/metrics ")
        assert not answers("http://engine.invalid:8000")
    assert len(heads) == 1
