"""An engine in vLLM's or llama-server's protocol whose step costs are known: it decodes nothing, waits, and streams
`accepted` + 1 tokens a block.
"""

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


@dataclass
class TimedEngine:
    """gamma 0: without a draft. counts: whether a stream tells its blocks. with_ids: whether it tells token ids.

    llama: as llama-server, which sends a part for each token, and in it the counts so far. most: requests that it decodes at a time.
    """

    gamma: int
    accepted: int = 0
    fixed: float = 0.004
    per_token: float = 0.0002
    draft: float = 0.001
    counts: bool = True
    with_ids: bool = True
    llama: bool = False
    most: int = 1000
    running: int = 0
    seen: set[tuple[tuple[int, ...], str]] = field(default_factory=set)

    def app(self) -> Starlette:
        answers = Route("/v1/completions", self.complete, methods=["POST"])
        return Starlette(routes=[answers, Route("/v1/models", self.models), Route("/version", self.version)])

    async def models(self, _: Request) -> Response:
        return JSONResponse(
            {"object": "list", "data": [{"id": "timed", "owned_by": "llamacpp" if self.llama else "vllm"}]}
        )

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": "0.32.0"})

    async def complete(self, request: Request) -> Response:
        body = json.loads(await request.body())
        if not body.get("stream"):
            return JSONResponse({"choices": [{"text": "", "finish_reason": "length"}]})
        assert body["ignore_eos"]
        place = tuple(body["prompt"]), body.get("cache_salt")
        assert self.llama or place not in self.seen, "its prompt would be in vLLM's prefix cache"
        self.seen.add(place)
        if self.llama:
            assert not body["cache_prompt"]
            assert body["timings_per_token"]
        return StreamingResponse(self.stream(body["max_tokens"]), media_type="text/event-stream")

    async def stream(self, most: int) -> AsyncIterator[str]:
        queued = self.running >= self.most
        while self.running >= self.most:
            await asyncio.sleep(0.001)
        self.running += 1
        # Longer than a busy machine's client takes to read the end of the response before.
        await asyncio.sleep(0.25 * queued)
        said, blocks = 0, -1
        while said < most:
            await asyncio.sleep(self.fixed + self.per_token * self.running * (self.gamma + 1) + self.gamma * self.draft)
            ids = [5] * min(most - said, self.accepted + 1 if said else 1)
            said, blocks = said + len(ids), blocks + 1
            if self.llama:
                yield self.parts(len(ids), said, blocks, most)
                continue
            choice: dict[str, Any] = {"index": 0, "text": "x"} | ({"token_ids": ids} if self.with_ids else {})
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        self.running -= 1
        if self.llama:
            return
        stats = {
            "num_spec_steps": blocks,
            "num_accepted_draft_tokens": blocks * self.accepted,
            "num_draft_tokens": blocks * self.gamma,
            "num_spec_tokens": self.gamma,
        }
        if self.gamma and self.counts:
            yield f"data: {json.dumps({'choices': [], 'metrics': {'speculative_decoding': stats}})}\n\n"
        yield "data: [DONE]\n\n"

    def parts(self, new: int, said: int, blocks: int, most: int) -> str:
        """A part for each token of a block. The second token of the response is part of a character: it comes with the third."""
        drafted = sum(min(self.gamma, most - 1 - block * (self.accepted + 1) - 1) for block in range(blocks))
        counts = {"draft_n": drafted, "draft_n_accepted": said - 1 - blocks} if self.gamma and drafted else {}
        found = ""
        for token in range(said - new + 1, said + 1):
            timings = {"timings": {"predicted_n": token, **counts}}
            found += f"data: {json.dumps({'choices': [{'text': 'x', 'logprobs': None}], **timings})}\n\n" * (token != 2)
        return found
