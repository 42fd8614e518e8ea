"""A run's synthetic prompts: made once, the same after a stop, none from the held-out set."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_training import fresh_accelerator

from data.prompts.split import normalised_hash
from data.responses import respond as respond_module
from data.responses.rendered import StoredPrompts
from data.responses.store import Store
from distill import respond
from distill.commands import show
from distill.config.load import load_config
from distill.config.run import RunConfig
from distill.models.target import Target
from distill.run import responses
from distill.run.prompts import load_prompts
from distill.run.responses import RunStores, synthetic_line
from distill.run.run import Run
from speculative.decode import decode
from speculative.errors import UserError


def made(config: RunConfig) -> tuple[Any, Any, str]:
    """(own prompts, with the synthetic ones behind them, what is told); every fourth token ends a turn, for a random target says no end."""
    target = Target(config.target, torch.device("cpu"))
    run = Run(config, fresh_accelerator(config.folder))
    sets = load_prompts(config.data, target.tokenizer, 128, 16, 10, folder=config.folder)
    stores = RunStores(run, target)
    stores.settings = replace(stores.settings, eos_ids=tuple(range(2, 1500, 4)))
    return sets.train, *stores.with_synthetic(sets.train, target.tokenizer, 128)


@pytest.fixture
def asked(tiny_config: Path, chat_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(responses, "TURN_TOKENS", 12)
    overrides = [
        "template={mode: chat}",
        "too_long=drop",
        "max_prompt_tokens=100",
        "synthetic={count: 6}",
    ]
    return [tiny_config, [f"output={tmp_path}", f"target.path={chat_target}", *(f"data.{one}" for one in overrides)]]


def test_a_run_has_more_prompts_and_makes_the_same_ones_again(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(*asked)
    own, prompts, told = made(config)
    assert told.startswith("6 synthetic training prompts (magpie)")
    assert [prompt.prompt_id for prompt in prompts[: len(own)]] == [prompt.prompt_id for prompt in own]
    heldout = {normalised_hash(prompt.row()) for prompt in StoredPrompts(config.folder / "prompts" / "heldout.arrow")}
    new = [normalised_hash(prompt.row()) for prompt in prompts[len(own) :]]
    assert not heldout & set(new)
    assert len({*new, *(normalised_hash(prompt.row()) for prompt in own)}) == len(own) + 6
    record = json.loads((config.folder / "prompts" / "synthetic.json").read_text())
    assert synthetic_line("magpie", record["counts"]) == told
    assert (record["method"], record["count"]) == ("magpie", 6)
    assert StoredPrompts(config.folder / "prompts" / "synthetic.arrow")[:] == list(prompts[len(own) :])
    assert told in capsys.readouterr().out
    # What the target wrote is there: a second start asks it nothing.
    monkeypatch.setattr(respond_module, "decode", lambda *_, **__: pytest.fail("decoded again"))
    assert made(config)[1][:] == list(prompts)
    # Some of it lost: only that is made again, and it is the same.
    monkeypatch.setattr(respond_module, "decode", decode)
    Store(config.folder / "responses" / "user-turns").shards()[0].unlink()
    assert made(config)[1][:] == list(prompts)


def test_a_mix_asks_the_target_nothing(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(asked[0], [*asked[1], "data.synthetic={count: 5, method: mix}"])
    monkeypatch.setattr(respond_module, "decode", lambda *_, **__: pytest.fail("decoded"))
    own, prompts, _ = made(config)
    assert len(prompts) - len(own) == 5


def test_the_target_answers_them_like_the_others(asked: list[Any]) -> None:
    overrides = [*asked[1], "data.synthetic={count: 5, method: mix}", "serving.max_tokens=4"]
    config = load_config(asked[0], overrides)
    respond.run(asked[0], overrides)
    own, made = (StoredPrompts(config.folder / "prompts" / f"{name}.arrow") for name in ("train", "synthetic"))
    answered = {row.prompt_id for row in Store(config.folder / "responses" / "train").read()}
    assert answered == {prompt.prompt_id for prompt in (*own, *made)}
    assert len(made) == 5


def test_show_tells_the_counts(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(record=True)
    monkeypatch.setattr(show, "Console", lambda: console)
    monkeypatch.setattr(show, "held_out_completions", lambda *_, **__: [])
    record = tiny_run / "prompts" / "synthetic.json"
    record.write_text(json.dumps({"method": "mix", "counts": {"made": 9, "kept": 5, "empty": 4}}))
    try:
        show.show_run(tiny_run)
    finally:
        record.unlink()
    assert "5 synthetic training prompts (mix) of 9 candidates, left out: 4 empty" in console.export_text()


@pytest.mark.parametrize(
    ("override", "said"),
    [("data.responses=reference", "no reference answers"), ("data.synthetic={count: 0}", "data.synthetic.count")],
)
def test_what_cannot_be_is_refused(asked: list[Any], override: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config(asked[0], [*asked[1], override])
