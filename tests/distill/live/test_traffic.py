"""`understudy traffic`: show, export, train without asking the target again, and forget."""

import io
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from rich.console import Console
from traffic_log import SAMPLING, record_of, write_log
from typer.testing import CliRunner

from data.responses.rendered import StoredPrompts
from data.responses.store import Store
from distill.cli import app
from distill.config.load import load_config
from distill.live.options import ExportTrafficOptions, ShowOptions
from distill.live.traffic import export
from distill.live.traffic.export import PROMPT_FILES, RESPONSES, export_traffic, row_id
from distill.live.traffic.forget import forget
from distill.live.traffic.record import TrafficRecord, read_salt
from distill.live.traffic.show import show_traffic
from distill.models.load import load_tokenizer
from speculative.errors import UserError


def said_to(command: Any, options: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    command(options, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def traffic_of(run: Path, count: int = 60) -> list[TrafficRecord]:
    """Requests of two slices to a run's target; the responses are words and the end token."""
    tokenizer = load_tokenizer(load_config(run / "config.yaml").target.path)
    version = Store(run / RESPONSES).manifest()["target"]
    known = {"accepted": None, "drafted": None, "blocks": None, "target_version": version}
    return [
        record_of(
            number,
            prompt_ids=tuple(tokenizer(f"class Thing{number}:").input_ids),
            slice="code" if number % 10 else "rare",
            response_ids=(*tokenizer(f" def m{number}(x): pass").input_ids[:12], 2),
            **known,
        )
        for number in range(count)
    ]


@pytest.fixture
def own_run(tmp_path: Path, tiny_run: Path) -> Path:
    """A copy of the finished tiny run without its trained draft."""
    run = tmp_path / "old"
    for name in ("prompts", "responses"):
        shutil.copytree(tiny_run / name, run / name)
    for name in ("config.yaml", "target.json"):
        shutil.copy(tiny_run / name, run / name)
    return run


def test_a_run_trains_from_an_export_without_decoding_its_responses_again(
    tmp_path: Path, own_run: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill import respond as respond_command
    from distill.run import responses

    records = traffic_of(own_run)
    own = records[0].target_version
    hot = [record_of(100 + n, sampling={**SAMPLING, "temperature": 1.0}, target_version=own) for n in range(3)]
    foreign = [record_of(200 + number, target_version="another") for number in range(2)]
    log = write_log(tmp_path / "log", [*records, *hot, *foreign])
    made = export_traffic(ExportTrafficOptions(log, own_run, tmp_path / "may", heldout=4))
    assert (made.train, made.heldout) == (56, 4)
    assert made.left_out == {"other sampling settings": 3, "another target version (another)": 2}
    assert made.slices == {"code": [50, 4], "rare": [6, 0]}
    store = Store(tmp_path / "may" / RESPONSES)
    assert {row.prompt_id: row.response_ids for row in store.read()} == {
        row_id(read_salt(log), record.id): list(record.response_ids or ()) for record in records[:56]
    }
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in (tmp_path / "may").rglob("*"))

    new = tmp_path / "new"
    for old in (own_run, tmp_path / "may"):
        Store(new / RESPONSES).adopt(Store(old / RESPONSES))
    Store(new / "responses/heldout").adopt(Store(own_run / "responses/heldout"))
    asked = []
    respond = responses.respond

    def answer(store: Store, *given: Any, **more: Any) -> Any:
        asked.append(store.folder.name)
        return respond(store, *given, **more)

    monkeypatch.setattr(responses, "respond", answer)
    sources = [f"{[{'path': str(folder / name)} for folder in (own_run, tmp_path / 'may')]}" for name in PROMPT_FILES]
    words = [f"data.train={sources[0]}", f"data.heldout={sources[1]}", "judge.prompts=100"]
    respond_command.run(tiny_config, [f"output={tmp_path}", "name=new", *words])
    assert asked == ["heldout", "heldout-greedy"], "not the training prompts"
    assert len(Store(new / RESPONSES).rows()) == 56 + len(StoredPrompts(own_run / PROMPT_FILES[0]))
    answered = {row.prompt_id for row in Store(new / "responses/heldout").rows()}
    assert answered >= {prompt.prompt_id for prompt in StoredPrompts(tmp_path / "may" / PROMPT_FILES[1])}


def test_held_out_and_trained_prompts_of_the_run_keep_their_side(tmp_path: Path, own_run: Path) -> None:
    records = traffic_of(own_run, 40)
    held, learnt = (StoredPrompts(own_run / name)[0].prompt_ids for name in PROMPT_FILES[::-1])
    records = [record_of(-1, time=0.0, prompt_ids=held, target_version=records[0].target_version), *records]
    records += [record_of(90, prompt_ids=learnt, target_version=records[0].target_version)]
    log = write_log(tmp_path / "log", records)
    made = export_traffic(ExportTrafficOptions(log, own_run, tmp_path / "may", heldout=3))
    assert made.left_out == {"held out by the run": 1, "as new as what is held out, or of its prompts": 1}
    kept = [[prompt.prompt_ids for prompt in StoredPrompts(tmp_path / "may" / name)] for name in PROMPT_FILES]
    assert learnt not in kept[1]
    assert held not in (*kept[0], *kept[1])


def test_an_export_that_makes_no_sense_is_refused(tmp_path: Path, own_run: Path) -> None:
    log = write_log(tmp_path / "log", traffic_of(own_run, 30))
    other = write_log(tmp_path / "other", [record_of(number) for number in range(30)])

    def said(log: Path, run: Path, to: Path) -> str:
        found = refused(lambda: export_traffic(ExportTrafficOptions(log, run, to)))
        assert not to.exists() or list(to.iterdir()) == []
        return found

    assert "30 another target version (target)" in said(other, own_run, tmp_path / "may")
    without = {"prompt_ids": None, "response_ids": None}
    hashes = write_log(tmp_path / "hashes", [record_of(number, **without) for number in range(30)])
    assert "30 no text" in said(hashes, own_run, tmp_path / "may")
    assert "no config.yaml" in said(log, tmp_path, tmp_path / "may")
    (tmp_path / "there").mkdir()
    assert "already exists" in said(log, own_run, tmp_path / "there")


def test_forgetting_prints_what_stays_and_which_ids_are_unknown(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", [record_of(number) for number in range(3)])
    asked = ["traffic", "forget", "request-0001", "--log", str(log)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0
    assert "1 lines removed; text removed from 0 other requests of the same conversation" in result.stdout
    assert "what stays: counts, times and keyed hashes" in result.stdout
    assert "exports of this log" in result.stdout
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1
    assert "request-0001: no request with this id in the log" in result.stdout


def test_an_export_during_which_requests_are_forgotten_is_given_up(
    tmp_path: Path, own_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, write = write_log(tmp_path / "log", traffic_of(own_run, 30)), export.write_rows

    def forgetting(*given: Any) -> None:
        write(*given)
        forget(log, ["request-0004"])

    monkeypatch.setattr(export, "write_rows", forgetting)
    assert "requests were forgotten during the export" in refused(
        export_traffic, ExportTrafficOptions(log, own_run, tmp_path / "may")
    )
    assert not (tmp_path / "may").exists()
    assert not list(tmp_path.glob(".may*"))


def test_show_counts_requests_and_accepted_tokens(tmp_path: Path) -> None:
    old = [record_of(number, prompt_ids=None, response_ids=None) for number in range(20)]
    new = [record_of(number, draft_version="v0002", slice="chat", accepted=1) for number in range(20, 40)]
    odd = [record_of(39, id="odd", constrained=True, slice="chat", draft_version="v0002")]
    log = write_log(tmp_path / "log", [*old, *new, *odd])
    quiet = Console(file=io.StringIO())
    shown = show_traffic(ShowOptions(log, as_json=True), quiet)
    assert (shown.requests, shown.since, shown.until, shown.finishes) == (41, 0.0, 39.0, {"stop": 41})
    chat, code = shown.slices
    assert (chat.slice, chat.requests, chat.counted) == ("chat", 21, 20)
    assert (chat.text, chat.accepted, chat.drafted) == (21, 20, 180)
    # Of the older ones 0, 1, 2, 3, 0, ... of 9 are accepted: 30 of 180.
    assert code.rate == pytest.approx(30 / 180)
    assert code.ci[0] < code.rate < code.ci[1]
    assert [row.draft_version for row in shown.versions] == ["v0001", "v0002"]
    assert [row.draft_version for row in shown.over_time] == ["v0001"] * 12 + ["v0002"] * 12
    assert (shown.over_time[1].since, sum(row.requests for row in shown.over_time)) == (39 / 24, 41)
    assert sum(row.accepted for row in shown.over_time) == 30 + 20
    assert "41 requests" in said_to(show_traffic, ShowOptions(log))
    silent = write_log(tmp_path / "silent", [record_of(1, accepted=None, drafted=None, blocks=None)])
    assert show_traffic(ShowOptions(silent), quiet).versions[0].rate is None


def test_the_commands_are_there_and_a_forged_log_ends_them_with_one_line(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", [record_of(1), b"{}\n"])
    assert CliRunner().invoke(app, ["traffic", "--help"]).exit_code == 0
    result = CliRunner().invoke(app, ["traffic", "show", str(log)])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith(f"{log}/log-00001.jsonl:2: crc32")
