"""The engine used by the gateway's tests."""

from collections.abc import Iterator

import pytest
from running_app import running_app
from scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def direct(engine: ScriptedEngine) -> Iterator[str]:
    with running_app(engine.app()) as url:
        yield url
