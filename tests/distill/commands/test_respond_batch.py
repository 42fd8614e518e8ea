"""`understudy respond --batch-requests / --batch-results`: a batch service answers, whole or in part, with and without logs."""

import json
from pathlib import Path
from typing import Any

import pytest
from batch_service import answer_batch, failed, read_jsonl, write_jsonl
from model_server import MODEL
from tiny_training import forget_accelerators, small_config, tiny_tokenizer

from data.responses.store import Store
from distill.config.layout import HELDOUT, HELDOUT_GREEDY, RESPONSES, TRAINING
from distill.respond import main

SERVING = {"max_tokens": 6, "temperature": 0.8, "top_k": 20}


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """A run whose target is the model of the batch service."""
    MODEL.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    return small_config(tmp_path, 15, data={"heldout_count": 3}, serving=SERVING, judge={"prompts": 3})


def respond(*words: str | Path) -> int:
    forget_accelerators()
    return main([str(word) for word in words])


def stores(folder: Path) -> dict[str, Any]:
    return {name: Store(folder / RESPONSES / name).read() for name in (TRAINING, HELDOUT, HELDOUT_GREEDY)}


def test_a_batch_service_answers_all_prompts(
    config_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, results, run = tmp_path / "requests.jsonl", tmp_path / "results.jsonl", tmp_path / "small"
    assert respond(config_path, "--batch-requests", requests, "--batch-chat") == 0
    said = capsys.readouterr().out
    continued = f"understudy respond {config_path} --batch-results RESULTS"
    assert f"{requests}: 18 requests (docs/respond.md); continue by {continued}" in said
    assert {request["body"]["model"] for request in read_jsonl(requests)} == {str(tmp_path / "target")}
    answers = answer_batch(requests)

    write_jsonl(results, [*answers[3:], failed(read_jsonl(requests)[0])])
    assert respond(config_path, "--batch-results", results) == 0
    said = capsys.readouterr().out
    assert f"{results}: 15 answers taken; left out: 1 rows have an error" in said
    assert f"3 answers are missing: understudy respond {config_path} --batch-requests FILE asks for them" in said
    assert not (run / RESPONSES / TRAINING / "index.arrow").exists(), "nothing is trained on yet"

    assert respond(config_path, "--batch-requests", requests) == 0
    assert len(read_jsonl(requests)) == 3
    write_jsonl(results, answer_batch(requests))
    assert respond(config_path, "--batch-results", results) == 0
    assert "12 responses of" in capsys.readouterr().out
    assert {name: len(rows) for name, rows in stores(run).items()} == {TRAINING: 12, HELDOUT: 3, HELDOUT_GREEDY: 3}

    requests.unlink()
    assert respond(config_path, "--batch-requests", requests) == 0
    assert not requests.exists(), "nothing is missing"


def test_the_answers_are_those_of_a_run_without_a_service_at_temperature_0(config_path: Path, tmp_path: Path) -> None:
    greedy = "serving={max_tokens: 6, temperature: 0}"
    requests = tmp_path / "requests.jsonl"
    assert respond(config_path, "--batch-requests", requests, greedy) == 0
    write_jsonl(tmp_path / "results.jsonl", answer_batch(requests))
    assert respond(config_path, "--batch-results", tmp_path / "results.jsonl", greedy) == 0
    assert respond(config_path, "name=local", greedy) == 0
    for name in (TRAINING, HELDOUT_GREEDY):
        folders = tmp_path / "small", tmp_path / "local"
        ours, theirs = (sorted(map(str, Store(folder / RESPONSES / name).read())) for folder in folders)
        assert ours == theirs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--batch-requests", "r.jsonl", "--num-processes", "2"],
            "one process does this, with the weights of target.path; leave --num-processes out",
        ),
        (["--batch-results", "r.jsonl", "target.endpoint={urls: ['http://a/v1']}"], "leave target.endpoint out"),
        (["--batch-results", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["--batch-requests", "r.jsonl", "--engine", "vllm"], "an engine answers, or a batch service; give one"),
        (["--batch-chat"], "give their file with --batch-requests"),
        (["--replicas", "2"], "--replicas: name the engine with --engine"),
        (["--", "--enforce-eager"], "--enforce-eager: name the engine with --engine"),
        (["--engine", "ollama"], "--engine ollama: this engine cannot be started; known: vllm"),
        (["--engine", "llama.cpp"], "--engine llama.cpp: llama.cpp returns no token ids with their log-probabilities"),
    ],
)
def test_mistakes_are_one_line(
    config_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert respond(config_path, *words) == 2
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == 1


def test_results_of_another_config_are_refused(
    config_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests, results = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    assert respond(config_path, "--batch-requests", requests) == 0
    write_jsonl(results, answer_batch(requests))
    assert respond(config_path, "--batch-results", results, "serving.temperature=0.9", "name=other") == 2
    custom_id = json.loads(requests.read_text().splitlines()[0])["custom_id"]
    assert f"{results}:1: custom_id '{custom_id}' is of another config" in capsys.readouterr().err


@pytest.mark.parametrize(("serving", "spoil"), [({}, "raw"), ({"temperature": 0, "top_k": 0}, "ids")])
def test_answers_of_another_model_or_kind_of_probabilities_are_refused(
    config_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], serving: Any, spoil: str
) -> None:
    requests, results = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    words = [f"serving.{key}={value}" for key, value in serving.items()]
    assert respond(config_path, "--batch-requests", requests, *words) == 0
    answers = answer_batch(requests)
    for answer in answers:
        (choice,) = answer["response"]["body"]["choices"]
        if spoil == "raw":
            lists = choice["logprobs"]
            lists["token_logprobs"] = [value - 0.5 for value in lists["token_logprobs"]]
        else:
            choice["token_ids"] = [7] * len(choice["token_ids"])
    write_jsonl(results, answers)
    assert respond(config_path, "--batch-results", results, *words) == 2
    said = capsys.readouterr().err
    assert "target: certainly did not write the first" in said
    assert ("are 0.50 nats apart" if spoil == "raw" else "are 0.00 nats apart") in said
    assert not list(tmp_path.rglob("shard-*"))
