"""A run whose held-out text a `FakeEngine` serves, for tests of `understudy readback`."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Behaviour, FakeEngine, Pair, running_engine
from tiny_models import perturbed
from tiny_training import fresh_accelerator

from data.responses.rendered import RenderedPrompt
from distill.commands.readback import source
from distill.commands.readback.options import ReadbackOptions
from distill.commands.readback.readback import readback_command
from distill.config.load import dump_config, load_config
from distill.engines.protocol import client as engine_client
from distill.models.target import Target
from distill.run.heldout_set import HeldoutSet, load_heldout_set
from distill.run.readback_record import ReadbackRecord
from distill.run.responses import RunData
from distill.run.run import Run

GAMMA = 3


@pytest.fixture(scope="package")
def heldout(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> HeldoutSet:
    """The run's prompts answered at a temperature at which even a draft that takes its argmax is accepted now and then."""
    output = f"output={tmp_path_factory.mktemp('readback')}"
    config = load_config(tiny_run / "config.yaml", [output, "serving.temperature=0.25"])
    config.folder.mkdir()
    (config.folder / "config.yaml").write_text(dump_config(config))
    shutil.copy(tiny_run / "result.json", config.folder)
    accelerator = fresh_accelerator(config.folder)
    target = Target(config.target, accelerator.device, config.folder)
    prompts = [
        RenderedPrompt(one.key, one.domain, tuple(one.prompt_ids)) for one in load_heldout_set(tiny_run).responses
    ]
    data = RunData(Run(config, accelerator), target)
    for rule in data.heldout_rules:
        data.heldout_of(prompts, rule, select=True)
    return load_heldout_set(config.folder)


@pytest.fixture(scope="package")
def run(heldout: HeldoutSet) -> Path:
    return heldout.run


@pytest.fixture(scope="package")
def draft(heldout: HeldoutSet) -> Any:
    with heldout.target.loaded() as model:
        return perturbed(model, 0.01)


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch, heldout: HeldoutSet, draft: Any) -> None:
    """Nothing is waited for, and models are loaded once."""
    monkeypatch.setattr(engine_client, "_SETTLED_SECONDS", 0.001)
    monkeypatch.setattr(
        source, "load_heldout_set", lambda run, rule, *_: load_heldout_set(run, rule) if rule else heldout
    )
    monkeypatch.setattr(HeldoutSet, "draft", lambda own, path: draft)


@pytest.fixture(scope="package")
def make(heldout: HeldoutSet, draft: Any) -> Iterator[Callable[..., FakeEngine]]:
    """Engines on the run's pair, told by fields of `Pair` and `Behaviour`; those that decode alike decode once."""
    made: dict[Any, Any] = {}

    def engine(**how: Any) -> FakeEngine:
        behaviour = {one.name: how.pop(one.name) for one in dataclasses.fields(Behaviour) if one.name in how}
        prompts = [response.prompt_ids for response in heldout.responses]
        pair = Pair(**{"target": model, "draft": draft, "gamma": GAMMA, "prompts": prompts, **how})
        alike = (pair.target, pair.draft, pair.gamma, pair.rule, pair.drafting, pair.sampling, len(pair.prompts))
        pair.made = made.setdefault(alike, pair.made)
        return FakeEngine(pair, **behaviour)

    with heldout.target.loaded() as model:
        yield engine


def read(engine: FakeEngine, run: Path, **options: Any) -> ReadbackRecord:
    with running_engine(engine) as url:
        return readback_command(ReadbackOptions(url, run, **{"gamma": GAMMA, **options}))
