"""Engines with odd HTTP, and headers and bytes that must not be forwarded."""

import json
from pathlib import Path

import httpx
import pytest
from gateway_server import running_gateway
from raw_engine import raw_engine

from distill.live.traffic.reader import read_traffic

HTTP = httpx.Client(verify=False, timeout=20)
COUNTS = {"num_spec_steps": 1, "num_accepted_draft_tokens": 1, "num_draft_tokens": 3}
WHOLE = b'{"choices":[{"finish_reason":"stop","text":"hi"}],"usage":{"prompt_tokens":1,"completion_tokens":2}}'


def answer(content: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%scontent-length: %d\r\n\r\n%s" % (headers, len(content), content)


def ask(url: str, body: bytes = b'{"prompt":"p"}', **headers: str) -> httpx.Response:
    return HTTP.post(f"{url}/v1/completions", content=body, headers=headers)


def test_bytes_beyond_an_answer_reach_no_other_client(tmp_path: Path) -> None:
    with raw_engine(answer(WHOLE) + answer(b"of another")) as (engine, _), running_gateway(tmp_path, engine) as url:
        assert [ask(url).content for _ in range(3)] == [WHOLE] * 3


def test_headers_of_a_connection_or_of_the_gateway_are_not_forwarded(tmp_path: Path) -> None:
    own = b"Connection: x-hop, keep-alive\r\nX-Hop: 1\r\nx-understudy-id: forged\r\nx-kept: 2\r\n"
    with raw_engine(answer(WHOLE, own)) as (engine, heads), running_gateway(tmp_path, engine) as url:
        found = ask(url, connection="close, X-Mine", **{"x-mine": "1", "x-understudy-slice": "s"})
    assert {"x-hop", "x-mine"} & set(found.headers) == set()
    assert found.headers["x-kept"] == "2"
    assert found.headers.get_list("x-understudy-id") == [record.id for record in read_traffic(tmp_path).records]
    assert b"x-mine" not in heads[0].lower()
    assert b"x-understudy" not in heads[0].lower()


def test_of_a_length_and_chunks_the_chunks_count(tmp_path: Path) -> None:
    said = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (
        len(WHOLE),
        WHOLE,
    )
    with raw_engine(said) as (engine, _), running_gateway(tmp_path, engine) as url:
        assert ask(url).content == WHOLE


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        (b'{"prompt":"p","temperature":1%s}' % (b"0" * 400), {}),
        (b'{"prompt":"p","temperature":0,"max_tokens":1%s}' % (b"0" * 400), {}),
        (b'{"prompt":"p"}', {**COUNTS, "acceptance_histogram": {"9" * 5000: 1}}),
    ],
)
def test_numbers_beyond_all_numbers_pass(tmp_path: Path, body: bytes, counts: dict[str, object]) -> None:
    said = json.dumps({**json.loads(WHOLE), "metrics": {"speculative_decoding": counts}}).encode()
    with raw_engine(answer(said)) as (engine, _), running_gateway(tmp_path, engine) as url:
        found = ask(url, body)
    assert (found.status_code, found.content) == (200, said)
    assert [(record.response_tokens, record.drafted) for record in read_traffic(tmp_path).records] == [(2, None)]


def test_callers_cannot_reuse_the_record_id_of_another(tmp_path: Path) -> None:
    with raw_engine(answer(WHOLE)) as (engine, _), running_gateway(tmp_path, engine) as url:
        callers = [{"authorization": "Bearer a"}, {"authorization": "Bearer b"}, {}]
        told = [ask(url, **{"x-request-id": "one", **caller}).headers["x-understudy-id"] for caller in callers]
        assert ask(url, **{"x-request-id": "one", **callers[0]}).headers["x-understudy-id"] == told[0]
    assert sorted(record.id for record in read_traffic(tmp_path).records) == sorted(set(told))
    assert told[2] == "one"
    assert len(set(told)) == 3


def test_a_body_nested_as_deep_as_can_be_read_gets_its_answer(tmp_path: Path) -> None:
    with raw_engine(answer(WHOLE)) as (engine, _), running_gateway(tmp_path, engine) as url:
        for depth in range(900, 1000, 2):
            nested = b'{"messages":[{"role":"user","x":%s%s}]}' % (b"[" * depth, b"]" * depth)
            assert HTTP.post(f"{url}/v1/chat/completions", content=nested).content == WHOLE
