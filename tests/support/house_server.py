"""Our own engine on a port of its own, in this process."""

from __future__ import annotations

from contextlib import AbstractContextManager

from house_engine import HouseEngine, Pages
from running_app import running_app


def running_house(engine: HouseEngine) -> AbstractContextManager[str]:
    """Its url, without /v1."""
    return running_app(Pages(engine).app(), log_level="warning")
