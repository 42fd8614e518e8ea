"""Our own decoder as a server in vLLM's protocol: the engine of tests, and of `make loop` where none is installed.

    python -m distill.live.house_engine TARGET DRAFT --port 8001 --gamma 3

Requests that ask for the same settings are decoded as one batch; those that come meanwhile are the next. As in vLLM the first token
of a response is drafted by nobody, token ids are told when asked for, and a stream's counts stand in its usage chunk.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from distill.config.command_line import run_program
from distill.config.target import TargetConfig
from distill.faults import exit_status
from distill.live.house_decoding import REASONS, HouseEngine, Job
from distill.models.draft import load_draft
from distill.models.target import Target
from speculative.decode import Event
from speculative.drafters.draft import Draft
from speculative.drafters.parallel import DRAFTINGS
from speculative.errors import UserError

VERSION = "0.32.0"  # of the vLLM whose protocol this is


@dataclass(frozen=True)
class EngineOptions:
    """Our own decoder as a server in the protocol of vLLM."""

    target: Annotated[str, typer.Argument(help="directory, hub id or `embedded`")]
    draft: Annotated[str, typer.Argument(help="a draft's directory, a run, or `none`")]
    port: Annotated[int, typer.Option(help="where it listens")]
    host: Annotated[str, typer.Option(help="address to listen at")] = "127.0.0.1"
    gamma: Annotated[int, typer.Option(help="drafted tokens a block")] = 3
    rule: Annotated[str, typer.Option(help="how it accepts when sampling: greedy-draft or sample")] = "greedy-draft"
    drafting: Annotated[str, typer.Option(help="autoregressive, or parallel: a block in one pass")] = DRAFTINGS[0]
    batch_size: Annotated[int, typer.Option(help="most requests decoded together")] = 16
    threads: Annotated[int, typer.Option(help="of torch")] = 1


class Pages:
    """The server's addresses."""

    def __init__(self, engine: HouseEngine) -> None:
        self.engine = engine

    def app(self) -> Starlette:
        """The whole server."""
        pages = {"/v1/models": self.models, "/health": self.health, "/metrics": self.metrics, "/version": self.version}
        return Starlette(
            routes=[
                *(Route(path, page) for path, page in pages.items()),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    async def models(self, _: Request) -> Response:
        model = {"id": self.engine.name, "object": "model", "owned_by": "vllm", "created": 0}
        return JSONResponse({"object": "list", "data": [model]})

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
        except (UserError, ValueError) as error:
            return _refusal(error)
        self.engine.submit(job)
        if body.get("stream"):
            return StreamingResponse(_stream(job, self.engine), media_type="text/event-stream")
        return await _whole(request, job, self.engine)


async def _events(job: Job) -> AsyncIterator[Event]:
    """Until the response is whole; however it is left, the decoding does not go on for nobody.

    Raises:
        Exception: what ended the decoding.
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


async def _whole(request: Request, job: Job, engine: HouseEngine) -> Response:
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
        return _refusal(error, 500)
    choice = _choice(job, "".join(event.text for event in events), events[-1].finish_reason)
    if job.body.get("return_token_ids"):
        choice |= {"token_ids": events[-1].response.response_ids}
        if not job.chat:
            choice |= {"prompt_token_ids": job.prompt_ids}
    answer = _head(job, engine) | {"choices": [choice], "usage": _usage(job, events[-1])} | _counts(job, events[-1])
    if job.body.get("return_token_ids") and job.chat:
        answer |= {"prompt_token_ids": job.prompt_ids}
    return JSONResponse(answer)


async def _stream(job: Job, engine: HouseEngine) -> AsyncIterator[str]:
    head, with_ids, first = _head(job, engine, stream=True), bool(job.body.get("return_token_ids")), True
    try:
        async for event in _events(job):
            choice = _choice(job, event.text, event.finish_reason, stream=True)
            if with_ids:
                choice |= {"token_ids": event.token_ids}
            told = head | {"choices": [choice]}
            if with_ids and first:
                (told if job.chat else choice)["prompt_token_ids"] = job.prompt_ids
            first = False
            yield f"data: {json.dumps(told)}\n\n"
        if (job.body.get("stream_options") or {}).get("include_usage"):
            last = head | {"choices": [], "usage": _usage(job, event)} | _counts(job, event)
            yield f"data: {json.dumps(last)}\n\n"
    except UserError as error:
        yield f"data: {json.dumps(_fault(error, 500))}\n\n"
    yield "data: [DONE]\n\n"


def _head(job: Job, engine: HouseEngine, stream: bool = False) -> dict[str, Any]:
    kind = ("chat.completion.chunk" if stream else "chat.completion") if job.chat else "text_completion"
    name = "chatcmpl" if job.chat else "cmpl"
    return {"id": f"{name}-{job.id}", "object": kind, "created": int(time.time()), "model": engine.name}


def _choice(job: Job, text: str, reason: str | None, stream: bool = False) -> dict[str, Any]:
    said: dict[str, Any] = {"text": text}
    if job.chat:
        said = {"delta" if stream else "message": {"role": "assistant", "content": text}}
    return {"index": 0, **said, "logprobs": None, "finish_reason": REASONS.get(reason or ""), "stop_reason": None}


def _usage(job: Job, last: Event) -> dict[str, int]:
    prompt, said = len(job.prompt_ids), len(last.response.response_ids)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def _counts(job: Job, last: Event) -> dict[str, Any]:
    """What `--per-request-spec-decode-metrics detailed` brings; nothing where nobody drafts."""
    gamma = job.settings.gamma
    if not gamma:
        return {}
    # The first block is the prefill's token.
    accepted, drafted = last.response.accepted_counts[1:], last.response.drafted_counts[1:]
    stats = {
        "num_spec_steps": len(accepted), "num_accepted_draft_tokens": sum(accepted), "num_draft_tokens": sum(drafted),
        "num_spec_tokens": gamma, "acceptance_histogram": [accepted.count(j) for j in range(gamma + 1)],
        "per_step_accepted": accepted, "per_step_drafted": drafted,
    }  # fmt: skip
    return {"metrics": {"speculative_decoding": stats}}


def _fault(error: Exception, status: int) -> dict[str, Any]:
    kind = "BadRequestError" if status == 400 else "InternalServerError"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": status}}


def _refusal(error: Exception, status: int = 400) -> Response:
    return JSONResponse(_fault(error, status), status_code=status)


def open_engine(options: EngineOptions) -> HouseEngine:
    """Loads the pair.

    Raises:
        UserError: models that are not there or do not go together, an unknown rule.
    """
    if options.rule not in ("greedy-draft", "sample"):
        raise UserError(f"--rule {options.rule}: greedy-draft or sample")
    torch.set_num_threads(options.threads)
    target = Target(TargetConfig(path=options.target), torch.device("cpu"), what="target")
    how: Any = options.drafting
    drafter = None if options.draft == "none" else Draft(load_draft(options.draft, target), how).drafter()
    rule: Any = options.rule
    return HouseEngine(target, drafter, options.gamma, rule, name=options.target, batch_size=options.batch_size)


def run(options: EngineOptions) -> int:
    """Serves a pair with our own decoder until it is ended."""
    try:
        engine = open_engine(options)
        uvicorn.run(
            Pages(engine).app(), host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=2
        )
    except (Exception, KeyboardInterrupt) as error:
        return exit_status(error)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(run))
