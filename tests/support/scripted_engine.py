"""An engine in vLLM's protocol that answers every client alike, and does what the request's `user` tells it; it knows who left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

IDS, ACCEPTED, DRAFTED = [5, 6, 7, 8, 9, 10], [2, 1], [3, 3]  # a prefill's token, then two steps
STATS = {
    "num_spec_steps": 2,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 6,
    "num_spec_tokens": 3,
    "per_step_accepted": ACCEPTED,
    "per_step_drafted": DRAFTED,
}
USAGE = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}


@dataclass
class ScriptedEngine:
    """asked: (headers, body) of each request. left: how many clients left before the end. sent: bytes of floods."""

    name: str = "a"
    asked: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    left: int = 0
    sent: int = 0
    usage_asked_only: bool = False

    def app(self) -> Starlette:
        pages = [Route(f"/v1/{path}", self.answer, methods=["POST"]) for path in ("chat/completions", "completions")]
        return Starlette(
            routes=[*pages, Route("/v1/models", self.models), Route("/v1/embeddings", self.models, methods=["POST"])]
        )

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.name}]})

    async def answer(self, request: Request) -> Response:
        content = await request.body()
        self.asked.append((dict(request.headers), content))
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            return JSONResponse({"error": {"message": "not JSON"}}, 400)
        todo, chat = body.get("user"), "chat" in request.url.path
        if todo in ("400", "500"):
            return JSONResponse({"error": {"message": f"told to say {todo}"}}, int(todo))
        if todo == "silent":
            await self._wait(request)
            return Response(status_code=499)
        if body.get("stream"):
            return StreamingResponse(self._stream(body, todo, chat), media_type="text/event-stream")
        return JSONResponse(self._whole(body, chat, todo))

    async def _wait(self, request: Request) -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        self.left += 1

    def _whole(self, body: dict[str, Any], chat: bool, todo: str | None) -> dict[str, Any]:
        said: dict[str, Any] = {"message": {"role": "assistant", "content": "text"}} if chat else {"text": "text"}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": "stop"}
        top: dict[str, Any] = {
            "id": f"cmpl-{self.name}",
            "usage": USAGE,
            "metrics": {"speculative_decoding": self._stats(todo)},
        }
        if body.get("return_token_ids"):
            choice["token_ids"] = IDS
            (top if chat else choice)["prompt_token_ids"] = [1, 2, 3]
        return {**top, "choices": [choice]}

    def _stats(self, todo: str | None) -> dict[str, Any]:
        return {**STATS, "num_accepted_draft_tokens": 9} if todo == "odd" else STATS

    async def _stream(self, body: dict[str, Any], todo: str | None, chat: bool) -> AsyncIterator[bytes]:
        ended = False
        try:
            async for event in self._events(body, todo, chat):
                yield event
            ended = True
        finally:
            self.left += not ended

    async def _events(self, body: dict[str, Any], todo: str | None, chat: bool) -> AsyncIterator[bytes]:
        while todo == "flood":
            self.sent += 1 << 16
            yield b": " + b"x" * (1 << 16) + b"\n\n"
            await asyncio.sleep(0)
        for start in range(0, len(IDS), 2):
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if start + 2 >= len(IDS) else None}
            choice |= {"delta": {"content": f"t{start}"}} if chat else {"text": f"t{start}"}
            if body.get("return_token_ids"):
                choice["token_ids"] = IDS[start : start + 2]
                if not start:
                    choice["prompt_token_ids"] = [1, 2, 3]
            yield f"data: {json.dumps({'id': 'cmpl-1', 'choices': [choice]})}\n\n".encode()
            if todo == "hang":
                await asyncio.sleep(3600)
            if todo == "break":
                raise RuntimeError("told to break")
            await asyncio.sleep(0.01 if todo == "slowly" else 0)
        if not self.usage_asked_only or (body.get("stream_options") or {}).get("include_usage"):
            last = {"choices": [], "usage": USAGE, "metrics": {"speculative_decoding": self._stats(todo)}}
            yield f"data: {json.dumps(last)}\n\n".encode()
        yield b"data: [DONE]\n\n"
