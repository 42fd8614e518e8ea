"""The gateway with scripted engines: responses are forwarded unchanged and logged completely."""

import json
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import ACCEPTED, DRAFTED, IDS, FakeEngine
from gateway_server import connected, heard, metric, running_gateway
from processes import until
from running_app import running_app

from distill.engines.protocol.counters import parse_page
from distill.engines.protocol.engine import counts_of
from distill.live.arms import ARMS, Arm, Arms, write_arms
from distill.live.gateway import app as gateway_app
from distill.live.gateway import limits
from distill.live.gateway.command import _begin_with, arms_of
from distill.live.gateway.request import parse_sampling
from distill.live.options import GatewayOptions
from distill.live.traffic.reader import read_traffic
from distill.live.traffic.record import TrafficRecord, keyed_hash, read_salt
from speculative.errors import UserError

PROMPT = {"model": "m", "prompt": "say", "temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 6}
# A client takes 50 ms to read certificates. Servers close idle connections after 5 s, which must not hit the next request.
HTTP = httpx.Client(verify=False, timeout=20, limits=httpx.Limits(keepalive_expiry=2.0))
TALK = {"model": "m", "messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "say"}]}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_app, "WATCH_SECONDS", 0.02)


def post(url: str, body: Any, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HTTP.post(url + path, content=content, headers={"content-type": "application/json", **headers})


def records(log: Path) -> list[TrafficRecord]:
    return read_traffic(log).records


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", TALK)])
def test_requests_and_responses_pass_unchanged_and_are_recorded(
    engine: FakeEngine, direct: str, tmp_path: Path, path: str, body: dict[str, Any], stream: bool
) -> None:
    log = tmp_path / "log"
    said = json.dumps({**body, "stream": stream, "note": "\u00e9"}, indent=1, ensure_ascii=False)
    asked = f"  {said}\n".encode()
    with running_gateway(log, direct) as url:
        there, through = (post(one, asked, path, authorization="Bearer secret-7") for one in (direct, url))
        headers, sent = engine.asked[-1]
    assert through.content == there.content
    assert (through.status_code, through.headers["content-type"]) == (200, there.headers["content-type"])
    assert sent == asked
    assert headers["authorization"] == "Bearer secret-7"
    (record,) = records(log)
    assert through.headers["x-understudy-id"] == record.id
    assert (record.accepted, record.drafted, record.blocks) == (3, 6, 2)
    assert [*record.accepted_B], [*record.drafted_B] == (ACCEPTED, DRAFTED)
    assert (record.prompt_tokens, record.response_tokens, record.response_ids) == (3, 6, None)
    assert (record.slice, record.arm, record.draft_version, record.target_version) == ("all", "a", "v0001", "t")
    assert record.finish == "stop"
    content = body.get("prompt") or body["messages"]
    assert record.prompt_hash == keyed_hash(read_salt(log), "prompt", content)
    assert (record.sampling or {}).get("temperature") == (0.5 if path == "/v1/completions" else None)
    assert 0 < (record.first_token_s or 0) <= (record.total_s or 0) < 20
    written = b"".join(file.read_bytes() for file in log.iterdir())
    assert b"secret-7" not in written
    assert b"say" not in written
    assert {file.stat().st_mode & 0o777 for file in log.iterdir()} == {0o600}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", TALK)])
def test_with_text_token_ids_are_requested_and_logged(
    engine: FakeEngine, direct: str, tmp_path: Path, path: str, body: dict[str, Any], stream: bool
) -> None:
    engine.becomes(usage=False)
    with running_gateway(tmp_path, direct, text=True, usage=True) as url:
        through = post(url, {**body, "stream": stream}, path, **{"x-request-id": "my-id"})
        _, sent = engine.asked[-1]
        there = post(direct, sent, path)
    engine.becomes(usage=True)
    more = {"return_token_ids": True, **({"stream_options": {"include_usage": True}} if stream else {})}
    assert json.loads(sent) == {**body, "stream": stream, **more}
    assert through.content == there.content
    (record,) = records(tmp_path)
    assert (record.id, record.response_ids, record.prompt_ids) == ("my-id", tuple(IDS), (1, 2, 3))
    assert record.accepted == 3


def test_unlogged_requests_pass_unchanged_and_are_counted(engine: FakeEngine, direct: str, tmp_path: Path) -> None:
    body = json.dumps({**PROMPT, "n": 2}).encode()
    with running_gateway(tmp_path, direct, text=True) as url:
        assert post(url, body).content == post(direct, body).content
        assert (engine.asked[-2][1], metric(url, "not_logged", reason="n")) == (body, 1)
        post(url, PROMPT, **{"x-understudy-no-log": "1"})
        post(url, PROMPT, **{"x-understudy-slice": "sql"})
        assert metric(url, "not_logged", reason="asked") == 1
    assert [record.slice for record in records(tmp_path)] == ["sql"]


def test_errors_pass_through_and_an_engine_that_is_down_is_one_json_error(direct: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        down = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    with running_gateway(tmp_path / "up", direct) as url:
        for status in (400, 500):
            there, through = (post(one, {**PROMPT, "user": str(status)}) for one in (direct, url))
            assert (through.status_code, through.content) == (status, there.content)
        with pytest.raises(httpx.RemoteProtocolError):
            post(url, {**PROMPT, "user": "break", "stream": True})
        assert HTTP.get(f"{url}/v1/models").json()["data"][0]["id"] == "a"
    assert [record.finish for record in records(tmp_path / "up")] == ["error", "error"]
    with running_gateway(tmp_path / "down", down) as url:
        answer = post(url, PROMPT)
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == 502
        health = HTTP.get(f"{url}/health").json()
        assert metric(url, "requests", arm="a", status="502") == 1
    assert health == {"status": "ok", "logging": True}, "it is open to all: no arm's name"
    assert [(record.finish, record.arm) for record in records(tmp_path / "down")] == [("error", "a")]


def test_a_client_that_leaves_ends_its_request_there(engine: FakeEngine, direct: str, tmp_path: Path) -> None:
    before = engine.left
    with running_gateway(tmp_path, direct) as url:
        with HTTP.stream("POST", f"{url}/v1/completions", json={**PROMPT, "user": "hang", "stream": True}) as answer:
            assert next(answer.iter_lines())
        until(lambda: engine.left == before + 1)
        with pytest.raises(httpx.ReadTimeout):
            HTTP.post(f"{url}/v1/completions", json={**PROMPT, "user": "silent"}, timeout=0.2)
        until(lambda: engine.left == before + 2)
        until(lambda: metric(url, "cancelled") == 2)
    assert [record.finish for record in records(tmp_path)] == ["cancelled", "cancelled"]


def test_a_client_that_does_not_read_delays_no_other(
    engine: FakeEngine, direct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.sent = 0
    monkeypatch.setattr(gateway_app, "IDLE_SECONDS", 1.0)
    with running_gateway(tmp_path, direct) as url:
        with HTTP.stream("POST", f"{url}/v1/completions", json={**PROMPT, "user": "flood", "stream": True}) as answer:
            next(answer.iter_raw())
            until(lambda: engine.sent > 1 << 17)
            time.sleep(0.1)
            stalled = engine.sent
            assert post(url, PROMPT).status_code == 200
            time.sleep(0.1)
            # The socket buffers; without backpressure the engine writes hundreds of MB in this time.
            assert engine.sent == stalled < 32 << 20
            until(lambda: metric(url, "cancelled") == 1)  # It was idle.
        until(lambda: not metric(url, "in_flight"))
    assert sorted(record.finish for record in records(tmp_path)) == ["cancelled", "stop"], "the engine was not silent"


def test_an_engine_that_says_nothing_is_given_up(direct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_app, "IDLE_SECONDS", 1.5)  # Long enough for a first event on a busy machine.
    with running_gateway(tmp_path, direct) as url:
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            post(url, {**PROMPT, "user": "hang", "stream": True})
        monkeypatch.setattr(gateway_app, "IDLE_SECONDS", 0.1)
        assert post(url, {**PROMPT, "user": "silent"}).status_code == 504
    assert [record.finish for record in records(tmp_path)] == ["error", "error"]


def test_streams_without_counts_print_one_hint(
    engine: FakeEngine, direct: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine.becomes(usage=False)
    with running_gateway(tmp_path, direct) as url:
        for _ in range(2):
            post(url, {**PROMPT, "stream": True})
    engine.becomes(usage=True)
    assert capfd.readouterr().err.count("--per-request-spec-decode-metrics") == 1
    assert [(record.drafted, record.response_tokens) for record in records(tmp_path)] == [(None, None)] * 2


def test_counts_that_contradict_themselves_are_left_out(direct: str, tmp_path: Path) -> None:
    with running_gateway(tmp_path, direct) as url:
        post(url, {**PROMPT, "user": "odd", "stream": True})
        assert metric(url, "counts_refused", arm="a") == 1
    assert [(record.accepted, record.response_tokens) for record in records(tmp_path)] == [(None, 6)]


def test_metrics_tell_served_acceptance_by_draft_and_slice(direct: str, tmp_path: Path) -> None:
    with running_gateway(tmp_path, direct, key="k") as url:
        for slice_name in ("sql", "sql", "chat"):
            post(url, PROMPT, **{"x-understudy-slice": slice_name, "authorization": "Bearer k"})
        post(url, {**PROMPT, "response_format": {"type": "json_object"}}, authorization="Bearer k")
        assert post(url, PROMPT, authorization="Bearer other").status_code == 401
        assert HTTP.get(f"{url}/metrics").status_code == 401
        assert HTTP.get(f"{url}/health").status_code == 200
        page = parse_page(HTTP.get(f"{url}/metrics", headers={"authorization": "Bearer k"}).text)
    drafts = {name: f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens")}
    found = {
        name: {(labels["slice"], labels["constrained"]): value for labels, value in page[metric]}
        for name, metric in drafts.items()
    }
    kinds = {("sql", "false"): 2, ("chat", "false"): 1, ("all", "true"): 1}
    assert found["accepted_tokens"] == {kind: 3 * count for kind, count in kinds.items()}
    assert found["draft_tokens"] == {kind: 6 * count for kind, count in kinds.items()}
    assert found["drafts"] == {kind: 2 * count for kind, count in kinds.items()}
    places = [(labels["position"], value) for labels, value in page["vllm:spec_decode_num_accepted_tokens_per_pos"]]
    assert sorted(places) == [("0", 2), ("0", 2), ("0", 4), ("1", 1), ("1", 1), ("1", 2), ("2", 0), ("2", 0), ("2", 0)]
    assert {labels["draft_version"] for labels, _ in page[drafts["drafts"]]} == {"v0001"}
    assert sum(value for _, value in page["understudy_requests"]) == 5
    assert [page[f"vllm:{kind}_tokens"] for kind in ("prompt", "generation")] == [
        [({"arm": "a"}, 12)],
        [({"arm": "a"}, 24)],
    ]
    # What reads an engine's page reads the gateway's too.
    counts = counts_of(page)
    assert counts is not None
    assert (counts.engine, counts.accepted, counts.drafted, counts.blocks, counts.tokens) == ("vllm", 12, 24, 8, 24)
    assert counts.accepted_G == (8, 4, 0)
    assert [record.constrained for record in records(tmp_path)].count(True) == 1


def test_a_conversation_stays_at_its_arm_and_arms_change_while_it_runs(direct: str, tmp_path: Path) -> None:
    other = FakeEngine(name="b", usage=True)
    with ExitStack() as stack:
        second = stack.enter_context(running_app(other.app()))
        url = stack.enter_context(running_gateway(tmp_path, direct, second, share=0.5))
        for number in range(12):
            talk = [{"role": "user", "content": f"question {number}"}]
            for turn in range(3):
                post(url, {"messages": talk}, "/v1/chat/completions")
                talk += [{"role": "assistant", "content": f"x{turn}"}, {"role": "user", "content": "and?"}]
        found = [record.arm for record in records(tmp_path)]
        assert all(len(set(found[start : start + 3])) == 1 for start in range(0, 36, 3))
        talks = [record.conversation for record in records(tmp_path)]
        assert [talks.index(one) for one in talks] == [number - number % 3 for number in range(36)], (
            "each its own, in all its turns"
        )
        assert len(other.asked) == found.count("b") in range(3, 34)
        write_arms(tmp_path / ARMS, Arms("rollout x v2", (Arm("c", second, 1.0, "v0003"),)))
        until(lambda: post(url, PROMPT) and records(tmp_path)[-1].draft_version == "v0003")
        (tmp_path / ARMS).write_text("{}")
        time.sleep(0.1)
        assert post(url, PROMPT).json()["id"] == "cmpl-b"
    assert records(tmp_path)[-1].draft_version == "v0003"


def test_above_a_number_in_flight_the_engine_without_a_draft_serves(direct: str, tmp_path: Path) -> None:
    plain = FakeEngine(name="plain", usage=True)
    with running_app(plain.app()) as without, running_gateway(tmp_path, direct, plain=without, shed_above=1) as url:
        assert post(url, PROMPT).json()["id"] == "cmpl-a"
        with HTTP.stream("POST", f"{url}/v1/completions", json={**PROMPT, "user": "hang", "stream": True}):
            assert post(url, PROMPT).json()["id"] == "cmpl-plain"
            assert metric(url, "shed") == 1
    assert {record.arm for record in records(tmp_path)} == {"a", "plain"}


def test_hostile_clients_harm_no_other(direct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.3)
    post_line = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    said = {
        "no request": b"",
        "slow headers": post_line,
        "headers without end": post_line + b"a: " + b"x" * (3 << 16),
        "no HTTP": b"\x16\x03\x01 hello\r\n\r\n",
        "slow body": post_line + b"content-length: 10\r\n\r\n{",
        "a body said to be huge": post_line + b"content-length: 99999999\r\n\r\n{",
        "a huge body in chunks": post_line
        + b"transfer-encoding: chunked\r\n\r\n"
        + b"10000\r\n"
        + b"x" * (1 << 16)
        + b"\r\n"
        + b"10000\r\n"
        + b"x" * (1 << 16)
        + b"\r\n",
        "left": post_line + b"content-length: 10\r\n\r\n{",
    }
    monkeypatch.setattr(limits, "MOST_BODY_BYTES", 1 << 16)
    with running_gateway(tmp_path, direct) as url:
        began = {what: connected(url, content) for what, content in said.items()}
        began.pop("left").close()
        assert post(url, PROMPT).status_code == 200
        answers = {what: heard(connection) for what, connection in began.items()}
        assert {what: answer[9:12] for what, answer in answers.items()} == {
            "no request": b"",
            "slow headers": b"",
            "headers without end": b"400",
            "no HTTP": b"400",
            "slow body": b"408",
            "a body said to be huge": b"413",
            "a huge body in chunks": b"413",
        }
        for content in (b"{", b"[" * 60_000, b'{"prompt": 1e999}', b"\xff\xfe", b'{"prompt": "\\ud800", "x": [1e400]}'):
            assert post(url, content).status_code in (200, 400)
        assert metric(url, "not_logged", reason="unreadable") == 3
        words = {"x-request-id": 'a"b\\', "x-understudy-slice": "s" * 200}
        assert post(url, PROMPT, **words).status_code == 200
        for number in range(70):
            post(url, PROMPT, **{"x-understudy-slice": f"made-up-{number}"})
        assert metric(url, "in_flight") == 0
    found = {record.slice for record in records(tmp_path)}
    assert len(found) == gateway_app.MOST_SLICES + 1
    assert "others" in found


def test_a_full_disk_stops_logging_and_never_serving(
    direct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import distill.live.traffic.writer as module

    full, write = [False], module.os.write

    def limited(file: int, content: bytes) -> int:
        if full[0]:
            write(file, content[: len(content) // 2])
            raise OSError(28, "No space left on device")
        return write(file, content)

    monkeypatch.setattr(module.os, "write", limited)
    with running_gateway(tmp_path, direct) as url:
        for state in (False, True, False):
            full[0] = state
            answer = post(url, {**PROMPT, "stream": True}, **{"x-request-id": f"full-{state}"})
            assert answer.content.endswith(b"data: [DONE]\n\n")
            assert HTTP.get(f"{url}/health").json()["logging"] is not state
        assert metric(url, "records_failed") == 1
    assert [record.id for record in records(tmp_path)] == ["full-False"]
    assert len((tmp_path / "log-00001.jsonl").read_bytes().splitlines()) == 2
    assert capfd.readouterr().err.count("No space left on device") == 1


def test_flags_become_arms_and_those_of_a_rollout_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = arms_of(GatewayOptions(["http://h:1/v1/"], tmp_path, "v0001", "t", plain_engine="http://h:3"))
    assert [(arm.name, arm.url, arm.share, arm.draft_version, arm.drafts) for arm in arms.arms] == [
        ("a", "http://h:1", 1.0, "v0001", True),
        ("plain", "http://h:3", 0.0, "none", False),
    ]
    path = tmp_path / ARMS
    assert _begin_with(path, arms) == arms
    moved = Arms("rollout x v0002", (Arm("b", "http://h:2", 1.0, "v0002"),))
    write_arms(path, moved)
    assert _begin_with(path, arms) == moved
    assert capsys.readouterr().out.count("rollout x v0002") == 1
    assert parse_sampling("temperature=0.7,top_k=20") == {"temperature": 0.7, "top_k": 20}
    with pytest.raises(UserError, match="--engine http://h:2: give one engine"):
        arms_of(GatewayOptions(["http://h:1", "http://h:2"], tmp_path))
    with pytest.raises(UserError, match="--sampling heat=1"):
        parse_sampling("heat=1")


def test_waits_are_those_of_streams_and_of_answered_completions(direct: str, tmp_path: Path) -> None:
    with running_gateway(tmp_path, direct) as url:
        post(url, PROMPT)
        for _ in range(2):
            post(url, {**PROMPT, "stream": True})
        for refused in ("400", "500"):
            post(url, {**PROMPT, "user": refused})
        HTTP.get(f"{url}/v1/models")
        page = parse_page(HTTP.get(f"{url}/metrics").text)
    # The first bytes of a response that comes whole are its last ones.
    assert page["vllm:time_to_first_token_seconds_count"] == [({"arm": "a"}, 2)]
    assert page["vllm:e2e_request_latency_seconds_count"] == [({"arm": "a"}, 3)]
