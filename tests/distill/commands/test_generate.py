"""`understudy generate` as a new user types it: text, numbers, files, and how it says no."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from failures import full_disk
from typer.testing import CliRunner

from distill import cli
from distill.commands.generate import generate as program
from distill.commands.generate.files import ResponseFile, read_past, read_prompts
from distill.commands.generate.options import GenerateOptions
from distill.models.load import load_model, load_tokenizer
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Response
from speculative.engine.models import end_token_ids
from speculative.errors import UserError
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY

PROMPT = "def add(a, b):"


def run(*arguments: str, text: str | None = None) -> str:
    result = CliRunner().invoke(cli.app, ["generate", *arguments], catch_exceptions=False, input=text)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def draft(tiny_run: Path) -> str:
    return str(tiny_run / "best" / "student")


@pytest.fixture(scope="module")
def marked(draft: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The draft, told of a mask token."""
    folder = shutil.copytree(draft, tmp_path_factory.mktemp("marked") / "student")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": config["vocab_size"] - 1}))
    return str(folder)


@pytest.fixture(scope="module")
def plain_text(tiny_target: Path) -> str:
    """What the target says alone, by the decoder directly."""
    target, tokenizer = load_model("target", str(tiny_target)), load_tokenizer(str(tiny_target))
    settings = DecodeSettings(GREEDY, 0, Rule.named("greedy"), 20, end_token_ids(target))
    responses, _ = decode(target, None, [("x", tokenizer(PROMPT).input_ids)], settings, tokenizer=tokenizer)
    assert responses[0].text
    return responses[0].text


@pytest.mark.parametrize(
    "options",
    [
        ["--draft", "DRAFT"],
        ["--draft", "DRAFT", "--gamma", "3"],
        ["--draft", "DRAFT", "--gamma", "auto"],
        ["--draft", "DRAFT", "--drafter", "token-tree"],
        ["--draft", "DRAFT", "--drafter", "lookup+draft", "--gamma", "auto"],
        ["--drafter", "prompt-lookup"],
        ["--draft", "MARKED", "--drafter", "parallel", "--gamma", "3"],
        ["--drafter", "none"],
    ],
)
def test_greedy_text_does_not_depend_on_the_way_to_draft(
    tiny_target: Path, draft: str, marked: str, plain_text: str, options: list[str]
) -> None:
    given = [{"DRAFT": draft, "MARKED": marked}.get(option, option) for option in options]
    assert run(str(tiny_target), "--prompt", PROMPT, "--max-tokens", "20", *given) == plain_text + "\n"


@pytest.mark.parametrize(("way", "name"), [("draft", "draft"), ("parallel", "parallel draft")])
def test_tau_by_replay_stands_beside_the_live_one(tiny_target: Path, marked: str, way: str, name: str) -> None:
    arguments = [str(tiny_target), "--prompt", PROMPT, "--draft", marked, "--drafter", way, "--gamma", "3"]
    result = CliRunner().invoke(cli.app, ["generate", *arguments, "--max-tokens", "30"], catch_exceptions=False)
    assert result.stderr.startswith("30 tokens, ")
    assert f"\n{name}, gamma 3: tau " in result.stderr
    assert ", exact" in result.stderr
    assert "first token after " in result.stderr


