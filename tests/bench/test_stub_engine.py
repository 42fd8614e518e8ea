"""The stub engine uses vLLM's protocol, counts like the decoder, and survives clients that leave."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from gateway_server import running_gateway
from processes import until
from running_app import running_app
from stub_engine import StubEngine
from transformers import PreTrainedModel
from vllm_protocol import Pages

from distill.config.target import TargetConfig
from distill.engines.protocol.client import counters_of
from distill.engines.protocol.engine import read_counts
from distill.live.traffic.reader import read_traffic
from distill.models.draft import load_draft
from distill.models.target import Target
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

GAMMA = 3
ASKED = {"prompt": [1, 40, 41, 42], "max_tokens": 20, "temperature": 0.8, "seed": 5}
ASKED |= {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def pair(tiny_target: Path) -> Iterator[tuple[PreTrainedModel, Any, ModelDrafter]]:
    """The target as its own draft: its argmax is sometimes what it samples."""
    target = Target(TargetConfig(path=str(tiny_target)), torch.device("cpu"))
    with target.loaded() as model:
        yield model, target.tokenizer, ModelDrafter(load_draft(str(tiny_target), target))


@pytest.fixture(scope="module")
def url(pair: tuple[PreTrainedModel, Any, ModelDrafter]) -> Iterator[str]:
    with running_app(Pages(StubEngine(*pair, GAMMA, "greedy-draft", name="tiny")).app()) as address:
        yield address


def ask(url: str, path: str = "completions", **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/{path}", json=ASKED | body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(url: str, path: str = "completions", **body: Any) -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{url}/v1/{path}", json=ASKED | body | {"stream": True}, timeout=30) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_counts_are_those_of_blocks_after_the_first_token(
    url: str, pair: tuple[PreTrainedModel, Any, ModelDrafter]
) -> None:
    before, answer, after = counters_of(url), ask(url, temperature=0), counters_of(url)
    ids = answer["choices"][0]["token_ids"]
    plain, _ = decode(
        pair[0],
        None,
        [("a", ASKED["prompt"])],
        DecodeSettings(SamplingSettings(0.0), 0, Rule.named("greedy"), 20),
    )
    assert ids == plain[0].response_ids  # greedy text is the target's own
    counts = read_counts(answer)
    # The target as draft is always accepted: one first token, then full blocks up to 20 tokens.
    assert counts is not None
    assert counts.accepted_B == counts.drafted_B == (GAMMA,) * 5
    assert (counts.blocks, counts.gamma) == (5, GAMMA)
    told = [getattr(after, name) - getattr(before, name) for name in ("accepted", "drafted", "blocks")]
    assert told == [counts.accepted, counts.drafted, counts.blocks], "/metrics says the same"


def test_stream_says_what_the_whole_answer_says(url: str) -> None:
    whole = ask(url)
    *pieces, last = streamed(url, stream_options={"include_usage": True})
    assert [token for piece in pieces for token in piece["choices"][0]["token_ids"]] == whole["choices"][0]["token_ids"]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["choices"][0]["text"]
    assert pieces[0]["choices"][0]["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"] == ASKED["prompt"]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert (last["usage"], last["metrics"]) == (whole["usage"], whole["metrics"])
    counts = read_counts(whole)
    assert counts is not None
    assert counts.blocks == len(pieces) - 1
    assert counts.accepted + counts.blocks + 1 >= 20  # type: ignore[operator]


def test_chat_has_the_contents_for_a_prompt(url: str) -> None:
    asked = {"messages": [{"role": "user", "content": "def"}, {"role": "assistant", "content": " f"}]}
    answer = ask(url, "chat/completions", **asked)
    *pieces, _ = streamed(url, "chat/completions", stream_options={"include_usage": True}, **asked)
    assert answer["choices"][0]["message"]["content"] == "".join(x["choices"][0]["delta"]["content"] for x in pieces)
    assert answer["prompt_token_ids"] == pieces[0]["prompt_token_ids"]


def test_through_the_gateway_gates_and_constraints_keep_the_books(
    url: str, pair: tuple[PreTrainedModel, Any, ModelDrafter], tmp_path: Path
) -> None:
    free = ask(url)["choices"][0]["token_ids"]
    with (
        running_app(Pages(StubEngine(*pair, GAMMA, "greedy-draft", name="tiny", withheld=[free[4]])).app()) as gated,
        running_gateway(tmp_path, gated, text=True, usage=True) as through,
    ):
        said = [ask(through), ask(through, logit_bias={str(free[4]): -100})]
        pieces = streamed(through)
    gate, biased, stream = read_traffic(tmp_path).records
    for answer, record in zip(said, (gate, biased), strict=True):
        counts = read_counts(answer)
        assert counts is not None
        assert (record.accepted, record.drafted, record.blocks) == (counts.accepted, counts.drafted, counts.blocks)
        assert [*(record.response_ids or ())] == answer["choices"][0]["token_ids"]
        # A block is counted as verified, even if fewer tokens are emitted.
        assert (record.response_tokens or 0) <= (counts.accepted or 0) + (counts.blocks or 0) + 1
    assert free[4] not in said[1]["choices"][0]["token_ids"]
    assert [*(stream.response_ids or ())] == [*(gate.response_ids or ())] == free[: free.index(free[4])]
    assert (stream.accepted_B, stream.finish) == (gate.accepted_B, "stop")
    assert pieces[-1]["usage"]["completion_tokens"] == stream.response_tokens
    # ignore_eos, which all of them set, is a constraint too.
    assert [record.constrained for record in (gate, biased, stream)] == [True] * 3


def test_a_client_that_leaves_is_not_decoded_any_more(url: str) -> None:
    def aborted() -> bool:
        return 'finished_reason="abort"' in httpx.get(f"{url}/metrics").text

    long = ASKED | {"max_tokens": 100, "temperature": 1.9, "seed": None}
    assert not aborted()
    with httpx.stream("POST", f"{url}/v1/completions", json=long | {"stream": True}) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=long, timeout=0.02)
    assert ask(url, max_tokens=2)["usage"]["completion_tokens"] == 2
    until(aborted)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"n": 2}, "n > 1"),
        ({"logprobs": 1}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": -1}, "temperature = -1.0"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10**6]}, "token id 1000000"),
        ({"max_tokens": 1000}, "exceeds the context"),
        ({"logit_bias": {"x": 1}}, "invalid literal"),
        ({"model": "other"}, "`other` does not exist"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(url: str, body: dict[str, Any], said: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json=ASKED | body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_without_a_draft_no_count_of_drafts_is_reported(pair: tuple[PreTrainedModel, Any, ModelDrafter]) -> None:
    with running_app(Pages(StubEngine(*pair[:2], None, GAMMA, "greedy-draft", name="tiny")).app()) as plain:
        answer = ask(plain)
    assert "metrics" not in answer
    assert len(answer["choices"][0]["token_ids"]) == 20
