"""Users of the gateway. They repeat a request under the same id until its response is complete.

Half of the requests are streams. Complete responses are kept, so that the log can be compared with them.
"""

import asyncio
import contextlib
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from speculative.errors import UserError

RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.3, 3.0  # longer each time
CONSTRAINED_EVERY = 25  # one request in so many has a constraint on its text
PATIENCE_SECONDS = 900.0  # without any response


class Clients:
    """Sends ``at_once`` requests at a time from its own thread until it is paused.

    whole: id -> token ids of each complete response. attempts: id -> number of times it was sent. prompts, at_once: may be changed at any
    time.
    """

    def __init__(self, url: str, asked: dict[str, Any], constraint: dict[str, Any]) -> None:
        """``asked``: sampling settings of every request. ``constraint``: keys that some requests add."""
        self.url, self.asked, self.constraint = f"{url}/v1/completions", asked, constraint
        self.prompts: Sequence[list[int]] = ()
        self.at_once = 0
        self.whole: dict[str, tuple[int, ...]] = {}
        self.attempts: Counter[str] = Counter()
        self.constrained: set[str] = set()
        self._numbers = itertools.count()
        self._running = 0
        self._refused = ""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._keep_asking(), self._loop)

    def wait(self, answers: int, check: Callable[[], None]) -> None:
        """Return after this number of further responses.

        Raises:
            UserError: no response for PATIENCE_SECONDS, or what ``check`` raises; it is called while waiting.
        """
        begun = len(self.whole)
        self.wait_until(lambda: len(self.whole) - begun >= answers, check)

    def pause(self, check: Callable[[], None]) -> None:
        """Send no new requests and return when all are answered."""
        self.at_once = 0
        self.wait_until(lambda: self._running == 0, check)

    def wait_until(self, over: Callable[[], bool], check: Callable[[], None]) -> None:
        """As `wait`, until ``over`` returns true."""
        last, count = time.monotonic(), len(self.whole)
        while not over():
            check()
            if self._refused:
                raise UserError(self._refused)
            if len(self.whole) > count or not self.at_once:
                last, count = time.monotonic(), len(self.whole)
            if time.monotonic() - last > PATIENCE_SECONDS:
                raise UserError(f"{self.url}: no answer for {PATIENCE_SECONDS:g} s")
            time.sleep(0.05)

    async def _keep_asking(self) -> None:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            tasks: set[asyncio.Task[None]] = set()
            while True:
                while self._running < self.at_once:
                    self._running += 1
                    task = asyncio.create_task(self._answered(client, next(self._numbers)))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                await asyncio.sleep(0.02)

    async def _answered(self, client: httpx.AsyncClient, number: int) -> None:
        """Repeat one request until its response is complete."""
        name = f"loop-{number:05d}"
        prompt = self.prompts[number % len(self.prompts)]
        body = self.asked | {"prompt": prompt, "seed": number, "return_token_ids": True}
        if number % CONSTRAINED_EVERY == CONSTRAINED_EVERY - 1:
            body |= self.constraint
            self.constrained.add(name)
        if number % 2:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            while True:
                self.attempts[name] += 1
                with contextlib.suppress(httpx.HTTPError):
                    ids = await self._ask(client, name, body)
                    if ids is not None:
                        self.whole[name] = ids
                        return
                await asyncio.sleep(min(LONGEST_RETRY_SECONDS, RETRY_SECONDS * self.attempts[name]))
        finally:
            self._running -= 1

    async def _ask(self, client: httpx.AsyncClient, name: str, body: dict[str, Any]) -> tuple[int, ...] | None:
        """Token ids of a response; None if it is incomplete."""
        headers = {"x-request-id": name}
        if "stream" not in body:
            answer = await client.post(self.url, json=body, headers=headers)
            self._check(answer, answer.text)
            return tuple(answer.json()["choices"][0]["token_ids"]) if answer.status_code == httpx.codes.OK else None
        ids: list[int] = []
        async with client.stream("POST", self.url, json=body, headers=headers) as answer:
            async for line in answer.aiter_lines():
                self._check(answer, line)
                if line == "data: [DONE]":
                    return tuple(ids)
                if answer.status_code == httpx.codes.OK and line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        return None
                    ids += (chunk.get("choices") or [{}])[0].get("token_ids") or []
        return None

    def _check(self, answer: httpx.Response, said: str) -> None:
        if 400 <= answer.status_code < 500 and said:  # Asking again would not help.
            self._refused = f"{self.url}: {answer.status_code} {said[:200]}"
