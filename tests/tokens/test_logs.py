"""Rows of OpenAI-style logs: every shape gives the same prompt and answer; what is broken is one line with file and row."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import refused

from data.prompts.logs import LoggedAnswer
from data.prompts.prompt import PromptRow, PromptSource
from data.prompts.sources import load_source
from speculative.errors import UserError

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two and two?"}]
ASKED = {"model": "served", "messages": TURNS, "temperature": 0.7, "top_p": 0.9, "top_k": -1}
TOLD = {
    "model": "served-0731",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Four."}, "finish_reason": "stop"}],
}
DELTAS = [{"role": "assistant", "content": ""}, {"content": "Fo"}, {"content": "ur."}, {}]
EVENTS = [
    {"model": "served-0731", "choices": [{"index": 0, "delta": delta, "finish_reason": "stop" if not delta else None}]}
    for delta in DELTAS
] + [{"model": "served-0731", "choices": [], "usage": {"completion_tokens": 3}}]
STREAM = "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS) + "data: [DONE]\n\n"
COMPLETION = {"index": 0, "text": " four", "finish_reason": "stop"}
SHAPES: dict[str, list[dict[str, Any]]] = {
    "one row": [{"id": "a", "request": ASKED, "response": TOLD}],
    "without an id": [{"request": ASKED, "response": TOLD}],
    "a stream's events": [{"request": ASKED | {"stream": True}, "response": EVENTS}],
    "a stream's text": [{"request": ASKED | {"stream": True}, "response": STREAM}],
    "two rows": [{"id": "a", "request": ASKED}, {"id": "a", "response": TOLD}],
    "two rows, the later first": [{"id": "a", "response": TOLD}, {"id": "a", "request": ASKED}],
    "two rows, the response twice": [
        *({"id": "a", "request": ASKED}, {"id": "a", "response": TOLD}, {"id": "a", "response": TOLD})
    ],
    "two rows, all twice": [*({"id": "a", "response": TOLD},) * 2, {"id": "a", "request": ASKED}],
    "a stream's text with a comment and a separator in it": [
        {"request": ASKED, "response": ": ping\n\n" + STREAM.replace("[DONE]", '{"choices": [], "note": "\u2028"}')}
    ],
    "JSON text": [{"request": json.dumps(ASKED), "response": json.dumps(TOLD)}],
    "a batch in one file": [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": ASKED},
        {"id": "r1", "custom_id": "a", "response": {"status_code": 200, "body": TOLD}, "error": None},
    ],
}


def written(path: Path, rows: list[dict[str, Any]]) -> PromptSource:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptSource(path=str(path))


def only(rows: list[PromptRow]) -> tuple[PromptRow, LoggedAnswer]:
    (row,) = rows
    return row, LoggedAnswer(**json.loads(row.logged))


def require_the_exchange(rows: list[PromptRow]) -> None:
    row, answer = only(rows)
    assert row.messages == tuple(TURNS)
    assert (answer.text, answer.ids, answer.finished, answer.model) == ("Four.", [], True, "served-0731")
    assert answer.sampling == {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": 0.0}
    assert answer.shaped == []


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_a_chat_is_read_alike(tmp_path: Path, shape: str) -> None:
    require_the_exchange(load_source(written(tmp_path / "log.jsonl", SHAPES[shape])))


@pytest.mark.parametrize("shape", ["a batch in one file", "two rows"])
def test_requests_and_responses_are_two_files(tmp_path: Path, shape: str) -> None:
    for order in (SHAPES[shape], SHAPES[shape][::-1]):
        for number, row in enumerate(order):
            written(tmp_path / f"{number}.jsonl", [row])
        require_the_exchange(load_source(PromptSource(path=str(tmp_path / "*.jsonl"))))


def test_a_parquet_file_of_json_text_is_a_log_too(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(SHAPES["JSON text"]), tmp_path / "log.parquet")
    require_the_exchange(load_source(PromptSource(path=str(tmp_path / "log.parquet"))))


@pytest.mark.parametrize("streamed", [False, True])
def test_completions_and_their_token_ids(tmp_path: Path, streamed: bool) -> None:
    whole = {"index": 0, "text": " four", "token_ids": [8, 9], "finish_reason": "length"}
    parts = [
        {"prompt_token_ids": [5, 6], "index": 0, "text": " fo", "token_ids": [8], "finish_reason": None},
        {"index": 0, "text": "ur", "token_ids": [9], "finish_reason": "length"},
    ]
    told = [{"choices": [part]} for part in parts] if streamed else {"choices": [whole | {"prompt_token_ids": [5, 6]}]}
    asked = {"model": "m", "prompt": "two and two make", "temperature": 0, "logit_bias": {"7": 1}}
    row, answer = only(load_source(written(tmp_path / "log.jsonl", [{"request": asked, "response": told}])))
    assert (row.text, row.prompt_ids) == ("two and two make", (5, 6))
    assert (answer.text, answer.ids, answer.finished, answer.model) == (" four", [8, 9], False, "m")
    assert (answer.sampling["temperature"], answer.shaped) == (0, ["logit_bias"])
    ids_alone = {"request": asked | {"prompt": [5, 6, 7]}, "response": {"choices": [whole]}}
    row, _ = only(load_source(written(tmp_path / "log.jsonl", [ids_alone])))
    assert row.prompt_ids == (5, 6, 7)


@pytest.mark.parametrize(
    ("asked", "told", "finished"),
    [
        ({}, {"stop_reason": "\n\n"}, False),
        ({}, {"matched_stop": "\n\n"}, False),
        ({"stop": ["\n\n"]}, {}, False),  # nothing says what ended it
        ({"stop": ["\n\n"]}, {"stop_reason": None}, True),
        ({"stop": ["\n\n"]}, {"matched_stop": 2}, True),  # its end token
        ({"stop": []}, {}, True),
    ],
)
def test_a_stop_string_does_not_end_the_targets_text(tmp_path: Path, asked: Any, told: Any, finished: bool) -> None:
    row = {"request": ASKED | asked, "response": {"choices": [TOLD["choices"][0] | told]}}
    _, answer = only(load_source(written(tmp_path / "log.jsonl", [row])))
    assert answer.finished == finished


@pytest.mark.parametrize(
    ("setting", "shaped"),
    [
        ({"presence_penalty": 1}, ["presence_penalty"]),
        ({"frequency_penalty": 1.0, "min_tokens": 1}, ["frequency_penalty", "min_tokens"]),
        ({"repetition_penalty": 1.0, "presence_penalty": 0.0, "best_of": 1, "ignore_eos": False}, []),
        ({"repetition_penalty": 1.1, "ignore_eos": True}, ["repetition_penalty", "ignore_eos"]),
        ({"response_format": {"type": "text"}, "logit_bias": {}, "guided_json": None}, []),
        ({"response_format": {"type": "json_object"}}, ["response_format"]),
    ],
)
def test_each_setting_has_a_value_that_changes_nothing(tmp_path: Path, setting: Any, shaped: list[str]) -> None:
    _, answer = only(load_source(written(tmp_path / "log.jsonl", [{"request": ASKED | setting, "response": TOLD}])))
    assert answer.shaped == shaped


def test_a_misspelt_domain_column_is_named(tmp_path: Path) -> None:
    source = written(tmp_path / "log.jsonl", [{"request": ASKED, "response": TOLD, "team": "support"}])
    rows = load_source(source.model_copy(update={"domain_column": "team"}))
    assert [row.domain for row in rows] == ["support"]
    text = refused(load_source, source.model_copy(update={"domain_column": "taem"}))
    assert text == f"{tmp_path}/log.jsonl:1: no column 'taem' (near: team); it has request, response, team"


def test_two_exchanges_with_one_key_are_not_mixed(tmp_path: Path) -> None:
    other = ASKED | {"messages": [{"role": "user", "content": "Three and three?"}]}
    days = [{"id": "1", "request": ASKED}, {"id": "1", "request": other}, {"id": "1", "response": TOLD}]
    source = written(tmp_path / "log.jsonl", days)
    assert refused(load_source, source).startswith(f"{tmp_path}/log.jsonl:2: another row has its key '1'")
    bad_rows: list[UserError] = []
    require_the_exchange(load_source(source, bad_rows=bad_rows))
    assert len(bad_rows) == 1
    twice = [days[2], {"id": "1", "response": TOLD | {"model": "other"}}, days[0]]
    assert "key '1'" in refused(load_source, written(tmp_path / "twice.jsonl", twice))
    # One after the other they are told apart.
    both = load_source(written(tmp_path / "days.jsonl", [days[0], days[2], days[1], {"id": "1", "response": TOLD}]))
    assert len(both) == 2


def test_a_completion_beside_chats_in_a_table_is_read(tmp_path: Path) -> None:
    rows = [{"request": ASKED | {"prompt": None}, "response": TOLD}]
    rows.append({"request": {"messages": None, "prompt": "two and two make"}, "response": {"choices": [COMPLETION]}})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    assert [row.text for row in load_source(PromptSource(path=str(tmp_path / "log.parquet")))] == [
        None,
        "two and two make",
    ]


def test_a_request_without_response_stays_a_prompt(tmp_path: Path) -> None:
    (row,) = load_source(written(tmp_path / "log.jsonl", [{"id": "a", "request": ASKED}]))
    assert row.messages == tuple(TURNS)
    assert not row.logged


BROKEN = {
    "no row has the request of the response 'b'; add the file": {"id": "b", "response": TOLD},
    "a row of a log has request and response, or one and a key": {"id": "b"},
    "request or response is not JSON": {"request": "{", "response": TOLD},
    "can't encode": {"request": json.dumps(ASKED | {"user": "\ud83d"}), "response": TOLD},
    "the response is an error (status 429)": {"request": ASKED, "response": {"status_code": 429, "body": {}}},
    "the response is an error (status 200)": {"request": ASKED, "response": {"error": {"message": "busy"}}},
    "the response is not whole (finish_reason None)": {"request": ASKED, "response": EVENTS[:2]},
    "the response has no text": {"request": ASKED, "response": {"choices": [{"text": "", "finish_reason": "stop"}]}},
    "the response has reasoning without token_ids": {
        "request": ASKED,
        "response": {"choices": [{"message": {"content": "4", "reasoning": "2+2"}, "finish_reason": "stop"}]},
    },
    "the request has no messages and no prompt": {"request": {"input": "x"}, "response": TOLD},
    "the request ends in an assistant turn": {
        "request": {"messages": [*TURNS, {"role": "assistant", "content": "It is"}]},
        "response": TOLD,
    },
    "or one and a key (custom_id, request_id, id)": {"request": ASKED},
}


@pytest.mark.parametrize(
    "row",
    [
        {"request": ASKED, "response": 3},
        {"request": [1], "response": TOLD},
        {"request": ASKED, "response": {"choices": [3]}},
        {"request": ASKED, "response": {"choices": 3}},
        {
            "request": ASKED,
            "response": {"choices": [{"message": {"content": [{"text": "4"}]}, "finish_reason": "stop"}]},
        },
        {"request": ASKED | {"temperature": "warm"}, "response": TOLD},
        {"request": ASKED | {"messages": "Two and two?"}, "response": TOLD},
        {"request": ASKED | {"tools": 3}, "response": TOLD},
        {"request": {"prompt": {"text": "x"}}, "response": TOLD},
    ],
)
def test_values_of_other_types_are_one_line(tmp_path: Path, row: dict[str, Any]) -> None:
    source = written(tmp_path / "log.jsonl", [*SHAPES["one row"], row])
    assert refused(load_source, source).startswith(f"{tmp_path}/log.jsonl:2: ")


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_row_is_one_line_or_is_counted(tmp_path: Path, fault: str) -> None:
    source = written(tmp_path / "log.jsonl", [*SHAPES["one row"], BROKEN[fault]])
    assert refused(load_source, source).startswith(f"{tmp_path}/log.jsonl:2: ")
    with pytest.raises(UserError) as refusal:
        load_source(source)
    assert fault in str(refusal.value)
    bad_rows: list[UserError] = []
    require_the_exchange(load_source(source, bad_rows=bad_rows))
    assert [str(error) for error in bad_rows] == [str(refusal.value)]


def test_other_data_sets_with_responses_are_no_logs(tmp_path: Path) -> None:
    rows = [{"id": "1", "prompt": "a question", "response": "an answer"}]
    (row,) = load_source(written(tmp_path / "data.jsonl", rows))
    assert (row.text, row.logged) == ("a question", "")
