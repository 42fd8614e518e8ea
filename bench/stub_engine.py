"""Our own decoder as a server with vLLM's protocol: the stub engine of tests, and of `make loop` without an installed engine.

    python bench/stub_engine.py TARGET DRAFT --port 8001 --gamma 3

Requests with the same settings are decoded as one batch; requests that arrive meanwhile form the next one. As in vLLM, the first token
of a response is not drafted, token ids are returned on request, and a stream's counts are in its usage chunk.
"""

from distill.faults import exit_status

import asyncio
import contextlib
import json
import sys
import threading
import time
import uuid
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from distill.config.command_line import run_program
from distill.config.target import TargetConfig
from distill.models.draft import load_draft
from distill.models.target import Target
from speculative.decode import STOP, DecodeSettings, Event, check_prompts, context_of, end_token_ids, generate
from speculative.decoder.responses import CommitGate
from speculative.drafters.draft import DRAFTINGS, Draft
from speculative.drafters.drafter import Drafter
from speculative.drafters.gamma import FixedGamma
from speculative.errors import UserError
from speculative.rules.processors import LogitsRules
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

VERSION = "0.32.0"  # of the vLLM whose protocol this is
MAX_TOKENS = 16  # vLLM's, of a completion that does not say
REFUSED = ("logprobs", "prompt_logprobs", "top_logprobs", "structured_outputs", "tools", "echo", "suffix")
REASONS = {"end": "stop", "stop": "stop", "gate": "stop", "length": "length"}


class PrefillFirst(FixedGamma):
    """Take the first token of a response from the target, as a prefill does. All rows of a call begin together."""

    def start(self, rows: int) -> None:
        self._begun = False

    def choose(self, active_R: Any) -> int:
        begun, self._begun = self._begun, True
        return self.max_gamma if begun else 0


@dataclass(eq=False)
class Job:
    """One request. `key`: seeds its random numbers. `events`: decoding events, or the exception that ended it."""

    key: str
    prompt_ids: list[int]
    settings: DecodeSettings
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


class StubEngine:
    """A pair of models and the thread that decodes with them.

    withheld: ids that no response may contain. A response ends before them (a commit gate), so it has fewer tokens than were accepted.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        gamma: int,
        rule: str,
        *,
        name: str,
        batch_size: int = 16,
        withheld: Sequence[int] = (),
    ) -> None:
        self.name, self.target, self.tokenizer, self.drafter = name, target.model, target.tokenizer, drafter
        self.gamma, self.rule, self.batch_size = gamma if drafter is not None else 0, rule, batch_size
        self.eos_ids, self.withheld = end_token_ids(self.target), frozenset(withheld)
        self.counts = EngineCounts()
        self._jobs: list[Job] = []
        self._arrived = threading.Condition()
        threading.Thread(target=self._decode_for_ever, daemon=True).start()

    def submit(self, job: Job) -> None:
        """Queue a request."""
        with self._arrived:
            self._jobs.append(job)
            self._arrived.notify()

    def _decode_for_ever(self) -> None:
        while True:
            batch = self._next_batch()
            try:
                self._decode(batch)
            except Exception as error:  # one failed batch does not stop the next
                for job in batch.values():
                    job.say(error)

    def _next_batch(self) -> dict[str, Job]:
        """The first waiting job and those with the same settings; at most one job per key, because a key gives one text."""
        with self._arrived:
            self.counts.running.set(0)
            self._arrived.wait_for(lambda: bool(self._jobs))
            self._jobs = [job for job in self._jobs if not job.cancelled]
            batch: dict[str, Job] = {}
            for job in self._jobs:
                if len(batch) < self.batch_size and job.settings == self._jobs[0].settings:
                    batch.setdefault(job.key, job)
            self._jobs = [job for job in self._jobs if batch.get(job.key) is not job]
            self.counts.waiting.set(len(self._jobs))
            self.counts.running.set(len(batch))
            return batch

    def _decode(self, batch: dict[str, Job]) -> None:
        if not batch:
            return
        jobs = list(batch.values())
        settings = jobs[0].settings
        events = generate(
            self.target,
            self.drafter,
            [(job.key, job.prompt_ids) for job in jobs],
            settings,
            batch_size=len(jobs),
            tokenizer=self.tokenizer,
            policy=PrefillFirst(settings.gamma),
            gate=self._gate(batch),
        )
        for event in events:
            response = event.response
            if response.blocks > 1:
                self.counts.add_block(response.drafted_counts[-1], response.accepted_counts[-1])
            self.counts.tokens.inc(len(event.token_ids))
            if event.finish_reason is not None:
                cancelled = jobs[event.index].cancelled
                self.counts.requests.labels("abort" if cancelled else REASONS[event.finish_reason]).inc()
            jobs[event.index].say(event)

    def _gate(self, batch: dict[str, Job]) -> CommitGate:
        """End cancelled responses, and responses before a withheld token."""
        return lambda key, _, token, __: STOP if batch[key].cancelled or token in self.withheld else None

    def job_of(self, body: dict[str, Any], chat: bool) -> Job:
        """Make a job from a request's body.

        Raises:
            UserError: an unsupported or invalid key.
        """
        asked = [name for name in REFUSED if body.get(name)]
        if (body.get("response_format") or {}).get("type", "text") != "text":
            asked.append("response_format")
        if body.get("n", 1) != 1 or asked:
            raise UserError(f"{', '.join(asked) or 'n > 1'}: not supported by this engine")
        if body.get("model") not in (None, self.name):
            raise UserError(f"The model `{body['model']}` does not exist; this engine serves `{self.name}`")
        ids = (
            self._chat_ids(body.get("messages"))
            if chat
            else self._prompt_ids(body.get("prompt"), body.get("add_special_tokens", True))
        )
        try:
            settings = self._settings(body, len(ids), chat)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(f"the request cannot be read: {error}") from error
        seed = body.get("seed")
        key = uuid.uuid4().hex if seed is None else f"{seed} {zlib.crc32(json.dumps(ids).encode())}"
        check_prompts(self.target, self.drafter, [(key, ids)], settings)
        return Job(key, ids, settings, body, chat, asyncio.get_running_loop())

    def _settings(self, body: dict[str, Any], prompt_tokens: int, chat: bool) -> DecodeSettings:
        def value(name: str, kind: Callable[[Any], Any], default: Any) -> Any:
            return default if body.get(name) is None else kind(body[name])

        sampling = SamplingSettings(
            value("temperature", float, 1.0),
            max(0, value("top_k", int, 0)),
            value("top_p", float, 1.0),
            value("min_p", float, 0.0),
        )
        context = context_of(self.target, self.drafter)[0] or prompt_tokens + MAX_TOKENS
        most = value(
            "max_completion_tokens", int, value("max_tokens", int, context - prompt_tokens if chat else MAX_TOKENS)
        )
        stop = value("stop", lambda given: (given,) if isinstance(given, str) else tuple(given), ())
        bias = tuple(sorted((int(token), float(number)) for token, number in value("logit_bias", dict, {}).items()))
        rules = LogitsRules(
            repetition_penalty=value("repetition_penalty", float, 1.0),
            bias=bias,
            allowed_ids=tuple(value("allowed_token_ids", tuple, ())),
        )
        rules.check(len(self.tokenizer))
        ends = () if body.get("ignore_eos") else self.eos_ids
        return DecodeSettings(
            sampling,
            self.gamma,
            Rule.named("greedy" if sampling.greedy else self.rule if self.gamma else "sample"),
            most,
            (*ends, *value("stop_token_ids", tuple, ())),
            rules=rules if rules.active else None,
            stop=stop,
            min_tokens=value("min_tokens", int, 0),
        )

    def _prompt_ids(self, prompt: Any, special: bool) -> list[int]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt, add_special_tokens=special)["input_ids"])
        if not isinstance(prompt, list) or not prompt or any(type(token) is not int for token in prompt):
            raise UserError("prompt: give a text or a list of token ids")
        return prompt

    def _chat_ids(self, messages: Any) -> list[int]:
        """Apply the tokenizer's chat template; without one, join the contents with newlines."""
        if not isinstance(messages, list) or any(
            not isinstance(turn, dict) or not isinstance(turn.get("content"), str) for turn in messages
        ):
            raise UserError("messages: give a list of turns with text content")
        if self.tokenizer.chat_template is None:
            return list(self.tokenizer("\n".join(turn["content"] for turn in messages))["input_ids"])
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


