"""The worker's half of bench/peers.py's talk: one JSON object a line on stdin, one answer a line on stdout.

It may run in the environment of a foreign engine, so it needs nothing but Python's own library.

    {"do": "convert", "model": DIR, "to": DIR, "weights": W}            -> {"path": PATH}
    {"do": "open", ...the fields of `Setting`}                          -> {}
    {"do": "decode", "prompts": [[ID, ...], ...]}                       -> {"responses": [[ID, ...], ...], "seconds": S}
    {"do": "close"}                                                     -> {}
    {"do": "versions"}                                                  -> {PACKAGE: VERSION}

What fails is answered by {"error": TEXT}.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any, Protocol

_SET_PDEATHSIG = 1  # of Linux's prctl


@dataclass(frozen=True)
class Setting:
    """What an engine is opened for.

    target, draft: what `convert` gave for them; draft is None for the target alone, and gamma 0 then.
    weights: float32, bfloat16 or int8, of target and draft. batch: prompts of a request.
    context: tokens that a prompt and its response need at most.
    """

    target: str
    draft: str | None
    gamma: int
    threads: int
    batch: int
    max_tokens: int
    context: int
    eos_ids: tuple[int, ...]
    weights: str = "float32"

    @property
    def mode(self) -> str:
        """What the cell measures."""
        if self.max_tokens == 1:
            return "first token"
        return "target alone" if self.draft is None else "with the draft"


class Engine(Protocol):
    """What a worker file has to bring; `decode` gives the responses and the seconds of the call."""

    def convert(self, model: str, to: str, weights: str) -> str: ...
    def open(self, setting: Setting) -> None: ...
    def decode(self, prompts: list[list[int]]) -> tuple[list[list[int]], float]: ...
    def close(self) -> None: ...
    def versions(self) -> dict[str, str]: ...


def die_with_parent() -> None:
    """The system kills this process when the one that started it ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def answer(engine: Engine, asked: dict[str, Any]) -> dict[str, Any]:
    """One request done."""
    match asked.pop("do"):
        case "convert":
            return {"path": engine.convert(**asked)}
        case "open":
            engine.open(Setting(**asked))
        case "decode":
            responses, seconds = engine.decode(asked["prompts"])
            return {"responses": responses, "seconds": seconds}
        case "close":
            engine.close()
        case "versions":
            return dict(engine.versions())
    return {}


def serve(engine: Engine) -> None:
    """Answers requests until stdin ends. What libraries print to stdout goes to stderr."""
    die_with_parent()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        for line in sys.stdin:
            try:
                said = answer(engine, json.loads(line))
            except Exception as error:  # The parent decides what a failure costs.
                said = {"error": f"{type(error).__name__}: {error}"}
            replies.write(json.dumps(said) + "\n")
            replies.flush()
    engine.close()
