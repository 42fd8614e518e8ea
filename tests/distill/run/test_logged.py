"""`data.responses: logged`: the target's own answers are taken from logs, others are not, and the rest is answered."""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from tiny_training import fresh_accelerator, merged, small_config, tiny_tokenizer, write_target

from data.prompts.logs import LoggedAnswer
from data.prompts.prompt import Template
from data.responses.rendered import RenderedPrompt
from data.responses.store import Row
from distill import respond, train
from distill.config.layout import LOGGED, RESPONSES
from distill.config.load import load_config
from distill.models.target import Target
from distill.run import logged as taking
from distill.run.responses import RunData
from distill.run.run import Run
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.rules.sampling import SamplingSettings

SERVING = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 24, "shard_size": 8, "batch_size": 8}
STATED = {"temperature": 0.8, "top_p": 0.95}


def rows_of(folder: Path, name: str, target: Path, source: Path, **data: Any) -> list[Row]:
    """The training rows of a run."""
    sections = {"serving": SERVING, "target": {"path": str(target)}}
    path = small_config(folder, 48, name=name, **sections)
    tree = json.loads(path.read_text())
    tree["data"] = merged(tree["data"], {"train": [{"path": str(source)}], "heldout_count": 8} | data)
    path.write_text(json.dumps(tree))
    config = load_config(path)
    run = Run(config, fresh_accelerator(config.folder))
    run.claim()
    try:
        return list(RunData(run, Target(config.target, torch.device("cpu"), run.folder)).training)
    finally:
        run.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target`, `other`: two random targets."""
    path = tmp_path_factory.mktemp("logged")
    write_target(path / "target")
    write_target(path / "other", seed=5)
    return path


@pytest.fixture(scope="module")
def fresh(folder: Path) -> list[Row]:
    """Answers of the target to 40 prompts."""
    small_config(folder, 48)
    return rows_of(folder, "fresh", folder / "target", folder / "prompts.jsonl")


@pytest.fixture(scope="module")
def others(folder: Path) -> list[Row]:
    """Answers of another model to the same prompts."""
    return rows_of(folder, "others", folder / "other", folder / "prompts.jsonl")


def log_of(path: Path, rows: list[Row], change: Callable[[int, dict, dict], object] = lambda *_: None) -> Path:
    """A log of completions with token ids."""
    lines = []
    for number, row in enumerate(rows):
        asked = {"model": "served", "prompt": row.prompt_ids, **STATED}
        choice = {"index": 0, "text": "", "token_ids": row.response_ids}
        choice["finish_reason"] = "stop" if row.finished else "length"
        change(number, asked, choice)
        lines.append(json.dumps({"request": asked, "response": {"model": asked["model"], "choices": [choice]}}))
    path.write_text("\n".join(lines))
    return path


def record_of(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name / RESPONSES / LOGGED).read_text())


def texts(rows: list[Row]) -> dict[tuple[int, ...], list[int]]:
    return {tuple(row.prompt_ids): row.response_ids for row in rows}


def test_the_targets_own_answers_are_taken_with_its_probabilities(folder: Path, fresh: list[Row], capsys: Any) -> None:
    log = log_of(folder / "own.jsonl", fresh)
    rows = rows_of(folder, "own", folder / "target", log, responses="logged")
    before = {tuple(row.prompt_ids): row for row in fresh}
    assert len(rows) == len(fresh) - 8, "eight are held out and answered for the judgement"
    for row in rows:
        stored = before[tuple(row.prompt_ids)]
        assert (row.response_ids, row.finished) == (stored.response_ids, stored.finished)
        torch.testing.assert_close(
            torch.tensor(row.log_target_probs), torch.tensor(stored.log_target_probs), rtol=0, atol=1e-4
        )
    record = record_of(folder, "own")
    assert (record["taken"], record["left_out"]) == (len(rows), {})
    said = capsys.readouterr().out
    assert f"{len(rows)} logged answers are taken; median log-probability of a token" in said
    logged, other = record["median_log_probs"]
    assert abs(logged - other) < 0.5
    # The second start reads what the first one took.
    assert texts(rows_of(folder, "own", folder / "target", log, responses="logged")) == texts(rows)


def test_a_share_of_the_prompts_is_answered_again(folder: Path, fresh: list[Row], capsys: Any) -> None:
    log = log_of(folder / "own.jsonl", fresh)
    logged = {"responses": "logged", "logged_share": 0.5}
    rows = rows_of(folder, "shared", folder / "target", log, **logged)
    taken = record_of(folder, "shared")["taken"]
    assert train.main([str(folder / "shared.yaml"), "--dry-run"]) == 0
    planned = f"at most {24 * len(rows):,} tokens, up to {taken} of them from logs"
    assert f"{len(rows)} of up to 24 tokens each: {planned}" in capsys.readouterr().out
    assert 0.25 * len(rows) < taken < 0.75 * len(rows)
    before = texts(fresh)
    same = sum(before[tuple(row.prompt_ids)] == row.response_ids for row in rows)
    assert taken <= same < len(rows), "the key of a prompt, and so its sample, is another in a log"


def test_logs_of_another_model_are_refused_with_file_and_row(folder: Path, others: list[Row]) -> None:
    log = log_of(folder / "foreign.jsonl", others)
    message = refused(rows_of, folder, "foreign", folder / "target", log, responses="logged")
    assert message.startswith(f"{log}:")
    assert "the answers of model 'served' are certainly not this target's at these settings" in message
    assert not (folder / "foreign" / RESPONSES / LOGGED).exists()


def test_logs_of_another_temperature_are_refused_even_if_they_state_ours(folder: Path, fresh: list[Row]) -> None:
    path = folder / "prompts.jsonl"
    cold = rows_of_at(folder, path, 0.3)
    message = refused(
        rows_of, folder, "cold", folder / "target", log_of(folder / "cold.jsonl", cold), responses="logged"
    )
    assert "certainly not this target's" in message


def rows_of_at(folder: Path, source: Path, temperature: float) -> list[Row]:
    before = dict(SERVING)
    SERVING.update(temperature=temperature, top_p=1.0)
    try:
        return rows_of(folder, f"at {temperature}".replace(" ", "-"), folder / "target", source)
    finally:
        SERVING.update(before)


def test_single_wrong_rows_are_counted_and_answered_again(folder: Path, fresh: list[Row], others: list[Row]) -> None:
    wrong = texts(others)

    def change(number: int, asked: dict, choice: dict) -> None:
        if number % 8 == 1:
            choice["token_ids"] = wrong[tuple(asked["prompt"])]
        if number % 8 == 3:
            asked["temperature"] = 1.0
        if number % 8 == 5:
            asked["presence_penalty"] = 0.5

    log = log_of(folder / "mixed.jsonl", fresh, change)
    rows = rows_of(folder, "mixed", folder / "target", log, responses="logged")
    record = record_of(folder, "mixed")
    reasons = record["left_out"]
    assert set(reasons) == {
        taking.NOT_OWN,
        "sampled at temperature 1.0 (here 0.8)",
        "shaped by presence_penalty",
    }
    assert all(record["first"][reason].startswith(f"{log}:") for reason in reasons)
    assert record["taken"] + sum(reasons.values()) == len(rows), "every prompt has an answer"
    assert not {tuple(row.response_ids) for row in rows} & {tuple(ids) for ids in wrong.values()}


def test_an_answer_without_a_temperature_is_refused_or_counted(folder: Path, fresh: list[Row]) -> None:
    def change(number: int, asked: dict, choice: dict) -> None:
        if number % 2:
            del asked["temperature"]

    log = log_of(folder / "unstated.jsonl", fresh[:20], change)
    data = {"responses": "logged", "heldout_count": 2}
    message = refused(rows_of, folder, "unstated", folder / "target", log, **data)
    assert re.match(rf"{log}:\d*[02468]: the request states no temperature", message)
    rows = rows_of(folder, "unstated", folder / "target", log, **data, bad_rows="drop")
    assert record_of(folder, "unstated")["left_out"]["without a temperature"] >= 8
    assert len(rows) == 18


def test_prompts_without_a_log_are_one_line(folder: Path, fresh: list[Row]) -> None:
    message = refused(rows_of, folder, "none", folder / "target", folder / "prompts.jsonl", responses="logged")
    assert message == "data.responses: logged: no source of data.train is a log with answers (docs/logs.md)"


def kill_at_third(monkeypatch: pytest.MonkeyPatch, *given: Any, **data: Any) -> None:
    """Begin a run and end it where the third group of answers is scored."""
    score, calls = taking.LoggedAnswers._score, []

    def dying(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(*given)

    with monkeypatch.context() as patched:
        patched.setattr(taking.LoggedAnswers, "_score", dying)
        with pytest.raises(KeyboardInterrupt):
            rows_of(*given, responses="logged", **data)


def test_a_killed_start_takes_the_same_answers(folder: Path, fresh: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(folder / "own.jsonl", fresh)
    kill_at_third(monkeypatch, folder, "killed", folder / "target", log)
    score, calls = taking.LoggedAnswers._score, []
    monkeypatch.setattr(taking.LoggedAnswers, "_score", lambda *given: (calls.append(given), score(*given))[1])
    rows = rows_of(folder, "killed", folder / "target", log, responses="logged")
    assert len(calls) == 2, "of four groups two were finished"
    own = rows_of(folder, "whole", folder / "target", log, responses="logged")
    assert texts(rows) == texts(own)


def test_what_a_start_with_another_log_or_share_left_does_not_count(
    folder: Path, fresh: list[Row], others: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(folder / "mended.jsonl", others)
    refused(rows_of, folder, "mended", folder / "target", log, responses="logged")
    log_of(log, fresh)  # the same prompts
    rows = rows_of(folder, "mended", folder / "target", log, responses="logged")
    assert record_of(folder, "mended")["taken"] == len(rows)

    kill_at_third(monkeypatch, folder, "lower", folder / "target", log)
    few = rows_of(folder, "lower", folder / "target", log, responses="logged", logged_share=0.3)
    answers, taken = texts(fresh), record_of(folder, "lower")["taken"]
    same = sum(answers[tuple(row.prompt_ids)] == row.response_ids for row in few)
    assert taken <= same < 16, (
        "two groups of eight were scored before; what is answered again may be the same by chance"
    )
    assert sorted(path.name for path in (folder / "lower" / RESPONSES).glob("logged*")) == [LOGGED]


@pytest.mark.parametrize("change", [{"responses": "fresh"}, {"responses": "logged", "logged_share": 0.3}])
def test_a_run_with_answers_of_logs_keeps_its_share(folder: Path, fresh: list[Row], change: dict[str, Any]) -> None:
    log = log_of(folder / "own.jsonl", fresh)
    rows = rows_of(folder, "kept", folder / "target", log, responses="logged")
    message = refused(rows_of, folder, "kept", folder / "target", log, **change)
    assert message.startswith(f"{folder / 'kept' / RESPONSES / LOGGED}: {len(rows)} responses were taken from logs")
    assert "give the run another name, or delete that file and" in message


def test_another_log_for_prompts_whose_answers_were_taken_is_refused(folder: Path, fresh: list[Row]) -> None:
    log = log_of(folder / "changed.jsonl", fresh)
    rows = rows_of(folder, "changed", folder / "target", log, responses="logged")
    log_of(log, fresh[::-1])
    assert texts(rows_of(folder, "changed", folder / "target", log, responses="logged")) == texts(rows), "in any order"
    log_of(log, [replace(row, input_ids=[*row.input_ids[:-1], 9]) for row in fresh])
    message = refused(rows_of, folder, "changed", folder / "target", log, responses="logged")
    assert "the log has other answers to these prompts than those that were taken" in message


def test_a_server_has_no_weights_to_check_with(folder: Path) -> None:
    path = small_config(folder, 24, name="served")
    server = "target.endpoint={urls: ['http://127.0.0.1:1/v1'], weights: server}"
    more = ["student.init=pretrained", "student.path=x", "judge.live=never", "signal.source=store"]
    with pytest.raises(UserError, match="logged answers are checked with the target's weights"):
        respond.run(path, ["data.responses=logged", server, *more])


def test_token_ids_of_another_vocabulary_are_one_line(folder: Path, fresh: list[Row]) -> None:
    log = log_of(folder / "large.jsonl", fresh, lambda number, asked, choice: choice.update(token_ids=[number, 5000]))
    message = refused(rows_of, folder, "large", folder / "target", log, responses="logged")
    assert re.match(rf"{log}:\d+: the answer has token 5000, but the target has 300 rows", message)


@pytest.mark.parametrize("chat", [False, True])
def test_text_is_split_again_and_gets_the_token_that_ended_it(chat: bool) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    second = tokenizer.convert_ids_to_tokens(2)
    turns = "{% for m in messages %}{{ m['content'] }}" + second + "\n{% endfor %}"
    tokenizer.chat_template = turns if chat else None
    template = Template(mode="chat" if chat else "plain")
    run = SimpleNamespace(config=SimpleNamespace(data=SimpleNamespace(template=template)))
    target = SimpleNamespace(facts=SimpleNamespace(vocab_rows=300))
    text = "return first + second"
    ids = tokenizer(text, add_special_tokens=False).input_ids

    def row(finished: bool, most: int = 40, logged_ids: list[int] | None = None, end: int | None = None) -> Row:
        settings = DecodeSettings(SamplingSettings(), max_tokens=most, eos_ids=(1, 2))
        answers = taking.LoggedAnswers(run, target, tokenizer, settings)  # type: ignore[arg-type]
        answer = LoggedAnswer("log.jsonl:1", "m", text, logged_ids or [], finished, end, {}, [])
        return answers._row(RenderedPrompt("key", "d", (7, 8)), answer)

    assert row(True).input_ids == [7, 8, *ids, 2 if chat else 1], "the template says which of two ends a turn"
    assert row(True).finished
    assert row(False).input_ids == [7, 8, *ids], "cut by the server's max_tokens, or by a string"
    assert not row(False).finished
    assert row(True, most=3).response_ids == ids[:3]
    assert not row(True, most=3).finished
    assert row(True, logged_ids=[9, 10, 2]).response_ids == [9, 10, 2]
    assert row(False, logged_ids=[9, 10, 2]).finished, "whatever the log says of it"
    assert row(True, end=1).input_ids == [7, 8, *ids, 1]
    assert row(True, end=9).input_ids == [7, 8, *ids], "a stop token of the request"
    assert not row(True, end=9).finished
