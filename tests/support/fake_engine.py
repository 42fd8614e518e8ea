"""The fake engine of the tests: the stub engine's protocol over scripted, timed or decoded text, and every way to be wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from running_app import running_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from vllm_protocol import EngineCounts, Job, Pages, ServedEngine

from speculative.decode import Event, decode
from speculative.decoder.responses import DecodeSettings
from speculative.decoder.responses import Response as Decoded
from speculative.drafters.draft import Draft, Drafting
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

# What it answers: (ids, accepted and drafted tokens of each block). The first token is the prefill's.
Text = tuple[Sequence[int], Sequence[int], Sequence[int]]
IDS, ACCEPTED, DRAFTED = [5, 6, 7, 8, 9, 10], [2, 1], [3, 3]


@dataclass(frozen=True)
class Behaviour:
    """How it answers, and what is wrong with it.

    detail: of --per-request-spec-decode-metrics. counters: whether it has a /metrics page. usage: whether a stream ends with usage and
    counts if nobody asks. unlisted: one in so many prompts, in whose answers a token id is missing. noise: random text at temperature > 0.
    greedy_shift: added to the last id of greedy text. wrong: counts that replace its own. dies_after: requests. resets_at: the request
    before which the counters begin again. fails: every request. slow: seconds before an answer; pause: before each
    further event. most: requests that it decodes at a time; the others wait. llama: as llama-server, which sends a part for each token, and
    in it the counts so far. weights: the precision that llama-server states on /props.
    """

    name: str = "tiny"
    tokenizer: Any = None
    detail: str = "detailed"
    counters: bool = True
    usage: bool = False
    ids: bool = True
    unlisted: int = 0
    noise: bool = False
    greedy_shift: int = 0
    wrong: dict[str, Any] = field(default_factory=dict)
    dies_after: int | None = None
    resets_at: int | None = None
    fails: bool = False
    slow: float = 0.0
    pause: float = 0.0
    most: int = 1000
    llama: bool = False
    weights: str = ""


@dataclass(eq=False)
class Pair:
    """Decodes with our own decoder: all `prompts` at once, since a batch takes as long as one; those that decode alike share `made`.

    sampling: instead of what a request asks for.
    """

    target: Any
    draft: Any
    gamma: int
    rule: str = "greedy-draft"
    drafting: Drafting = "autoregressive"
    sampling: SamplingSettings | None = None
    prompts: list[Any] = field(default_factory=list)
    made: dict[Any, dict[tuple[int, ...], Text]] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    @torch.no_grad()
    def __call__(self, request: dict[str, Any]) -> Text:
        asked = SamplingSettings(request["temperature"], max(request["top_k"], 0), request["top_p"], request["min_p"])
        eos, most, prompt = tuple(request["stop_token_ids"]), request["max_tokens"], tuple(request["prompt"])
        with self.lock:
            texts = self.made.setdefault((asked, most), {})
            if prompt not in texts:
                sampling = asked if asked.greedy or self.sampling is None else self.sampling
                # Each prompt has coins of its own: with the same ones for all, their texts would not be independent.
                keys = [str(index) for index in range(len(self.prompts))] or [str(prompt)]
                texts.update(self._decoded(dict(zip(keys, self.prompts or [prompt], strict=True)), sampling, most, eos))
            return texts[prompt]

    def _decoded(
        self, prompts: dict[str, Any], sampling: SamplingSettings, most: int, eos: tuple[int, ...]
    ) -> dict[tuple[int, ...], Text]:
        """The first token of each as from a prefill, the rest in blocks."""
        rule, gamma = Rule.usual(sampling.temperature), 0 if self.draft is None else self.gamma
        plain = DecodeSettings(sampling, 0, rule, 1, eos, seed=17)
        first = {one.key: one.response_ids for one in decode(self.target, None, [*prompts.items()], plain)[0]}
        longer = {key: [*prompts[key], *ids] for key, ids in first.items() if most > 1 and ids[-1] not in eos}
        settings = replace(plain, gamma=gamma, max_tokens=max(1, most - 1))
        settings = replace(settings, rule=rule if sampling.greedy or not gamma else Rule.named(self.rule))
        drafter = Draft(self.draft, self.drafting).drafter() if gamma else None
        keyed = [(f"{key} on", ids) for key, ids in longer.items()]
        rests = dict(zip(longer, decode(self.target, drafter, keyed, settings)[0], strict=True)) if keyed else {}
        return {
            tuple(prompts[key]): (
                ([*ids, *rests[key].response_ids], rests[key].accepted_counts, rests[key].drafted_counts)
                if key in rests
                else (ids, [], [])
            )
            for key, ids in first.items()
        }

    def made_blocks(self, greedy: bool) -> int:
        """Blocks of all its responses to whole requests of a mode."""
        most = max(tokens for asked, tokens in self.made if asked.greedy == greedy)
        texts = [of for (asked, tokens), of in self.made.items() if asked.greedy == greedy and tokens == most]
        return sum(len(blocks) for of in texts for _, blocks, _ in of.values())


class Script:
    """The same text for all."""

    def __call__(self, request: dict[str, Any]) -> Text:
        return IDS, ACCEPTED, DRAFTED


class Timed:
    """Text without a meaning for `understudy time`: each block accepts `accepted` tokens and takes `seconds` of requests that run."""

    def __init__(self, gamma: int, accepted: int = 0, fixed: float = 0.004, each: float = 0.0002, draft: float = 0.001):
        self.gamma, self.accepted, self.seen = gamma, accepted, set[Any]()
        self.seconds = lambda running: fixed + each * running * (gamma + 1) + gamma * draft

    def __call__(self, request: dict[str, Any]) -> Text:
        assert request["ignore_eos"]
        place = tuple(request["prompt"]), request.get("cache_salt")
        assert request.get("cache_prompt") is False or place not in self.seen, "its prompt would be in the prefix cache"
        self.seen.add(place)
        blocks = -(-(request["max_tokens"] - 1) // (self.accepted + 1))
        return [5] * request["max_tokens"], [self.accepted] * blocks, [self.gamma] * blocks


class FakeEngine(ServedEngine):
    """A request's `user` may tell it what to do with that one: 400, 500, silent, hang, break, slowly, flood or odd (counts).

    asked: (headers, body) of each request. sent: bytes of floods. requests: answered ones.
    """

    def __init__(self, text: Pair | Script | Timed | None = None, **behaviour: Any) -> None:
        self.text, self.behaviour = text or Script(), Behaviour(**behaviour)
        super().__init__(self.behaviour.name, getattr(text, "gamma", 3))
        self.drafts = self.text.draft is not None if isinstance(text, Pair) else self.gamma > 0
        self.asked: list[tuple[dict[str, str], bytes]] = []
        self.sent = self.requests = self.running = 0
        self._open, self._tasks = set[Job](), set[asyncio.Task[None]]()

    def becomes(self, **behaviour: Any) -> None:
        """From now on it behaves like this."""
        self.behaviour = replace(self.behaviour, **behaviour)

    @property
    def left(self) -> int:
        """How many clients left before the end of an answer."""
        return sum(job.cancelled for job in self._open)

    def app(self) -> Starlette:
        return _FakePages(self).app()

    def models(self) -> dict[str, Any]:
        owner = "llamacpp" if self.behaviour.llama or self.behaviour.weights else "vllm"
        return {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": owner}]}

    def head(self, job: Job, stream: bool = False) -> dict[str, Any]:
        return {"id": f"cmpl-{self.name}", "model": self.name}

    def stats(self, job: Job, response: Decoded) -> dict[str, Any]:
        if self.behaviour.detail == "none" or not self.drafts:
            return {}
        stats = super().stats(job, response) | self.behaviour.wrong
        stats |= {"num_accepted_draft_tokens": 9} if job.body.get("user") == "odd" else {}
        each = ("per_step_accepted", "per_step_drafted")
        return {name: value for name, value in stats.items() if self.behaviour.detail == "detailed" or name not in each}

    def listed(self, response: Decoded, ids: list[int]) -> list[int] | None:
        if not self.behaviour.ids:
            return None
        lacking = self.behaviour.unlisted and sum(response.prompt_ids) % self.behaviour.unlisted == 0
        return ids[1:] if lacking and len(ids) > 1 else ids

    def job_of(self, body: dict[str, Any], chat: bool) -> Job:
        prompt = body.get("prompt")
        body = body | ({"stream_options": {"include_usage": True}} if self.behaviour.usage else {})
        return Job("", prompt if isinstance(prompt, list) else [1, 2, 3], None, body, chat, asyncio.get_running_loop())

    def submit(self, job: Job) -> None:
        self._open.add(job)
        task = asyncio.create_task(self._answer(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, job: Job) -> None:
        if job.body.get("user") == "silent":
            return
        queued = self.running >= self.behaviour.most
        while self.running >= self.behaviour.most:
            await asyncio.sleep(0.001)
        self.running += 1
        try:
            # A client that waited begins later than a busy machine reads the end of the response before.
            await asyncio.sleep(self.behaviour.slow + 0.25 * queued)
            await self._say(job, *await asyncio.to_thread(self.text, job.body))
        except Exception as error:
            job.say(error)
        finally:
            self.running -= 1

    async def _say(self, job: Job, ids: Sequence[int], accepted: Sequence[int], drafted: Sequence[int]) -> None:
        """The events of an answer: a block each, or for decoded text two."""
        task, decoded = job.body.get("user"), isinstance(self.text, Pair)
        ids = self._spoilt(list(ids), job.body)
        self.count(accepted, drafted, len(ids))
        response = Decoded("", job.prompt_ids, response_ids=ids)
        response.accepted_counts, response.drafted_counts = [0, *accepted], [0, *drafted]
        ended = ids[-1] in job.body.get("stop_token_ids", ()) or isinstance(self.text, Script)
        ends = [1, len(ids)] if decoded else [1, *itertools.accumulate((kept + 1 for kept in accepted), initial=1)][1:]
        for number, (start, end) in enumerate(
            itertools.pairwise([0, *dict.fromkeys(min(end, len(ids)) for end in ends)])
        ):
            if isinstance(self.text, Timed):
                await asyncio.sleep(self.text.seconds(self.running))
            elif number:
                await asyncio.sleep(0.01 if task == "slowly" else self.behaviour.pause)
            finish = None if end < len(ids) else "end" if ended else "length"
            if finish:
                self._open.discard(job)
            job.say(Event(0, ids[start:end], self._words(ids[start:end]), finish, response))
            if task == "hang":
                return
            if task == "break":
                raise RuntimeError("told to break")

    def _words(self, ids: list[int]) -> str:
        tokenizer = self.behaviour.tokenizer
        return "x" * len(ids) if tokenizer is None else str(tokenizer.decode(ids, skip_special_tokens=False))

    def _spoilt(self, ids: list[int], body: dict[str, Any]) -> list[int]:
        how, rows = self.behaviour, self.text.target.config.vocab_size if isinstance(self.text, Pair) else 1
        if how.noise and body["temperature"]:
            rng = np.random.default_rng(body["seed"])
            return [*ids[:1], *rng.integers(3, rows, len(ids) - 1).tolist()]
        return [*ids[:-1], (ids[-1] + how.greedy_shift) % rows] if how.greedy_shift and not body["temperature"] else ids

    def count(self, accepted: Sequence[int], drafted: Sequence[int], tokens: int) -> None:
        if self.requests == self.behaviour.resets_at:
            self.counts = EngineCounts()
        self.requests += 1
        for kept, tried in zip(accepted, drafted, strict=True) if self.drafts else ():
            self.counts.add_block(tried, kept)
        self.counts.tokens.inc(tokens)


class _FakePages(Pages):
    engine: FakeEngine

    def app(self) -> Starlette:
        pages = super().app()
        pages.routes.append(Route("/v1/embeddings", self.models, methods=["POST"]))
        pages.routes.append(Route("/props", self.props))
        return pages

    async def props(self, request: Request) -> Response:
        weights = self.engine.behaviour.weights
        return JSONResponse({"build_info": "b1", "model_ftype": weights}) if weights else Response(status_code=404)

    async def metrics(self, request: Request) -> Response:
        return await super().metrics(request) if self.engine.behaviour.counters else Response(status_code=404)

    async def _answer(self, request: Request, chat: bool) -> Response:
        engine, how, content = self.engine, self.engine.behaviour, await request.body()
        engine.asked.append((dict(request.headers), content))
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            body = {}
        task = "500" if how.fails else body.get("user")
        if task in ("400", "500"):
            return JSONResponse({"error": {"message": f"told to say {task}"}}, int(task))
        if task == "flood":
            return StreamingResponse(self._flood(), media_type="text/event-stream")
        if how.dies_after is not None and engine.requests >= how.dies_after:
            return StreamingResponse(_nothing())
        if body.get("max_tokens") == 1 and isinstance(body["prompt"], str):  # The question which tokenizer is here.
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "text": ""}
            if how.tokenizer is not None:
                choice["prompt_token_ids"] = how.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            return JSONResponse({"choices": [choice]})
        if not how.llama:
            return await super()._answer(request, chat)
        job = engine.job_of(body, chat)
        engine.submit(job)
        return StreamingResponse(self._llama_parts(job), media_type="text/event-stream")

    async def _llama_parts(self, job: Job) -> AsyncIterator[str]:
        """A part for each token of a block. The second token of the response is part of a character: it comes with the third."""
        said, blocks, finish, gamma, most = 0, -1, None, self.engine.gamma, job.body["max_tokens"]
        while finish is None:
            event = await job.events.get()
            assert isinstance(event, Event)
            blocks, finish = blocks + 1, event.finish_reason
            total = said + len(event.token_ids)
            left = (most - 2 - block * (getattr(self.engine.text, "accepted", 0) + 1) for block in range(blocks))
            drafted = sum(min(gamma, tokens) for tokens in left)
            counts = {"draft_n": drafted, "draft_n_accepted": total - 1 - blocks} if drafted else {}
            for token in (token for token in range(said + 1, total + 1) if token != 2):
                part = {"choices": [{"text": "x", "logprobs": None}], "timings": {"predicted_n": token} | counts}
                yield f"data: {json.dumps(part)}\n\n"
            said = total

    async def _flood(self) -> AsyncIterator[bytes]:
        while True:
            self.engine.sent += 1 << 16
            yield b": " + b"x" * (1 << 16) + b"\n\n"
            await asyncio.sleep(0)


async def _nothing() -> AsyncIterator[bytes]:
    raise RuntimeError("the engine died")
    yield b""


@contextmanager
def running_engine(engine: FakeEngine) -> Iterator[str]:
    """The url of its API."""
    with running_app(engine.app()) as url:
        yield f"{url}/v1"
