"""`understudy readback` against a server that decodes with our own decoder, as it should and in every way that it should not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_server import Engine, running_engine

from distill.commands.readback.options import ReadbackOptions
from distill.commands.readback.readback import readback_command
from distill.run.frozen_text import FrozenText, load_frozen_text
from distill.run.served_record import ServedRecord

GAMMA = 3


@pytest.fixture(scope="module")
def frozen(tiny_run: Path) -> FrozenText:
    return load_frozen_text(tiny_run)


@pytest.fixture
def engine(frozen: FrozenText, tiny_run: Path) -> Engine:
    prompts = [response.prompt_ids for response in frozen.responses]
    return Engine(frozen.target.model, frozen.draft(str(tiny_run)), GAMMA, prompts=prompts)


def read(engine: Engine, run: Path, **options: Any) -> ServedRecord:
    with running_engine(engine) as url:
        return readback_command(ReadbackOptions(url, run, gamma=GAMMA, **options))


@pytest.mark.parametrize("rule", ["greedy-draft", "sample", "greedy"])
def test_an_engine_that_does_as_it_should_agrees(engine: Engine, tiny_run: Path, rule: Any) -> None:
    engine.rule = rule if rule != "greedy" else "greedy-draft"
    found = read(engine, tiny_run, rule="auto" if rule != "greedy" else "greedy")
    assert found.agrees
    assert found.rule == rule
