"""vLLM's protocol over HTTP, for an engine that fills the events of a request: the stub engine's, and that of the fake engine of tests."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from speculative.decode import DecodeSettings, Event
from speculative.decoder.responses import Response as Decoded
from speculative.errors import UserError

VERSION = "0.32.0"  # of the vLLM whose protocol this is
REASONS = {"end": "stop", "stop": "stop", "gate": "stop", "length": "length"}


@dataclass(eq=False)
class Job:
    """One request. `key`: seeds its random numbers. `events`: decoding events, or the exception that ended it."""

    key: str
    prompt_ids: list[int]
    settings: DecodeSettings | None
    body: dict[str, Any]
    chat: bool
    loop: asyncio.AbstractEventLoop
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    events: asyncio.Queue[Event | Exception] = field(default_factory=asyncio.Queue)
    cancelled: bool = False

    def say(self, event: Event | Exception) -> None:
        """Pass an event from the decoding thread to the waiting request."""
        with contextlib.suppress(RuntimeError):  # the server is gone
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class EngineCounts:
    """The counters of /metrics, with vLLM's names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", name.replace("_", " "), labels, registry=self.registry)

        self.blocks = counter("spec_decode_num_drafts")
        self.drafted = counter("spec_decode_num_draft_tokens")
        self.accepted = counter("spec_decode_num_accepted_tokens")
        self.places = counter("spec_decode_num_accepted_tokens_per_pos", "position")
        self.tokens = counter("generation_tokens")
        self.requests = counter("request_success", "finished_reason")
        self.running = Gauge("vllm:num_requests_running", "requests that are decoded", registry=self.registry)
        self.waiting = Gauge("vllm:num_requests_waiting", "requests that wait", registry=self.registry)

    def add_block(self, drafted: int, accepted: int) -> None:
        """Count one verified block of one response."""
        self.blocks.inc()
        self.drafted.inc(drafted)
        self.accepted.inc(accepted)
        for place in range(accepted):
            self.places.labels(str(place)).inc()


class ServedEngine:
    """An engine behind `Pages`: `job_of` reads a request, `submit` has it decoded, and the others say what its answer holds."""

    def __init__(self, name: str, gamma: int) -> None:
        self.name, self.gamma, self.counts = name, gamma, EngineCounts()

    def job_of(self, body: dict[str, Any], chat: bool) -> Job:
        """Make a job from a request's body. Raises UserError: an unsupported or invalid key."""
        raise NotImplementedError

    def submit(self, job: Job) -> None:
        """Queue a request."""
        raise NotImplementedError

    def models(self) -> dict[str, Any]:
        """The page of the models."""
        return {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "vllm", "created": 0}]}

    def head(self, job: Job, stream: bool = False) -> dict[str, Any]:
        """The keys of an answer, or of each event, that say nothing of the text."""
        kind = ("chat.completion.chunk" if stream else "chat.completion") if job.chat else "text_completion"
        name = "chatcmpl" if job.chat else "cmpl"
        return {"id": f"{name}-{job.id}", "object": kind, "created": int(time.time()), "model": self.name}

    def stats(self, job: Job, response: Decoded) -> dict[str, Any]:
        """The counts of `--per-request-spec-decode-metrics detailed`; empty without a draft."""
        # The first block is the prefill's token.
        accepted, drafted = response.accepted_counts[1:], response.drafted_counts[1:]
        return {
            "num_spec_steps": len(accepted),
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": sum(drafted),
            "num_spec_tokens": self.gamma,
            "acceptance_histogram": [accepted.count(j) for j in range(self.gamma + 1)],
            "per_step_accepted": accepted,
            "per_step_drafted": drafted,
        }

    def listed(self, response: Decoded, ids: list[int]) -> list[int] | None:
        """The token ids of a response or of a part of it, as the engine lists them; None if it lists none."""
        return ids