@dataclass(frozen=True)
class EngineOptions:
    """Serve a pair of models with our decoder and vLLM's protocol."""

    target: Annotated[str, typer.Argument(help="directory, hub id or `embedded`")]
    draft: Annotated[str, typer.Argument(help="a draft's directory, a run, or `none`")]
    port: Annotated[int, typer.Option(help="port to listen on")]
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1"
    gamma: Annotated[int, typer.Option(help="drafted tokens per block")] = 3
    rule: Annotated[str, typer.Option(help="acceptance rule when sampling: greedy-draft or sample")] = "greedy-draft"
    drafting: Annotated[str, typer.Option(help="autoregressive, or parallel: a block in one pass")] = DRAFTINGS[0]
    batch_size: Annotated[int, typer.Option(help="maximum batch size")] = 16
    threads: Annotated[int, typer.Option(help="torch threads")] = 1


class Pages:
    """The server's routes."""

    def __init__(self, engine: StubEngine) -> None:
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


async def _whole(request: Request, job: Job, engine: StubEngine) -> Response:
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


async def _stream(job: Job, engine: StubEngine) -> AsyncIterator[str]:
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


def _head(job: Job, engine: StubEngine, stream: bool = False) -> dict[str, Any]:
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
    """The counts of `--per-request-spec-decode-metrics detailed`; empty without a draft."""
    gamma = job.settings.gamma
    if not gamma:
        return {}
    # The first block is the prefill's token.
    accepted, drafted = last.response.accepted_counts[1:], last.response.drafted_counts[1:]
    stats = {
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": gamma,
        "acceptance_histogram": [accepted.count(j) for j in range(gamma + 1)],
        "per_step_accepted": accepted,
        "per_step_drafted": drafted,
    }
    return {"metrics": {"speculative_decoding": stats}}


def _fault(error: Exception, status: int) -> dict[str, Any]:
    kind = "BadRequestError" if status == 400 else "InternalServerError"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": status}}


def _refusal(error: Exception, status: int = 400) -> Response:
    return JSONResponse(_fault(error, status), status_code=status)


def open_engine(options: EngineOptions) -> StubEngine:
    """Load target and draft.

    Raises:
        UserError: a missing or incompatible model, or an unknown rule.
    """
    if options.rule not in ("greedy-draft", "sample"):
        raise UserError(f"--rule {options.rule}: give greedy-draft or sample")
    torch.set_num_threads(options.threads)
    target = Target(TargetConfig(path=options.target), torch.device("cpu"), what="target")
    how: Any = options.drafting
    drafter = None if options.draft == "none" else Draft(load_draft(options.draft, target), how).drafter()
    rule: Any = options.rule
    return StubEngine(target, drafter, options.gamma, rule, name=options.target, batch_size=options.batch_size)


def run(options: EngineOptions) -> int:
    """Serve a pair of models until interrupted."""
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
