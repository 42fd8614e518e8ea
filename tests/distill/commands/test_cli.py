"""The `understudy` command as a user types it: what it prints, what it writes, and how it says no."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from distill import cli
from distill.config.command_line import run_program
from distill.run.result import Result
from distill.run.verdict_record import Verdict, load_verdict
from speculative.errors import UserError
from speculative.measure.measured import DRAFT

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def exit_status(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["understudy", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


def test_help_names_every_command() -> None:
    text = run("--help")
    assert all(command in text for command, *_ in cli.COMMANDS)


def test_no_summary_of_a_command_is_cut() -> None:
    """Not by the narrowest list that shows them, which is the one of docs/reference/cli.md."""
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    for name, command in {**commands, **commands["traffic"].commands}.items():
        summary = command.get_short_help_str()
        assert summary, name
        assert not summary.endswith("..."), f"{name}: {summary}"


def test_neither_help_nor_a_config_nor_the_gateway_needs_torch() -> None:
    """They are asked often, and torch takes seconds. The gateway forwards only."""
    program = (
        "import sys, distill.cli; assert not {'torch', 'transformers', 'datasets', 'pydantic'} & set(sys.modules)\n"
        "import distill.config.load, distill.config.table, distill.live.gateway.command\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


@dataclass(frozen=True)
class Asked:
    """Options of a program."""

    name: Annotated[str, typer.Argument(help="whom")]
    loud: Annotated[bool, typer.Option("--loud", help="in capitals")] = False
    times: Annotated[int, typer.Option(help="how often", min=1)] = 2
    words: Annotated[list[str] | None, typer.Option(help="more")] = None


def test_a_dataclass_is_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Asked] = []

    def greet(options: Asked) -> int:
        """Greets somebody."""
        seen.append(options)
        return options.times

    assert run_program(greet, ["Ada"]) == 2
    assert run_program(greet, ["--words", "a", "--times", "3", "Ada", "--loud", "--words=b"]) == 3
    assert seen == [Asked("Ada"), Asked("Ada", True, 3, ["a", "b"])]
    for wrong in (["--times", "0", "Ada"], ["--quiet", "Ada"], ["Ada", "Bob"], []):
        assert run_program(greet, wrong) == 2
    assert len(seen) == 2
    capsys.readouterr()
    assert run_program(greet, ["--help"]) == 0
    text = capsys.readouterr().out
    for words in ("Greets somebody.", "whom", "--loud", "in capitals", "[default: 2]"):
        assert words in text


@pytest.mark.usefixtures("without_pictures")
def test_evaluate_prints_a_table_and_writes_the_shape_of_the_verdict(
    tiny_run: Path, tiny_config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    text = run("evaluate", str(tiny_run), "--config", str(tiny_config), "--gamma", "3", "--out", str(out))
    assert all(row in text for row in ("target alone", "draft", "prompt-lookup", "lookup+draft"))
    result = json.loads(out.read_text())
    found = result["verdict"]
    assert set(found) == set(Verdict.model_fields) - {"engine"}, "no engine was timed"
    assert [one["way"] for one in found["drafts"]] == ["draft"]
    assert (tmp_path / result["files"]["proposals"]).exists()
    judged, own = Verdict.model_validate(found).judged(DRAFT), load_verdict(tiny_run).judged(DRAFT)
    assert judged is not None
    assert own is not None
    # The same held-out responses and the same weights as the run's own judgement.
    assert judged.alpha == pytest.approx(own.alpha, abs=1e-5)
    assert judged.tau == pytest.approx(own.tau, abs=1e-6)
    assert f"{judged.alpha:.3f}" in text
    assert "page.html" in run("show", str(out), "--page", str(tmp_path / "page.html"))
    refused = CliRunner().invoke(
        cli.app, ["evaluate", str(tiny_run), "--config", str(tiny_config), "--out", str(tiny_run / "result.json")]
    )
    assert isinstance(refused.exception, UserError)
    assert "training run" in str(refused.exception)


@pytest.mark.parametrize(
    "words",
    [
        ("drift", "RUN", "--gamma=0"),
        ("compare", "A", "B", "--gamma=33"),
        ("probe", "A", "--count=0"),
    ],
)
def test_an_option_refuses_a_number_out_of_its_range(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli.app, list(words), env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"Invalid value for '{words[-1].partition('=')[0]}'" in result.output


@pytest.mark.usefixtures("without_pictures")
def test_proofs_stand_beside_the_judgement_of_the_same_draft(tiny_run: Path, tiny_config: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    judged = [str(tiny_run), "--config", str(tiny_config), "--rule", "sample", "--out", str(out)]
    proof = ["--losslessness", "--prompts", "6"]
    assert "Not added to a result: " in run("evaluate", *judged, *proof)
    assert not out.exists()
    run("evaluate", *judged)
    before = json.loads(out.read_text())
    (tmp_path / "task.py").write_text(
        "def length(prompt, response, reference):\n    return min(1.0, len(response) / 99)\n"
    )
    scored = ["--scorer", f"{tmp_path}/task.py:length", "--prompts", "6"]
    assert f"added to {out}" in run("evaluate", *judged, *proof, *scored)
    after = Result.read(out)
    assert after.losslessness is not None
    assert after.losslessness.passed
    assert [one.scorer for one in after.scores] == [f"{tmp_path}/task.py:length"]
    proven = json.loads(out.read_text())
    assert set(proven) - set(before) == {"losslessness", "scores"}
    assert {key: proven[key] for key in before} == before, "nothing else has changed"
    # The same scorer again takes the place of the first; the checkpoint of other weights is not this draft.
    run("evaluate", *judged, *scored)
    assert len(Result.read(out).scores) == 1
    other = str(tiny_run / "checkpoints" / "step-000000")
    assert "judges another draft" in run("evaluate", other, *judged[1:], *scored)
    assert Result.read(out).losslessness == after.losslessness
    run("show", str(out), "--page", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    for words in ("Is the text still the target", "Task scores", "task.py:length"):
        assert words in page


def test_export_show_and_the_outside_check(tiny_run: Path, tmp_path: Path) -> None:
    to = tmp_path / "draft"
    text = run("export", str(tiny_run), "--to", str(to))
    for engine in ("vLLM", "SGLang", "llama.cpp", "transformers", "TensorRT-LLM"):
        assert engine in text
    for name in ("model.safetensors", "config.json", "tokenizer.json", "serving.json", "SERVING.md", "README.md"):
        assert (to / name).exists(), name
    checked = run("export", str(tiny_run), "--check", str(to))
    assert "same greedy tokens as the target alone on 20 of 20 prompts" in checked
    shown = run("show", str(tiny_run))
    for words in ("target alone", "undistilled", "speed", "cost ratio", "understudy export", "accepted from the draft"):
        assert words in shown, words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate", "nowhere/model", "--config", "missing.yaml"], ["missing.yaml", "cannot read"]),
        (["evaluate", "x", "--config", "TINY", "--rule", "soft"], ["--rule soft", "greedy-draft"]),
        (["evaluate", "./no-such-folder", "--config", "TINY"], ["no-such-folder", "config.json"]),
        (["export", "nowhere", "--to", "out"], ["nowhere", "config.yaml"]),
        (["generate", "./nowhere", "--prompt", "x"], ["./nowhere", "no config.json there"]),
        (["show", "nowhere"], ["nowhere: no such folder"]),
    ],
)
def test_mistakes_are_one_line_and_exit_status_2(
    arguments: list[str],
    words: list[str],
    tiny_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [str(tiny_config) if argument == "TINY" else argument for argument in arguments]
    assert exit_status(monkeypatch, *arguments) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith("understudy: ")
    for word in words:
        assert word in message
