"""Our own engine on a port of its own, in this process."""

from __future__ import annotations

from contextlib import AbstractContextManager

from running_app import running_app

from distill.live.house_decoding import HouseEngine
from distill.live.house_engine import Pages


def running_house(engine: HouseEngine) -> AbstractContextManager[str]:
    """Its url, without /v1."""
    return running_app(Pages(engine).app(), log_level="warning")
