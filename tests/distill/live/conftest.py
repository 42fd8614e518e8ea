"""The engine used by the gateway's tests."""

from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from running_app import running_app


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(name="a", usage=True)


@pytest.fixture(scope="module")
def direct(engine: FakeEngine) -> Iterator[str]:
    with running_app(engine.app()) as url:
        yield url
