"""What bench/engine_steps.py counts as the time of a call, against a server that answers as llama.cpp does."""

from typing import Any

import pytest
from bench_modules import bench

from speculative.errors import UserError

program = bench("engine_steps")


class Server:
    """Caches the start of a prompt that the last one had too, but reads a token at least; slow where it first reads so many."""

    def __init__(self, forgets: bool = False) -> None:
        self.cached, self.seen, self.forgets = list[int](), set[int](), forgets

    def ask(self, url: str, prompt: list[int], **options: Any) -> dict[str, Any]:
        same = 0
        while not self.forgets and same < min(len(prompt) - 1, len(self.cached)) and prompt[same] == self.cached[same]:
            same += 1
        new, self.cached = len(prompt) - same, list(prompt)
        slow = 0.0 if new in self.seen else 100.0
        self.seen.add(new)
        return {"prompt_n": new, "prompt_ms": 5.0 + new + slow, "predicted_per_token_ms": 3.0 + len(options)}


def test_a_call_is_timed_by_its_new_tokens_without_the_first_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "ask", Server().ask)
    found = program.times_of("http://here", [1, 2, 5])
    assert found["call"] == {"1": 6.0, "2": 7.0, "5": 10.0}
    assert found["token"].keys() == program.SAMPLERS.keys()


def test_a_server_that_does_not_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "ask", Server(forgets=True).ask)
    with pytest.raises(UserError, match="read 65 tokens where 1 were new"):
        program.times_of("http://here", [1])


def test_a_block_is_counted_by_what_it_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((900.0, 300.0, 330.0, 310.0, 320.0))  # the first prepares

    def ask(url: str, **options: Any) -> dict[str, Any]:
        return {"predicted_ms": next(times), "predicted_n": 64, "draft_n_accepted": 33}

    monkeypatch.setattr(program, "ask", ask)
    assert program.block_ms("http://here") == pytest.approx(315.0 / 30)
