"""The gateway reads requests and responses in pieces of any size."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.live.gateway.request import LoggedRequest, read_request
from distill.live.gateway.tap import Tap
from distill.live.options import GatewayOptions

COUNTS = {"num_spec_steps": 2, "num_accepted_draft_tokens": 3, "num_draft_tokens": 6}
EVENTS = [
    {
        "choices": [
            {
                "index": 0,
                "text": 'a "finish_reason":null data: [DONE]',
                "finish_reason": None,
                "token_ids": [1, 2],
                "prompt_token_ids": [9],
            }
        ]
    },
    {"choices": [{"index": 0, "text": "\u00e9\n", "finish_reason": None, "token_ids": [3]}]},
    {"choices": [{"index": 0, "text": "", "finish_reason": "stop", "token_ids": []}]},
    {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}, "metrics": {"speculative_decoding": COUNTS}},
]
CLOSE = [json.dumps(event, separators=(",", ":"), ensure_ascii=False) for event in EVENTS]
STREAM = ("".join(f": ping\n\ndata: {text}\r\n\r\n" for text in CLOSE) + "data:[DONE]\n\n").encode()


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=12), st.booleans())
def test_a_stream_says_the_same_in_any_pieces(cuts: list[int], keep_ids: bool) -> None:
    tap, places = Tap(stream=True, keep_ids=keep_ids), [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(places):
        assert tap.ended is (STREAM[start:] == b"\n")  # This line ends the stream; an empty one follows.
        tap.feed(STREAM[start:end])
    assert tap.ended
    tap.end()
    assert tap.readable
    assert (tap.finish, tap.prompt_tokens, tap.response_tokens) == ("stop", 1, 3)
    assert (tap.prompt_ids, tap.response_ids) == (([9], [1, 2, 3]) if keep_ids else (None, None))
    assert tap.counts is not None
    assert (tap.counts.accepted, tap.counts.drafted, tap.counts.blocks) == (3, 6, 2)


def test_counts_of_other_engines_and_invalid_answers() -> None:
    llama = Tap(stream=True, keep_ids=False)
    llama.feed(b'data: {"choices":[{"finish_reason":"length"}],"timings":{"draft_n":8,"draft_n_accepted":5}}\n\n')
    llama.end()
    assert llama.counts is not None
    assert (llama.counts.accepted, llama.finish, llama.response_tokens) == (5, "length", None)
    for stream, content in ((True, b"data: {\n"), (True, b"data: [1]\n"), (False, b"<html>"), (False, b"[" * 9999)):
        odd = Tap(stream, keep_ids=True)
        odd.feed(content)
        odd.end()
        assert not odd.readable
    hidden = Tap(stream=False, keep_ids=True)  # A reasoning parser reported only some of the ids.
    hidden.feed(b'{"choices":[{"finish_reason":"stop","token_ids":[4]}],"usage":{"completion_tokens":3}}')
    hidden.end()
    assert (hidden.response_tokens, hidden.response_ids) == (3, None)


def read(more: dict[str, Any], path: str = "/v1/completions", **settings: Any) -> LoggedRequest:
    body = json.dumps({"prompt": "p", **more}).encode()
    return read_request(path, {}, body, GatewayOptions([], Path(), **settings))


def test_sampling_is_unknown_if_one_setting_is_the_engines_default() -> None:
    said = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.0}
    assert read({**said, "max_tokens": 5}).sampling == {**said, "max_tokens": 5}
    assert read({"temperature": 0.7, "top_p": 0.9}).sampling is None
    assert read({"temperature": 1.0}, sampling=",".join(f"{key}={value}" for key, value in said.items())).sampling == {
        **said,
        "temperature": 1.0,
        "max_tokens": None,
    }
    assert (read({"temperature": 0}).sampling or {}).get("temperature") == 0
    assert read({**said, "top_p": "0.9"}).sampling is None


@pytest.mark.parametrize(
    ("more", "constrained"),
    [
        ({}, False),
        (
            {
                "response_format": {"type": "text"},
                "tool_choice": "auto",
                "frequency_penalty": 0,
                "logit_bias": {},
                "n": 1,
            },
            False,
        ),
        ({"response_format": {"type": "json_schema"}}, True),
        ({"structured_outputs": {"regex": "a"}}, True),
        ({"logit_bias": {"5": 1}}, True),
        ({"presence_penalty": 0.5}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"ignore_eos": True}, True),
        ({"tool_choice": "required"}, True),
    ],
)
def test_constraints_are_marked(more: dict[str, Any], constrained: bool) -> None:
    asked = read(more)
    assert (asked.why_not, asked.constrained) == ("", constrained)


@pytest.mark.parametrize(
    ("more", "path", "reason"),
    [
        ({"n": 2}, "completions", "n"),
        ({"logprobs": 0}, "completions", "logprobs"),
        ({"logprobs": True, "top_logprobs": 3}, "completions", "logprobs"),
        ({"prompt_logprobs": 1}, "completions", "logprobs"),
        ({"best_of": 3}, "completions", "best_of"),
        ({"echo": True}, "completions", "echo"),
        ({"prompt": ["two", "prompts"]}, "completions", "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "chat/completions", "content"),
        ({}, "embeddings", "path"),
    ],
)
def test_requests_that_cannot_be_logged_faithfully_are_not_logged(more: dict[str, Any], path: str, reason: str) -> None:
    assert read(more, f"/v1/{path}", text=True).why_not == reason


def test_a_conversation_is_identified_by_its_first_user_message() -> None:
    def talk(*turns: str) -> bytes:
        roles = ["system", "user", "assistant", "user"]
        messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
        return read({"messages": messages}, "/v1/chat/completions").conversation

    assert talk("s", "one") == talk("s", "one", "x", "two") != talk("s", "other")
    assert talk("s", "one") != talk("t", "one")


def test_a_list_of_messages_that_holds_something_else_passes_unlogged() -> None:
    asked = read({"messages": [{"role": "user", "content": "a"}, 5]}, "/v1/chat/completions")
    assert asked.why_not == "content"
    assert asked.conversation == b'[{"content": "a", "role": "user"}, 5]'
