"""`understudy respond --signal`: a store that training takes without a target, resumed, repaired, shared, refused by name."""

import json
import shutil
import time
from datetime import date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import run_ranks
from refusals import refused
from tiny_training import forget_accelerators, fresh_accelerator, small_config, write_prompts
from transformers.utils import chat_template_utils

from data.responses import respond as data_respond
from data.responses.store import Store
from data.signals.store import SignalStore
from distill.config.load import load_config
from distill.config.run import RunConfig
from distill.config.target import TargetConfig
from distill.models.target import Target
from distill.respond import main, run
from distill.run import responses as responses_module
from distill.run.prompts import load_heldout
from distill.run.responses import RunData
from distill.run.run import Run
from distill.training import signal as signal_module
from distill.training.signal import open_signal_store, signal_line
from distill.training.teacher import CapturingTeacher
from speculative.rules.rule import Rule


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of a tiny target and 12 prompts; `output` is to be overridden."""
    return small_config(
        tmp_path_factory.mktemp("respond"),
        15,
        name="tiny",
        data={"heldout_count": 4},
        serving={"max_tokens": 10},
        loss={"name": "forward_kl", "temperature": 1.25},
        signal={"k": 9},
        train={"micro_batch_size": 4},
        judge={"prompts": 4},
    )


def respond(config_path: Path, folder: Path, *overrides: str, signal: str | None = "topk") -> dict[str, Any] | None:
    forget_accelerators()
    return run(config_path, [f"output={folder}", *overrides], signal)


def stored(config_path: Path, folder: Path, *overrides: str, repair: bool = False) -> tuple[SignalStore, RunConfig]:
    """The store as training with `signal.source: store` opens it."""
    asked = [f"output={folder}", "signal.source=store", *overrides]
    config = load_config(config_path, asked)
    assert config.target is not None
    facts = Target(config.target, torch.device("cpu"), config.folder).facts
    examples = Store(config.folder / "responses" / "train").rows().examples
    return open_signal_store(Run(config, fresh_accelerator(folder)), examples, facts, repair=repair), config


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(value, getattr(right, name)) for name, value in vars(left).items())


@pytest.fixture(scope="module")
def topk_run(config_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("topk")
    respond(config_path, folder)
    return folder


def test_judging_other_prompts_leaves_the_run_s_held_out_text_as_it_is(topk_run: Path, config_path: Path) -> None:
    config = load_config(config_path, [f"output={topk_run}"])
    target, folder = Target(config.target, torch.device("cpu")), config.folder / "responses" / "heldout"
    prompts = load_heldout(config.data, target.tokenizer, 128, 10, 4, folder=config.folder)

    def files() -> dict[str, tuple[bytes, int]]:
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}

    before, own = files(), [row.prompt_id for row in Store(folder).read()]
    data = RunData(Run(config, fresh_accelerator(topk_run)), target)
    asked = prompts[2:0:-1]
    assert [one.key for one in data.heldout_of(asked, Rule.named("sample"))] == [prompt.prompt_id for prompt in asked]
    assert files() == before, "a folder that may not be written is as good"
    assert [row.prompt_id for row in Store(folder).read()] == own
    assert set(own) > {prompt.prompt_id for prompt in asked}


def _set_clock(monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    """What chat templates and runs take for now."""
    moment = datetime.fromisoformat(day)
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: moment))
    monkeypatch.setattr(responses_module, "date", SimpleNamespace(today=moment.date, fromisoformat=date.fromisoformat))


def test_a_template_that_writes_the_date_crosses_midnight(
    config_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    shutil.copytree(config_path.parent / "target", target)
    # As Llama 3's.
    (target / "chat_template.jinja").write_text(
        "{% if strftime_now is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "Today is {{ date_string }}. {{ messages[0]['content'] }}"
    )
    changes = (f"target.path={target}", "data.template.mode=chat", "serving.max_tokens=2")
    _set_clock(monkeypatch, "2026-02-28T23:59")
    respond(config_path, tmp_path, *changes, signal="none")
    _set_clock(monkeypatch, "2026-03-01T00:01")
    respond(config_path, tmp_path, *changes)  # the same prompts: nothing is answered again, and the signal is added
    rows = Store(tmp_path / "tiny" / "responses" / "train").read()
    tokenizer = Target(TargetConfig(path=str(target)), torch.device("cpu")).tokenizer
    assert {tokenizer.decode(row.prompt_ids).split(".")[0] for row in rows} == {"Today is 28 Feb 2026"}
    copied = tmp_path / "other" / "responses"
    shutil.copytree(tmp_path / "tiny" / "responses", copied)
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("s*.arrow*")}
    respond(config_path, tmp_path, *changes, "name=other", signal="none")
    assert before
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("s*.arrow*")} == before


def test_a_store_is_made_and_reported(config_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = respond(config_path, tmp_path)
    assert facts is not None
    store, config = stored(config_path, tmp_path)
    assert facts == store.facts()
    assert facts.examples == 12
    said = capsys.readouterr().out.splitlines()
    line = next(line for line in said if line.startswith("signal:"))
    assert line == signal_line(config.signal, facts)
    assert f"topk k 9, {facts.bytes_per_token:.0f} bytes per token" in line
    assert f"tail mass: mean {facts.mean:.4f}" in line
    assert 0 < facts.mean < facts.largest < 1
    assert {path.name for path in (config.folder / "responses").iterdir()} == {"train", "heldout", "heldout-greedy"}
    assert (config.folder / "config.yaml").exists()


def test_training_knows_the_target_without_its_weights(
    config_path: Path, topk_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.models.load.load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    store, _ = stored(config_path, topk_run)
    assert store.missing() == []
    store.read(range(12))


@pytest.mark.parametrize("signal", [None, "none"])
def test_without_a_signal_only_responses_are_made(config_path: Path, tmp_path: Path, signal: str | None) -> None:
    assert respond(config_path, tmp_path, signal=signal) is None
    assert (tmp_path / "tiny" / "responses" / "train").exists()
    text = refused(lambda: stored(config_path, tmp_path))
    assert f"understudy respond {tmp_path}/tiny/config.yaml --signal topk" in text
    assert not list(tmp_path.rglob("topk-*")), "asking creates nothing"


def test_the_configs_own_signal_is_made_unasked(config_path: Path, tmp_path: Path) -> None:
    assert respond(config_path, tmp_path, "signal.source=store", signal=None) is not None


def test_one_more_prompt_costs_one_response_and_one_signal(
    config_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And judging other numbers of prompts costs what is missing of them."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 31)
    lines = prompts.read_text().splitlines(keepends=True)
    changes = [f"data.train.0.path={prompts}", "data.heldout_count=6"]
    prompts.write_text("".join(lines[:30]))
    respond(config_path, tmp_path, *changes)
    before = stored(config_path, tmp_path, *changes)[0].facts()
    asked: list[str] = []
    captured: list[int] = []
    answer, write = data_respond.decode, SignalStore.write

    def noted(target: Any, drafter: Any, keyed: Any, *rest: Any, **options: Any) -> Any:
        asked.extend(key for key, _ in keyed)
        return answer(target, drafter, keyed, *rest, **options)

    monkeypatch.setattr(data_respond, "decode", noted)
    monkeypatch.setattr(SignalStore, "write", lambda store, rows: (captured.extend(rows), write(store, rows)))
    prompts.write_text("".join(lines))
    facts = respond(config_path, tmp_path, *changes)
    assert facts is not None
    # The new prompt is trained on, or held out, and then another one that was held out is trained on.
    assert (facts.examples, len(captured)) == (before.examples + 1, 1)
    assert 1 <= len(asked) <= 3
    folder = tmp_path / "tiny" / "responses"
    trained = {row.prompt_id for row in Store(folder / "train").read()}
    assert not trained & {row.prompt_id for row in Store(folder / "heldout").read()}
    asked.clear()
    respond(config_path, tmp_path, *changes, "judge.prompts=6")
    assert len(captured) == 1
    assert len(asked) == 4, "two more held-out prompts, under two rules"
    assert len(Store(folder / "heldout").read()) == 6
    respond(config_path, tmp_path, *changes, "judge.prompts=4", "serving.shard_size=9")
    assert len(asked) == 4
    assert len(Store(folder / "heldout").read()) == 4, "what is there is not what is judged"


def test_a_signal_of_another_target_is_not_taken(config_path: Path, topk_run: Path) -> None:
    config = load_config(config_path, [f"output={topk_run}", "signal.source=store"])
    facts: Any = SimpleNamespace(vocab_rows=300, fingerprint="0123", dtype="float32")
    examples = Store(config.folder / "responses" / "train").rows().examples
    accelerator = fresh_accelerator(topk_run)
    assert "another target (" in refused(
        lambda: open_signal_store(Run(config, accelerator), examples, facts, repair=False)
    )


def test_an_objective_that_the_signal_cannot_serve_is_reported_before_the_work(
    config_path: Path, tmp_path: Path
) -> None:
    text = refused(lambda: respond(config_path, tmp_path, "data.mix.student=1"))
    assert "signal.source: store has only the target's responses" in text
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{config}", "--signal", "all"], "--signal all: choose one of topk, none"),
        (["{config}", "signal.kk=3"], "unknown key `signal.kk`"),
        (["nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_mistakes_are_one_line(
    config_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    forget_accelerators()
    given = [argument.format(config=config_path) for argument in arguments]
    assert main([*given, f"output={tmp_path}"]) == 2
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == 1


def test_the_program(config_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forget_accelerators()
    assert main([str(config_path), "--signal=topk", f"output={tmp_path}"]) == 0
    assert "signal: topk k 9" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "signal.k" in capsys.readouterr().out


# --- stopped at any moment, and shared ---------------------------------------------------------------------------------


def _rank(rank: int, config_path: Path, folder: Path) -> None:
    taken: list[int] = []
    missing, make = SignalStore.missing, CapturingTeacher.fill

    def late(store: SignalStore) -> list[int]:
        time.sleep(0.5 * rank)  # the other rank must wait with its first record
        return missing(store)

    def noted(teacher: CapturingTeacher, batch: Any) -> int:
        taken.extend(batch.indices)
        return make(teacher, batch)

    SignalStore.missing, CapturingTeacher.fill = late, noted  # type: ignore[method-assign]
    facts = respond(config_path, folder, "train.micro_batch_size=2")
    assert facts is not None
    assert facts.examples == 12
    (folder / f"rank{rank}.json").write_text(json.dumps(taken))


def test_two_ranks_share_the_work(config_path: Path, tmp_path: Path, topk_run: Path) -> None:
    run_ranks(_rank, config_path, tmp_path)
    store, _ = stored(config_path, tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert (len(first), len(second), len({*first, *second})) == (6, 6, 12)
    alone, shared = stored(config_path, topk_run)[0].read(range(12)), store.read(range(12))
    assert torch.equal(shared.ids_RK, alone.ids_RK)  # type: ignore[union-attr]
    # Other micro-batches: another order of sums may move a code by one.
    torch.testing.assert_close(shared.log_probs_RK, alone.log_probs_RK, rtol=0, atol=5e-4)  # type: ignore[union-attr]


def test_the_longest_come_first(config_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out at once or never."""
    widths: list[int] = []
    collate = signal_module.collate

    def noted(examples: Any, **rest: Any) -> Any:
        widths.append(max(len(example.input_ids) for example in examples))
        return collate(examples, **rest)

    monkeypatch.setattr(signal_module, "collate", noted)
    respond(config_path, tmp_path)
    assert len(widths) == 3
    assert widths == sorted(widths, reverse=True)
