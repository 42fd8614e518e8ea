"""A batch service over the tiny model: the results of a file of requests, as vLLM's `run-batch` writes them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from model_server import Behaviour, Handler
from tiny_training import tiny_tokenizer

Result = dict[str, Any]


def read_jsonl(path: Path) -> list[Result]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_jsonl(path: Path, rows: list[Result]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def answer_batch(requests: Path) -> list[Result]:
    return [result_of(request) for request in read_jsonl(requests)]


def result_of(request: Result) -> Result:
    body, chat = dict(request["body"]), request["url"].endswith("chat/completions")
    assert request["method"] == "POST"
    if chat:
        assert body["chat_template"] == "{{ messages[0]['content'] }}"
        assert body["logprobs"] is True
        (message,) = body["messages"]
        body["prompt"] = tiny_tokenizer()(message["content"], add_special_tokens=False)["input_ids"]
        body["logprobs"] = 1
    answer = Handler.complete(SimpleNamespace(behaviour=Behaviour()), body)  # type: ignore[arg-type]
    if chat:
        (choice,) = answer["choices"]
        lists = choice.pop("logprobs")
        pairs = zip(lists["tokens"], lists["token_logprobs"], strict=True)
        choice["logprobs"] = {"content": [{"token": name, "logprob": value} for name, value in pairs]}
        choice["message"] = {"role": "assistant", "content": choice.pop("text")}
        answer["prompt_token_ids"] = choice.pop("prompt_token_ids")
    response = {"status_code": 200, "request_id": "vllm-batch-1", "body": answer}
    return {"id": "vllm-1", "custom_id": request["custom_id"], "response": response, "error": None}


def failed(request: Result, message: str = "URL /v1/completions was used.") -> Result:
    response = {"status_code": 400, "request_id": "vllm-batch-1", "body": None}
    return {"id": "vllm-1", "custom_id": request["custom_id"], "response": response, "error": message}
