"""Files of a batch service: what is asked, what is taken in any order, and which rows are left out by name."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_service import Result, answer_batch, failed, read_jsonl, write_jsonl
from refusals import refused
from tiny_training import TOKENS, tiny_tokenizer

from data.responses.batch_file import CHAT, COMPLETIONS, LeftOut, WantedAnswers, in_words, read_results, write_requests
from data.responses.endpoint_keys import Endpoint
from data.responses.rendered import RenderedPrompt
from data.responses.respond import ResponsePlan
from data.responses.servers import Servers
from data.responses.store import Row, Store
from speculative.decoder.responses import DecodeSettings
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

SETTINGS = DecodeSettings(
    SamplingSettings(temperature=0.8, top_k=20), max_tokens=6, rule=Rule.named("sample"), eos_ids=(2,), seed=5
)
GREEDY = replace(SETTINGS, sampling=SamplingSettings(temperature=0.0), rule=Rule.named("greedy"))
SAMPLES = 2


def prompts() -> list[RenderedPrompt]:
    texts = [f"def f{index}(a{', b' * (index % 4)}):" for index in range(5)]
    ids = [tuple(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]) for text in texts]
    return [RenderedPrompt(f"prompt-{index}", "code", some) for index, some in enumerate(ids)]


def wanted(folder: Path, settings: DecodeSettings = SETTINGS) -> list[WantedAnswers]:
    store = Store(folder)
    store.open({"seed": settings.seed, "temperature": settings.sampling.temperature})
    return [WantedAnswers(store, ResponsePlan(prompts(), SAMPLES, 4), settings)]


def asked(folder: Path, url: str = COMPLETIONS, settings: DecodeSettings = SETTINGS) -> Path:
    path = folder / "requests.jsonl"
    write_requests(path, wanted(folder / "store", settings), "tiny", url, tiny_tokenizer())
    return path


def taken(folder: Path, results: list[Result], settings: DecodeSettings = SETTINGS) -> tuple[list[Row], LeftOut]:
    path = write_jsonl(folder / "results.jsonl", results)
    left_out = read_results(path, wanted(folder / "store", settings), TOKENS, lambda rows, settings: None)
    return by_key(Store(folder / "store")), left_out


def by_key(store: Store) -> list[Row]:
    return sorted(store.read(), key=lambda row: (row.prompt_id, row.sample))


def served(folder: Path, url: str, settings: DecodeSettings) -> list[Row]:
    (want,) = wanted(folder, settings)
    Servers(Endpoint(**address(url)), tiny_tokenizer(), TOKENS).respond(want.store, want.plan, settings, show=False)
    return by_key(want.store)


def address(url: str) -> dict[str, Any]:
    return {"urls": (url,)} if "urls" in Endpoint.model_fields else {"url": url}


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("settings", [SETTINGS, GREEDY], ids=["sampled", "greedy"])
def test_results_in_any_order_are_the_answers_of_a_server(
    server: Any, tmp_path: Path, url: str, settings: DecodeSettings
) -> None:
    results = answer_batch(asked(tmp_path, url, settings))
    random.Random(1).shuffle(results)
    rows, left_out = taken(tmp_path, results, settings)
    assert rows == served(tmp_path / "served", server[0], settings)
    assert in_words(left_out) == "none"
    assert not wanted(tmp_path / "store", settings)[0].lacking


def test_half_a_file_is_kept_and_only_what_lacks_is_asked_again(tmp_path: Path) -> None:
    requests = read_jsonl(asked(tmp_path))
    results = answer_batch(tmp_path / "requests.jsonl")
    (tmp_path / "whole").mkdir()
    whole, _ = taken(tmp_path / "whole", results)
    path = write_jsonl(tmp_path / "half.jsonl", [results[0], failed(requests[1]), *results[2:5]])
    path.write_bytes(path.read_bytes()[:-40])
    left_out = read_results(path, wanted(tmp_path / "store"), TOKENS, lambda rows, settings: None)
    assert len(left_out) == 2
    assert f"{path}:2: status 400, URL /v1/completions was used." in in_words(left_out)
    assert f"1 rows are cut off or not JSON (the first {path}:5)" in in_words(left_out)
    kept = {path.name for path in (tmp_path / "store").glob("shard-*")}
    again = read_jsonl(asked(tmp_path))
    assert [one["custom_id"] for one in again] == [requests[index]["custom_id"] for index in (1, 4, 5, 6, 7, 8, 9)]
    rows, _ = taken(tmp_path, answer_batch(tmp_path / "requests.jsonl"))
    assert rows == whole
    assert kept <= {path.name for path in (tmp_path / "store").glob("shard-*")}
    rows, left_out = taken(tmp_path, results)
    assert (rows, in_words(left_out)) == (whole, "none"), "what is there is not read again"
    left_out = read_results(path, wanted(tmp_path / "store"), TOKENS, lambda rows, settings: None)
    assert len(left_out) == 1, "the file that was read before is no mistake"


def test_results_of_another_config_are_refused_by_row(tmp_path: Path) -> None:
    results = answer_batch(asked(tmp_path))
    other = replace(SETTINGS, seed=6)
    (tmp_path / "other").mkdir()
    text = refused(taken, tmp_path / "other", results, other)
    assert f"{tmp_path}/other/results.jsonl:1: custom_id '{results[0]['custom_id']}' is of another config" in text
    assert not list((tmp_path / "other").rglob("shard-*"))


def spoilt(results: list[Result], what: str) -> list[Result]:
    """The results with one fault in the second row."""
    row = results[1]
    choice = row["response"]["body"]["choices"][0]
    if what == "vocabulary":
        choice["token_ids"][0] = TOKENS
    elif what == "log-probabilities":
        choice["logprobs"]["token_logprobs"].pop()
    elif what == "null":
        choice["logprobs"]["token_logprobs"][0] = None
    elif what == "not a number":
        choice["logprobs"]["token_logprobs"][0] = math.nan
    elif what == "cut":
        choice |= {"finish_reason": "abort"}
    elif what == "empty":
        choice |= {"finish_reason": "length", "token_ids": [], "logprobs": {"token_logprobs": []}}
    elif what == "deep":
        row["response"] = json.loads("[" * 900 + "]" * 900)
    elif what == "prompt":
        choice["prompt_token_ids"] = [5, 6]
    elif what == "service":
        row |= {"error": {"code": "expired", "message": "not done within 24 h"}, "response": None}
    elif what == "status":
        row["response"] = {"status_code": 500, "body": {"error": {"message": "out of memory"}}}
    elif what == "unknown":
        row["custom_id"] = row["custom_id"].replace("prompt-", "gone-")
    return results


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("vocabulary", f":2: token {TOKENS}, but the vocabulary of target.path has {TOKENS} rows"),
        ("log-probabilities", ":2: 5 log-probabilities for 6 response tokens"),
        ("null", ":2: not a completion"),
        ("not a number", ":2: log-probabilities that are none: [nan]"),
        ("cut", ":2: not a whole answer: 6 tokens of at most 6, finish_reason 'abort'"),
        ("empty", ":2: not a whole answer: 0 tokens of at most 6, finish_reason 'length'"),
        ("deep", ":2: not a completion"),
        ("prompt", ":2: not the answer to this prompt's tokens (prompt_token_ids: [5, 6])"),
        ("service", ":2: status None, not done within 24 h"),
        ("status", ":2: status 500, out of memory"),
        ("unknown", "1 rows are of prompts that this run does not have"),
    ],
)
def test_a_row_that_cannot_be_used_is_left_out_by_its_row(tmp_path: Path, what: str, words: str) -> None:
    rows, left_out = taken(tmp_path, spoilt(answer_batch(asked(tmp_path)), what))
    assert len(rows) == 9
    assert words in in_words(left_out)
    assert sum(map(len, left_out.values())) == 1


def test_a_chat_answer_must_list_the_prompt(tmp_path: Path) -> None:
    results = answer_batch(asked(tmp_path, CHAT))
    for result in results:
        del result["response"]["body"]["prompt_token_ids"]
    text = refused(taken, tmp_path, results)
    assert "no row has an answer of this run: 10 rows have an error or no usable answer" in text
    assert "not the answer to this prompt's tokens (prompt_token_ids: None)" in text


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    want = wanted(tmp_path / "store")
    assert "nowhere.jsonl: cannot be read" in refused(
        read_results, tmp_path / "nowhere.jsonl", want, TOKENS, lambda rows, settings: None
    )