def test_many_prompts_become_json_lines_in_order_that_a_later_command_drafts_from(
    tiny_target: Path, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    texts = [PROMPT, "class A:", "import os", "x = 1", PROMPT + "\n    return"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    shared = [str(tiny_target), "--prompts", str(prompts), "--max-tokens", "12", "--batch-size", "2"]
    assert run(*shared, "--out", str(out)) == ""
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["key"] for row in rows] == [f"prompts.jsonl:{number}" for number in range(1, 6)]
    assert all(row["text"] is not None and row["finish_reason"] in ("length", "end") for row in rows)
    again = tmp_path / "again.jsonl"
    run(*shared, "--out", str(again), "--drafter", "past-responses", "--past", str(out))
    for row, same in zip(rows, (json.loads(line) for line in again.read_text().splitlines()), strict=True):
        assert row["response_ids"] == same["response_ids"]
        assert same["blocks"] < row["blocks"] / 2  # it has seen these very answers
    assert run(str(tiny_target), "--max-tokens", "3", text=PROMPT)  # a prompt on standard input


def test_prompts_are_what_a_config_reads(chat_target: Path, tiny_target: Path, tmp_path: Path) -> None:
    """Conversations, parquet, a whole folder; prompts are written by the chat template of the target."""
    turn = {"role": "user", "content": "add two"}
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": [turn] * count}) + "\n" for count in (1, 2)))
    folder = tmp_path / "folder"
    folder.mkdir()
    pq.write_table(pa.table({"question": ["add two"], "answer": ["four"]}), folder / "train.parquet")

    def asked(*options: str, target: Path = chat_target) -> dict[str, str]:
        out = tmp_path / "out.jsonl"
        run(str(target), *options, "--max-tokens", "2", "--out", str(out))
        tokenizer = load_tokenizer(str(target))
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        return {row["key"]: tokenizer.decode(row["prompt_ids"], skip_special_tokens=True) for row in rows}

    once, twice = "user: add two;assistant:", "user: add two;user: add two;assistant:"
    assert asked("--prompts", str(chats)) == {"chats.jsonl:1": once, "chats.jsonl:2": twice}
    assert asked("--prompts", str(folder)) == {"train.parquet:1": "add two"}
    both = asked("--prompts", str(folder), "--chat", "--prompt", "add two")
    assert both == {"prompt-1": once, "train.parquet:1": once}
    with pytest.raises(UserError, match=r"chats.jsonl:1: the tokenizer .* has no chat template"):
        asked("--prompts", str(chats), target=tiny_target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gamma", "0", "--drafter", "prompt-lookup"], "--gamma 0: give a number of at least 1, or auto"),
        (["--gamma", "500", "--drafter", "prompt-lookup"], "--gamma 500: more than 64"),
        (["--gamma", "3"], "--gamma needs a drafter"),
        (["--draft", "D", "--gamma", "2", "--drafter", "token-tree"], "--gamma is set by --drafter token-tree"),
        (["--draft", "D", "--drafter", "prompt-lookup"], "--draft is not used by --drafter prompt-lookup"),
        (["--past", "x.jsonl"], "--past is not used by --drafter none"),
        (["--draft", "TARGET", "--drafter", "parallel"], "has no mask token"),
        (["--drafter", "magic"], "unknown way to decode 'magic': must be one of draft, early-exit, "),
        (["--drafter", "jacobi"], "`way: jacobi` is retired; write lookahead"),
        (["--drafter", "lookup+draft"], "--drafter lookup+draft needs --draft DIR"),
        (["--drafter", "past-responses"], "--drafter past-responses needs --past FILE"),
        (["--drafter", "past-responses", "--past", "nowhere.jsonl"], "--past nowhere.jsonl: no such file"),
        (["--max-tokens", "4000"], "exceeds the context of 128 of the target"),
        (["--chat"], "no chat template"),
        (["--prompts", "nowhere.txt"], "--prompts nowhere.txt: no such file"),
        (["--draft", "nowhere"], "nowhere"),
        (["--device", "abacus"], "--device abacus: choose cpu, cuda or cuda:N"),
        (["--device", "meta"], "--device meta: choose cpu, cuda or cuda:N"),
        (["--drafter", "prompt-lookup", "--gamma", "²"], "--gamma ²: give a number of at least 1, or auto"),
        (["--dtype", "int4"], "--dtype int4"),
        (["--out", "/proc/nowhere/x.jsonl"], "cannot be written"),
        (["--out", "/dev/null"], "is not a regular file"),
        (["--max-tokens", "0"], "max_tokens = 0"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    tiny_target: Path,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [str(tiny_target) if option == "TARGET" else option for option in options]
    monkeypatch.setattr(sys, "argv", ["understudy", "generate", str(tiny_target), "--prompt", PROMPT, *options])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("text", "message"),
    [("\ud800", "prompt-1: the prompt is not valid Unicode"), ("", "prompt-1: the prompt is empty")],
)
def test_odd_prompts_are_refused_plainly(tiny_target: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_prompts(GenerateOptions("", prompt=[text]), load_tokenizer(str(tiny_target)))


def test_a_line_that_is_no_response_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "h.jsonl").write_text('{"prompt_ids": ["a"], "response_ids": [5]}')
    with pytest.raises(UserError, match=r"h.jsonl:1: no line of"):
        read_past(tmp_path / "h.jsonl", load_model("target", str(tiny_target)))


def interrupted_after(monkeypatch: pytest.MonkeyPatch, responses: int, error: BaseException) -> None:
    """Let a run go on until so many responses have ended."""
    original = program.generate

    def cut(*arguments: Any, **options: Any) -> Iterator[Any]:
        ended = 0
        for event in original(*arguments, **options):
            if ended == responses:
                raise error
            yield event
            ended += event.finish_reason is not None

    monkeypatch.setattr(program, "generate", cut)


@pytest.mark.parametrize("responses", [0, 1])
@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (UserError("the draft returned NaN"), 2)])
def test_what_had_ended_is_kept_and_a_former_file_too(
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    responses: int,
    error: BaseException,
    status: int,
) -> None:
    interrupted_after(monkeypatch, responses, error)
    out = tmp_path / "out.jsonl"
    out.write_text("a former result\n")
    arguments = ["generate", str(tiny_target), "--prompt", PROMPT, "--prompt", "x", "--max-tokens", "5"]
    monkeypatch.setattr(sys, "argv", ["understudy", *arguments, "--batch-size", "1", "--out", str(out)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == status
    assert out.read_text() == "a former result\n"
    said = capsys.readouterr().err
    if responses:
        rows = [json.loads(line) for line in (tmp_path / "out.partial.jsonl").read_text().splitlines()]
        assert [len(row["response_ids"]) for row in rows] == [5]
        assert "1 finished responses are in" in said
    else:
        assert "no response had ended; nothing was written" in said
        assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_full_disk_names_the_file_and_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ResponseFile(tmp_path / "out.jsonl")
    file.add(0, Response("a", [1], response_ids=[2]))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full_disk)
        with pytest.raises(UserError, match=r"out.jsonl: cannot be written \(No space left on device\); 2 responses"):
            file.add(1, Response("b", [1], response_ids=[3]))
    assert len((tmp_path / "out.partial.jsonl").read_text().splitlines()) == 1