class Pages:
    """The server's routes."""

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine

    def app(self) -> Starlette:
        """The ASGI application."""
        pages = {"/v1/models": self.models, "/health": self.health, "/metrics": self.metrics, "/version": self.version}
        return Starlette(
            routes=[
                *(Route(path, page) for path, page in pages.items()),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    async def models(self, _: Request) -> Response:
        return JSONResponse(self.engine.models())

    async def health(self, _: Request) -> Response:
        return Response()

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def metrics(self, _: Request) -> Response:
        return Response(generate_latest(self.engine.counts.registry), media_type=CONTENT_TYPE_LATEST)

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, chat: bool) -> Response:
        try:
            body = json.loads(await request.body())
            if not isinstance(body, dict):
                raise UserError("the request is not a JSON object")
            job = self.engine.job_of(body, chat)
        except (UserError, ValueError, RecursionError) as error:
            return refusal(error)
        self.engine.submit(job)
        if body.get("stream"):
            return StreamingResponse(_stream(job, self.engine), media_type="text/event-stream")
        return await _whole(request, job, self.engine)


async def _events(job: Job) -> AsyncIterator[Event]:
    """Events until the response is complete. If the caller leaves early, the job is cancelled.

    Raises:
        Exception: the exception that ended decoding.
    """
    try:
        while True:
            event = await job.events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            if event.finish_reason is not None:
                return
    finally:
        job.cancelled = True


async def _whole(request: Request, job: Job, engine: ServedEngine) -> Response:
    async def left() -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(0.1)

    async def read() -> list[Event]:
        return [event async for event in _events(job)]

    reading, leaving = asyncio.create_task(read()), asyncio.create_task(left())
    await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if not reading.done():
        reading.cancel()
        return Response(status_code=499)
    try:
        events = reading.result()
    except Exception as error:
        return refusal(error, 500)
    choice = _choice(job, "".join(event.text for event in events), events[-1].finish_reason)
    response = events[-1].response
    answer = engine.head(job) | {"choices": [choice]} | _sums(job, response, engine)
    ids = engine.listed(response, response.response_ids) if job.body.get("return_token_ids") else None
    if ids is not None:
        choice |= {"token_ids": ids}
        (answer if job.chat else choice)["prompt_token_ids"] = job.prompt_ids
    return JSONResponse(answer)


async def _stream(job: Job, engine: ServedEngine) -> AsyncIterator[str]:
    head, first = engine.head(job, stream=True), True
    try:
        async for event in _events(job):
            choice = _choice(job, event.text, event.finish_reason, stream=True)
            told, ids = head | {"choices": [choice]}, None
            if job.body.get("return_token_ids"):
                ids = engine.listed(event.response, event.token_ids)
            if ids is not None:
                choice |= {"token_ids": ids}
                if first:
                    (told if job.chat else choice)["prompt_token_ids"] = job.prompt_ids
            first = False
            yield f"data: {json.dumps(told)}\n\n"
        if (job.body.get("stream_options") or {}).get("include_usage"):
            last = head | {"choices": []} | _sums(job, event.response, engine)
            yield f"data: {json.dumps(last)}\n\n"
    except UserError as error:
        yield f"data: {json.dumps(_fault(error, 500))}\n\n"
    yield "data: [DONE]\n\n"


def _choice(job: Job, text: str, reason: str | None, stream: bool = False) -> dict[str, Any]:
    said: dict[str, Any] = {"text": text}
    if job.chat:
        said = {"delta" if stream else "message": {"role": "assistant", "content": text}}
    return {"index": 0, **said, "logprobs": None, "finish_reason": REASONS.get(reason or ""), "stop_reason": None}


def _sums(job: Job, response: Decoded, engine: ServedEngine) -> dict[str, Any]:
    prompt, tokens, stats = len(job.prompt_ids), len(response.response_ids), engine.stats(job, response)
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    return {"usage": usage} | ({"metrics": {"speculative_decoding": stats}} if stats else {})


def _fault(error: Exception, status: int) -> dict[str, Any]:
    kind = "BadRequestError" if status == 400 else "InternalServerError"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": status}}


def refusal(error: Exception, status: int = 400) -> Response:
    return JSONResponse(_fault(error, status), status_code=status)
